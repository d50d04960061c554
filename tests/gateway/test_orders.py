"""Scripts load and unload models over HTTP. Web pages of other sites cannot."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.openai.models import figures_of
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore, token_id
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

RIGHTS = {"ops": "infer,status,admin", "watcher": "status", "guest": "infer"}
MODELS = {
    "m": engine(
        aliases=["folder/M-exl2"],
        description="for tests",
        variants={"brief": {"sampling": {"max_tokens": 3}}},
        context=8192,
    ),
    "n": engine(lazy=True),
    "s": {"model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "autostart": True},
}
ORDERS = [f"/v1/models/m/{verb}" for verb in ("load", "unload", "reload", "sleep", "wake", "stop", "restart")]
ORDERS += ["/v1/reload"]
KEY_ORDERS = [("POST", "/v1/keys"), ("PATCH", "/v1/keys/guest"), ("DELETE", "/v1/keys/guest")]
ORDERS += ["/models/m/unload/", "/v1/model/load", "/v1/model/unload", "/unload", "/v1/unload"]


class Http:
    """A gateway, and the tokens of its keys. Without a store the gateway asks for no keys."""

    def __init__(
        self, serving: Serving, port: int, tokens: dict[str, str] | None = None, store: KeyStore | None = None
    ) -> None:
        self.serving, self.port, self.tokens, self.store = serving, port, tokens or {}, store

    def ask(self, method: str, path: str, body: Any = None, key: str = "", **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["authorization"] = f"Bearer {self.tokens[key]}"
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)) as connection:
            connection.request(method, path, text, sent)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def generations(self) -> tuple[list[int], list[tuple[str, str, int]], list[dict[str, Any]]]:
        """Return the numbers of the reloads, and of the processes, and the list of keys."""
        seen, keys = self.serving.overview(), [] if self.store is None else self.store.entries()
        turnovers = [turnover["number"] for turnover in seen["supervisor"]["turnovers"]]
        return turnovers, [(m["name"], m["state"], m["generation"]) for m in seen["models"]], keys


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys")
    tokens = {name: store.add_token(name, parse_rights(rights)) for name, rights in RIGHTS.items()}
    tokens["other"] = store.add_token("other", parse_rights("infer,status,admin"), models=("n",))
    port = free_port()
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory) as serving:
        yield Http(serving, port, tokens, store)


@pytest.fixture(scope="module")
def unkeyed() -> Iterator[Http]:
    port = free_port()
    with Serving(MODELS, gateway={"listen": port, "auth": "none"}) as serving:
        yield Http(serving, port)


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


def test_a_script_stops_restarts_and_reloads(keyed: Http) -> None:
    before = keyed.serving.status("m")["generation"]
    status, reply = keyed.ask("POST", "/v1/models/m/restart", key="ops")
    assert (status, reply["generation"]) == (200, before + 1)
    wait_until(lambda: keyed.serving.status("m")["generation"] > before)
    keyed.serving.wait_state("m", "ready")
    with keyed.serving.client() as client, closing(client.generate("m", "x", max_tokens=4000)) as stream:
        next(stream)
        assert keyed.ask("POST", "/v1/models/m/stop", {}, key="ops")[1]["state"] == "draining"
        assert keyed.ask("POST", "/v1/models/m/stop", {"now": True}, key="ops")[0] == 200
        keyed.serving.wait_state("m", "stopped")
    assert keyed.ask("POST", "/v1/completions", {"model": "m", "prompt": "x"}, key="ops")[0] == 503
    assert keyed.ask("POST", "/v1/models/m/load", key="ops")[0] == 200
    keyed.serving.wait_state("m", "ready")
    config = keyed.serving.config
    text = config.read_text()
    config.write_text(text.replace("folder/M-exl2", "folder/other"))
    try:
        assert isinstance(keyed.ask("POST", "/v1/reload", key="ops")[1]["turnover"], int)
        wait_until(lambda: keyed.ask("GET", "/v1/models/folder/other", key="ops")[0] == 200)
        config.write_text("models: 5")
        status, reply = keyed.ask("POST", "/v1/reload", key="ops")
        assert (status, "nothing is changed" in reply["error"]["message"]) == (400, True)
    finally:
        config.write_text(text)
        assert keyed.ask("POST", "/v1/reload", key="ops")[0] == 200
    assert keyed.ask("POST", "/v1/reload", key="other")[0] == 403, "it concerns models that the key may not know"


def test_a_model_is_described_to_keys_that_may_know_it(keyed: Http) -> None:
    keyed.serving.wait_state("m", "ready")
    before = keyed.ask("GET", "/v1/models/m", key="watcher")[1]["modelctl"]["figures"]
    prompt = {"model": "m", "prompt": "same " * 400, "max_tokens": 20}
    for _ in range(2):
        assert keyed.ask("POST", "/v1/completions", prompt, key="ops")[0] == 200
    too_long = prompt | {"max_tokens": 10**6, "cut_to_context": False}
    assert keyed.ask("POST", "/v1/completions", too_long, key="ops")[0] == 400
    described = keyed.ask("GET", "/v1/models/folder/M-exl2", key="watcher")[1]
    about, figures = described["modelctl"], described["modelctl"]["figures"]
    assert (described["description"], about["aliases"]) == ("for tests", ["folder/M-exl2"])
    assert about["variants"] == ["brief"]
    worker = about["workers"][0]
    assert (worker["engine"], worker["context"], worker["chat"]) == (MODELS["m"]["engine"], 8192, True)
    assert {"tool_format", "reasoning", "template", "attention", "restarts", "load_seconds"} <= worker.keys()
    assert not {"log", "last_exit"} & worker.keys(), "they have lines of the log"
    assert figures["finished"] - before["finished"] == 2
    assert figures["errors"] - before["errors"] == 1
    assert figures["errors_by_name"]["context_overflow"] == before["errors_by_name"].get("context_overflow", 0) + 1
    assert figures["prompt_tokens"] - before["prompt_tokens"] >= 800
    assert figures["tokens"] - before["tokens"] == 40
    assert 0 <= figures["cached_share"] <= 1
    assert figures["time_to_first_token_s"] > 0
    settings = {one["key"].removeprefix("models.m."): one for one in about["settings"]}
    assert settings["description"]["value"] == "for tests"
    assert settings["description"]["source"].startswith("models.yaml:")
    assert settings["variants"]["value"] == "{brief: {sampling: {max_tokens: 3}}}"
    assert (settings["max_batch_size"]["value"], settings["max_batch_size"]["source"]) == ("8", "default")
    idle = keyed.ask("GET", "/v1/models/s", key="ops")[1]["modelctl"]["figures"]
    assert idle["finished"] == 0
    assert {idle[name] for name in ("time_to_first_token_s", "tokens_per_s", "queue_s", "cached_share")} == {None}
    told = keyed.ask("GET", "/v1/models/m", key="guest")[1]["modelctl"]
    assert (told["workers"], told["settings"], told["figures"]) == (None, None, None)
    assert keyed.ask("GET", "/v1/models/m", key="other")[0] == 404


def test_the_figures_of_a_model_are_those_of_the_metrics() -> None:
    """Two requests: their first tokens came after 0.2 s and 0.4 s, and then 30 tokens in 1.5 s."""
    histograms = {
        "time_to_first_token_seconds": {"counts": [0, 1, 1], "sum": 0.6},
        "inter_token_latency_seconds": {"counts": [30, 0, 0], "sum": 1.5},
    }
    tokens = {"prompt": 800, "cached": 200, "draft_accepted": 0, "draft_rejected": 0}
    ended = {"histograms": histograms, "tokens": tokens, "ends": {"stop": 2}, "errors": {}}
    found = figures_of(ended, {"finished": 2, "errors": 0})
    assert found["time_to_first_token_s"] == pytest.approx(0.3)
    assert found["tokens_per_s"] == pytest.approx(20)
    assert (found["cached_share"], found["queue_s"], found["finished"]) == (0.25, None, 2)


def test_the_settings_are_those_that_were_read_and_not_those_of_the_disk(keyed: Http) -> None:
    config = keyed.serving.config
    text = config.read_text()

    def described() -> str:
        about = keyed.ask("GET", "/v1/models/m", key="ops")[1]["modelctl"]["settings"]
        return next(str(one["value"]) for one in about if one["key"] == "models.m.description")

    try:
        config.write_text(text.replace("for tests", "for others"))
        assert described() == "for tests"
        assert keyed.ask("POST", "/v1/models/m/reload", key="ops")[0] == 200
        wait_until(lambda: described() == "for others")
    finally:
        config.write_text(text)
        assert keyed.ask("POST", "/v1/reload", key="ops")[0] == 200
        wait_until(lambda: described() == "for tests")
        keyed.serving.wait_state("m", "ready")


def test_a_log_and_the_events_are_followed(keyed: Http) -> None:
    status, first = keyed.ask("GET", "/v1/logs?model=n&lines=1", key="ops")
    assert (status, first["object"], len(first["lines"]) <= 1) == (200, "logs", True)
    seen = keyed.ask("GET", "/v1/events?limit=1", key="watcher")[1]
    assert (seen["object"], len(seen["events"])) == ("events", 1)
    keyed.serving.order("start", model="n")
    keyed.serving.wait_state("n", "ready")
    keyed.serving.order("unload", model="n")
    keyed.serving.wait_state("n", "unloaded")
    news = keyed.ask("GET", f"/v1/events?after={seen['last']}", key="watcher")[1]
    assert min(event["number"] for event in news["events"]) == seen["last"] + 1
    assert {"n"} <= {event["model"] for event in news["events"]}
    for name in ("n", "m"):
        of_model = keyed.ask("GET", f"/v1/events?after={seen['last']}&model={name}", key="watcher")[1]["events"]
        known = [event for event in of_model if event["number"] <= news["last"]]
        assert known == [event for event in news["events"] if event["model"] == name]
    after = first["position"]
    fresh = keyed.ask("GET", f"/v1/logs?model=n&after={after}", key="ops")[1]
    assert any("ready" in line for line in fresh["lines"])
    assert not set(first["lines"]) & set(fresh["lines"])
    again = keyed.ask("GET", f"/v1/logs?model=n&after={fresh['position']}", key="ops")[1]
    assert (again["lines"], again["position"]) == ([], fresh["position"])
    assert keyed.ask("GET", "/v1/logs", key="ops")[1]["lines"], "the supervisor's own"


def test_who_may_read_logs_and_events_and_how(keyed: Http, unkeyed: Http) -> None:
    for path, allowed in (("/v1/logs", ("ops",)), ("/v1/events", ("ops", "watcher", "other"))):
        assert keyed.ask("GET", path)[0] == 401
        for key in keyed.tokens:
            assert keyed.ask("GET", path, key=key)[0] == (200 if key in allowed else 403), (path, key)
    assert {event["model"] for event in keyed.ask("GET", "/v1/events", key="other")[1]["events"]} <= {"n"}
    for path, name in (
        ("/v1/logs?lines=many", "lines"), ("/v1/logs?lines=0", "lines"), ("/v1/logs?after=5", "after"),
        ("/v1/logs?model=nosuch", "model"), ("/v1/events?model=nosuch", "model"), ("/v1/events?after=-1", "after"),
        ("/v1/events?after=1e3", "after"), ("/v1/events?limit=513", "limit"), ("/v1/events?lines=5", "lines"),
    ):  # fmt: skip
        status, reply = keyed.ask("GET", path, key="ops")
        assert (status, reply["error"]["param"]) == (404 if "nosuch" in path else 400, name)
    status, reply = unkeyed.ask("GET", "/v1/logs")
    assert status == 403
    assert "set `gateway: {auth: keys}` in models.yaml" in reply["error"]["message"]
    assert unkeyed.ask("GET", "/v1/events")[0] == 200


def test_a_script_lists_follows_and_cancels_requests(keyed: Http) -> None:
    def of(path: str, key: str) -> list[dict[str, Any]]:
        status, reply = keyed.ask("GET", path, key=key)
        assert status == 200, reply
        found: list[dict[str, Any]] = reply["requests"]
        return found

    before = keyed.ask("GET", "/v1/requests/ended?limit=1", key="watcher")[1]
    body = {"model": "m", "prompt": "secret words", "max_tokens": 3}
    assert keyed.ask("POST", "/v1/completions", body, key="guest")[0] == 200
    with keyed.serving.client() as client:
        stream = client.generate("m", "secret words", max_tokens=4000)
        next(stream)
        (running,) = of("/v1/requests", "watcher")
        assert (running["model"], running["key"], running["state"]) == ("m", None, "running")
        assert of("/v1/requests", "guest") == [], "it belongs to no key of this person"
        path = f"/v1/requests/{running['id']}/cancel"
        for key, status in ((None, 401), ("watcher", 403), ("guest", 404), ("other", 404)):
            assert keyed.ask("POST", path, key=key or "")[0] == status, key
        assert keyed.ask("GET", path, key="ops")[0] == 405
        assert keyed.ask("POST", path, {"now": True}, key="ops")[1]["error"]["param"] == "now"
        assert keyed.ask("POST", path, key="ops", sec_fetch_site="cross-site")[0] == 403
        assert keyed.ask("POST", path, key="ops") == (200, {"id": running["id"], "cancelled": True})
        assert stream.complete().finish_reason == "cancelled"
        status, reply = keyed.ask("POST", path, key="ops")
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (404, "id", "not_found")
    follow = f"/v1/requests/ended?after={before['last']}"
    first, second = of(follow, "watcher")
    assert [name.partition("_")[0].partition("-")[0] for name in first["trace_ids"]] == ["req", "cmpl"]
    assert (first["key"], first["tokens"], first["finish_reason"]) == ("guest", 3, "length")
    assert (second["id"], second["key"], second["finish_reason"]) == (running["id"], None, "cancelled")
    assert "secret" not in str((first, second, running))
    assert of(follow, "guest") == [first]
    assert of(follow, "other") == [], "it may not use the model"
    for path, name in (
        ("/v1/requests?limit=501", "limit"), ("/v1/requests?after=5", "after"),
        ("/v1/requests/ended?after=-1", "after"), ("/v1/requests/ended?limit=1001", "limit"),
    ):  # fmt: skip
        status, reply = keyed.ask("GET", path, key="ops")
        assert (status, reply["error"]["param"]) == (400, name), path


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
    status, reply = keyed.ask("POST", "/v1/models/m/stop", {"force": True}, key="ops")
    assert (status, reply["error"]["param"], "known is now" in reply["error"]["message"]) == (400, "force", True)
    assert keyed.ask("POST", "/v1/models/m/stop", {"now": "yes"}, key="ops")[1]["error"]["param"] == "now"
    assert keyed.ask("POST", "/v1/models/m/restart", {"now": True}, key="ops")[1]["error"]["param"] == "now"
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


@pytest.mark.parametrize(("method", "path"), [*(("POST", path) for path in ORDERS), *KEY_ORDERS])
@pytest.mark.parametrize("auth", ["keys", "none"])
def test_a_page_of_another_site_orders_nothing(
    request: pytest.FixtureRequest, auth: str, method: str, path: str
) -> None:
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
    named = '{"name": "evil", "rights": ["admin"]}' if path == "/v1/keys" else '{"model_name": "m"}'
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        for body, headers in (("model_name=m", form), (named, plain), (None, session)):
            for site in ({}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}):
                assert asked.ask(method, path, body, origin=origin, **headers, **site)[0] == 403
    for site in ("cross-site", "same-site"):  # without Origin
        assert asked.ask(method, path, named, sec_fetch_site=site, **plain)[0] == 403
    image = asked.ask("GET", path, sec_fetch_site="cross-site", sec_fetch_dest="image", **session)[0]
    assert image == (401 if auth == "keys" else 403 if path == "/v1/keys" else 405)
    rebound = {"host": f"evil.example:{asked.port}", "origin": f"http://evil.example:{asked.port}"}
    assert asked.ask(method, path, named, **rebound, sec_fetch_site="same-origin", **plain)[0] == 421
    if auth == "keys":
        assert asked.ask(method, path, named, **plain)[0] == 401, "a cookie alone is no token"
    assert asked.generations() == before


def test_without_keys_a_program_of_this_machine_gives_orders(unkeyed: Http) -> None:
    assert unkeyed.ask("POST", "/v1/models/m/unload")[0] == 200
    unkeyed.serving.wait_state("m", "unloaded")
    assert unkeyed.ask("POST", "/v1/models/m/load")[0] == 200
    unkeyed.serving.wait_state("m", "ready")


def test_a_key_for_some_models_sees_no_name_of_another_model(keyed: Http) -> None:
    """Neither in turnovers, nor in the limits of other keys."""
    assert keyed.store is not None
    keyed.tokens["of-m"] = keyed.store.add_token("of-m", parse_rights("infer"), models=("m", "hidden-*"))

    def supervisor() -> Any:
        with keyed.serving.client() as client:
            return client.call("status", on_behalf_of=token_id(keyed.tokens["other"]))["supervisor"]

    numbers = [keyed.ask("POST", f"/v1/models/{name}/reload", key="ops")[1]["turnover"] for name in ("s", "n")]
    wait_until(lambda: [one["number"] for one in supervisor()["turnovers"] if one["number"] in numbers] == numbers[1:])
    assert [key["name"] for key in supervisor()["http_keys"]["keys"]] == ["other"]
    assert "hidden-" not in json.dumps(supervisor())


def test_a_parameter_that_occurs_twice_is_refused(keyed: Http) -> None:
    for path in ("requests?limit=1&limit=2", "events?after=1&after=2", "usage?model=m&model=n", "keys?limit=5&limit=5"):
        status, reply = keyed.ask("GET", f"/v1/{path}", key="ops")
        assert (status, "occurs twice" in reply["error"]["message"]) == (400, True), path
