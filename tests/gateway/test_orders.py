"""Scripts load and unload models over HTTP. Web pages of other sites cannot."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

RIGHTS = {"ops": "infer,status,admin", "watcher": "status", "guest": "infer"}
MODELS = {
    "m": engine(aliases=["folder/M-exl2"]),
    "n": engine(lazy=True),
    "s": {"model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "autostart": True},
}
ORDERS = [f"/v1/models/m/{verb}" for verb in ("load", "unload", "reload", "sleep", "wake")]
ORDERS += ["/models/m/unload/", "/v1/model/load", "/v1/model/unload", "/unload", "/v1/unload"]


class Http:
    """A gateway, and the tokens of its keys. ``own``: the gateway asks for no keys."""

    def __init__(self, serving: Serving, port: int, tokens: dict[str, str]) -> None:
        self.serving, self.port, self.tokens = serving, port, tokens

    def ask(self, method: str, path: str, body: Any = None, key: str = "", **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["authorization"] = f"Bearer {self.tokens[key]}"
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)) as connection:
            connection.request(method, path, text, sent)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def generations(self) -> list[tuple[str, str, int]]:
        return [(m["name"], m["state"], m["generation"]) for m in self.serving.overview()["models"]]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys")
    tokens = {name: store.add_token(name, parse_rights(rights)) for name, rights in RIGHTS.items()}
    tokens["other"] = store.add_token("other", parse_rights("infer,status,admin"), models=("n",))
    port = free_port()
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory) as serving:
        yield Http(serving, port, tokens)


@pytest.fixture(scope="module")
def unkeyed() -> Iterator[Http]:
    port = free_port()
    with Serving(MODELS, gateway={"listen": port, "auth": "none"}) as serving:
        yield Http(serving, port, {})


def test_a_script_loads_and_unloads_a_model_and_sees_how_far_it_is(keyed: Http) -> None:
    status, reply = keyed.ask("POST", "/v1/models/folder%2FM-exl2/unload", key="ops")
    assert (status, reply["model"], set(reply["workers"])) == (200, "m", {"m"})
    keyed.serving.wait_state("m", "unloaded")
    described = keyed.ask("GET", "/v1/models/m", key="ops")[1]["modelctl"]
    assert (described["state"], described["workers"][0]["reason"]) == ("unloaded", "unload ordered by key ops")
    assert described["workers"][0]["progress"] is None
    assert keyed.ask("GET", "/v1/models/m", key="guest")[1]["modelctl"]["workers"] is None
    assert keyed.ask("POST", "/v1/models/m/load", {}, key="ops")[0] == 200
    keyed.serving.wait_state("m", "ready")
    before = keyed.serving.status("m")["generation"]
    assert keyed.ask("POST", "/v1/models/m/reload", key="ops")[0] == 200
    wait_until(lambda: keyed.serving.status("m")["generation"] > before and keyed.serving.status("m")["pid"])
    keyed.serving.wait_state("m", "ready")
    assert keyed.ask("POST", "/v1/models/s/sleep", key="ops")[0] == 200
    keyed.serving.wait_state("s", "asleep")
    assert {"model": "s", "state": "sleeping"} in keyed.ask("GET", "/running", key="ops")[1]["running"]
    assert keyed.ask("POST", "/v1/models/s/wake", key="ops")[0] == 200
    keyed.serving.wait_state("s", "ready")


def test_the_names_of_other_servers_work(keyed: Http) -> None:
    assert keyed.ask("POST", "/v1/model/load", {"model_name": "n"}, key="ops")[0] == 200
    keyed.serving.wait_state("n", "ready")
    assert keyed.ask("POST", "/v1/model/unload", {"name": "n"}, key="ops")[0] == 200
    keyed.serving.wait_state("n", "unloaded")
    for path in ("/unload", "/v1/model/unload"):
        status, reply = keyed.ask("POST", path, key="ops")
        assert (status, reply) == (200, {"unloaded": ["m", "s"]})
        for name in "ms":
            keyed.serving.wait_state(name, "unloaded")
        assert keyed.ask("GET", "/running", key="ops") == (200, {"running": []})
        for name in "ms":
            assert keyed.ask("POST", f"/v1/models/{name}/load", key="ops")[0] == 200
            keyed.serving.wait_state(name, "ready")
    prompt = {"model": "m", "prompt": "x", "max_tokens": 3}
    assert keyed.ask("POST", "/v1/completions", prompt, key="ops")[1]["choices"][0]["text"] == answer("x", 3)


def test_what_cannot_be_ordered_is_refused_by_name(keyed: Http) -> None:
    for path in ("/v1/models/nosuch/load", "/v1/models/m%3A1/unload"):
        assert keyed.ask("POST", path, key="ops")[0] == 404
    assert keyed.ask("POST", "/v1/models/m/unload", key="other")[0] == 404, "the key may not know the model"
    status, reply = keyed.ask("POST", "/v1/model/load", {"model_name": "m", "max_seq_len": 9}, key="ops")
    assert (status, reply["error"]["param"]) == (400, "max_seq_len")
    assert "models.yaml" in reply["error"]["message"]
    assert keyed.ask("POST", "/v1/model/load", {"model_name": 5}, key="ops")[0] == 400
    assert keyed.ask("POST", "/v1/model/load", key="ops")[1]["error"]["param"] == "model_name"
    status, reply = keyed.ask("POST", "/v1/models/m/sleep", key="ops")
    assert (status, "cannot sleep" in reply["error"]["message"]) == (400, True)
    assert keyed.serving.status("n")["state"] == "unloaded"
    status, reply = keyed.ask("POST", "/v1/models/n/wake", key="ops")
    assert (status, reply["error"]["code"]) == (409, "model_not_running"), (
        "the state is in the way, and not a fault here"
    )


@pytest.mark.parametrize("path", ORDERS)
def test_only_admin_gives_orders_and_only_by_post(keyed: Http, path: str) -> None:
    before = keyed.generations()
    body = {"model_name": "m"} if "/model/" in path or (path.endswith("unload") and "models" not in path) else None
    for key in ("watcher", "guest"):
        assert keyed.ask("POST", path, body, key=key)[0] == 403
    assert keyed.ask("POST", path, body)[0] == 401
    status, reply = keyed.ask("GET", path, key="ops")
    assert status == 405
    assert (
        f"curl -X POST -H 'Authorization: Bearer TOKEN' http://127.0.0.1:{keyed.port}{path}"
        in reply["error"]["message"]
    )
    assert keyed.ask("GET", path)[0] == 401
    assert keyed.generations() == before


@pytest.mark.parametrize("path", ORDERS)
@pytest.mark.parametrize("auth", ["keys", "none"])
def test_a_page_of_another_site_orders_nothing(request: pytest.FixtureRequest, auth: str, path: str) -> None:
    """A form, an image, a fetch without CORS, and a name of the attacker's that points here."""
    asked: Http = request.getfixturevalue("keyed" if auth == "keys" else "unkeyed")
    before = asked.generations()
    session: dict[str, str] = {}
    if auth == "keys":  # what a browser in which somebody is signed in sends along
        with closing(http.client.HTTPConnection("127.0.0.1", asked.port, timeout=WITHIN)) as connection:
            body = json.dumps({"token": asked.tokens["ops"]})
            connection.request("POST", "/page/sign-in", body, {"x-modelctl-page": "1"})
            session = {"cookie": str(connection.getresponse().headers["set-cookie"]).partition(";")[0]}
    form = {"content_type": "application/x-www-form-urlencoded", **session}
    plain = {"content_type": "text/plain", **session}
    named = '{"model_name": "m"}'
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        for body, headers in (("model_name=m", form), (named, plain), (None, session)):
            for site in ({}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}):
                assert asked.ask("POST", path, body, origin=origin, **headers, **site)[0] == 403
    for site in ("cross-site", "same-site"):  # without Origin
        assert asked.ask("POST", path, named, sec_fetch_site=site, **plain)[0] == 403
    image = asked.ask("GET", path, sec_fetch_site="cross-site", sec_fetch_dest="image", **session)[0]
    assert image == (401 if auth == "keys" else 405)
    rebound = {"host": f"evil.example:{asked.port}", "origin": f"http://evil.example:{asked.port}"}
    assert asked.ask("POST", path, named, **rebound, sec_fetch_site="same-origin", **plain)[0] == 421
    if auth == "keys":
        assert asked.ask("POST", path, named, **plain)[0] == 401, "a cookie alone is no token"
    assert asked.generations() == before


def test_without_keys_a_program_of_this_machine_gives_orders(unkeyed: Http) -> None:
    assert unkeyed.ask("POST", "/v1/models/m/unload")[0] == 200
    unkeyed.serving.wait_state("m", "unloaded")
    assert unkeyed.ask("POST", "/v1/models/m/load")[0] == 200
    unkeyed.serving.wait_state("m", "ready")
