"""Administrators list, make, change and revoke keys over HTTP, and cannot lock themselves out by accident."""

import fcntl
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelctl import Client
from protocol.errors import ErrorCode, WireError
from supervisor.calls import MOST
from supervisor.keys.records import format_clients, format_time, parse_rights
from supervisor.keys.store import CLIENTS, KeyStore, token_id
from supervisor.requests.usage_ledger import DAY_S, day_text
from supervisor.usage.writer import Count, UsageStore
from tests.gateway.test_orders import Http
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, is_helper, wait_until

ADMIN = "infer,status,admin"
LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "keep_alive_s")
PROMPT = {"model": "m", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    directory = tmp_path_factory.mktemp("keys")
    store = KeyStore(directory / "keys")
    rights = {"ops": ADMIN, "second": ADMIN, "watcher": "status", "guest": "infer"}
    tokens = {name: store.add_token(name, parse_rights(words)) for name, words in rights.items()}
    tokens["some"] = store.add_token("some", parse_rights(ADMIN), models=("m",))
    end = time.time() + 86_400
    tokens["brief"] = store.add_token("brief", parse_rights(ADMIN), expires=end, tokens_per_day=1000)
    store.add("wired", parse_rights("infer"), directory / "wired.key")
    port = free_port()
    models = {"m": engine(aliases=["folder/M"]), "n": engine(lazy=True)}
    with Serving(models, gateway={"listen": port}, keys=store.directory) as serving:
        yield Http(serving, port, tokens, store)


def listed(keyed: Http, name: str) -> dict[str, Any] | None:
    keys = keyed.ask("GET", "/v1/keys", key="ops")[1]["keys"]
    found: dict[str, Any] | None = next((key for key in keys if key["name"] == name), None)
    return found


def test_a_key_is_made_changed_and_revoked(keyed: Http) -> None:
    wanted = {"name": "web", "models": ["m"], "tokens_per_day": 5000, "expires": "30d", "keep_alive_s": "2h"}
    status, made = keyed.ask("POST", "/v1/keys", wanted, key="ops")
    assert status == 200, made
    keyed.tokens["web"] = made["token"]
    key = made["key"]
    assert (key["rights"], key["models"], key["tokens_per_day"], key["keep_alive_s"]) == (["infer"], ["m"], 5000, 7200)
    assert (key["http"], key["own"], key["last_used"], made["notes"]) == (True, False, None, [])
    assert format_time(time.time() + 29 * 86_400) < key["expires"] < format_time(time.time() + 31 * 86_400)
    assert keyed.ask("POST", "/v1/completions", PROMPT, key="web")[0] == 200
    seen = listed(keyed, "web")
    assert seen is not None
    assert format_time(time.time() - 60) < seen["last_used"] <= format_time(time.time())
    assert seen == key | {"last_used": seen["last_used"]}

    changes = {"models": None, "tokens_per_day": None, "requests_per_minute": 1, "expires": "2036-01-31T12:00:00Z"}
    status, changed = keyed.ask("PATCH", "/v1/keys/web", changes, key="ops")
    assert (status, changed["key"]["requests_per_minute"], changed["key"]["models"]) == (200, 1, None)
    assert changed["key"] == listed(keyed, "web")
    assert (changed["key"]["expires"], changed["key"]["keep_alive_s"]) == ("2036-01-31T12:00:00Z", 7200), "kept"
    assert [keyed.ask("POST", "/v1/completions", PROMPT, key="web")[0] for _ in range(2)] == [200, 429]

    assert keyed.ask("DELETE", "/v1/keys/web", key="ops") == (200, {"revoked": "web"})
    assert listed(keyed, "web") is None
    assert keyed.ask("GET", "/v1/models", key="web")[0] == 401
    log = keyed.serving.log()
    for done in ("made", "changed", "revoked"):
        assert f"key 'web' is {done} by key 'ops'" in log
    assert made["token"] not in log + keyed.serving.log("gateway")


def test_the_list_has_no_secret_and_comes_in_parts(keyed: Http) -> None:
    assert keyed.store is not None
    status, answer = keyed.ask("GET", "/v1/keys", key="ops")
    text = json.dumps(answer)
    assert (status, answer["more"]) == (200, False)
    for entry in keyed.store.entries():
        assert entry.get("token_sha256", entry.get("public_key")) not in text
    for token in keyed.tokens.values():
        assert token not in text
        assert token_id(token) not in text
    names = [key["name"] for key in answer["keys"]]
    assert names == sorted(names) == sorted(entry["name"] for entry in keyed.store.entries())
    assert {key["name"]: key["http"] for key in answer["keys"]}["wired"] is False
    assert [key["name"] for key in answer["keys"] if key["own"]] == ["ops"]
    first = keyed.ask("GET", "/v1/keys?limit=2", key="ops")[1]
    rest = keyed.ask("GET", f"/v1/keys?after={first['keys'][-1]['name']}", key="ops")[1]
    assert ([key["name"] for key in first["keys"] + rest["keys"]], first["more"]) == (names, True)
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=1001", "limit"), ("name=x", "name")):
        refused = keyed.ask("GET", f"/v1/keys?{query}", key="ops")
        assert (refused[0], refused[1]["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", {"name": "new"}),
        ("PATCH", "/v1/keys/guest", {"rights": ["admin"]}),
        ("DELETE", "/v1/keys/guest", None),
    ],
)
def test_only_administrators_of_all_models_manage_keys(keyed: Http, method: str, path: str, body: Any) -> None:
    assert keyed.store is not None
    before = keyed.store.entries()
    for key in ("watcher", "guest", "some"):
        assert keyed.ask(method, path, body, key=key)[0] == 403, key
    assert keyed.ask(method, path, body)[0] == 401
    assert keyed.store.entries() == before


def test_what_is_wrong_is_named(keyed: Http) -> None:
    assert keyed.store is not None
    before = keyed.store.entries()
    for body, param, words in (
        ({}, "name", "name is missing"),
        ({"name": "Not A Name"}, "name", "is no name of a key"),
        ({"name": "guest"}, "name", "there is a key 'guest' already"),
        ({"name": "x", "rights": ["root"]}, "rights", "is no right: known are"),
        ({"name": "x", "rights": []}, "rights", "is no right"),
        ({"name": "x", "rights": 5}, "rights", "must be a list"),
        ({"name": "x", "rights": ["gateway"]}, "rights", "an HTTP key cannot have the right gateway"),
        ({"name": "x", "models": ["a b"]}, "models", "is no name or pattern of models"),
        ({"name": "x", "models": [["m"]]}, "models", "must be a list"),
        ({"name": "x", "models": ["folder/M"]}, "models", "is no name or pattern"),
        ({"name": "x", "expires": "tomorrow"}, "expires", "write 12h, 30d or 8w"),
        ({"name": "x", "expires": 5}, "expires", "must be a text"),
        ({"name": "x", "expires": "2020-01-31T12:00:00Z"}, "expires", "must be a time to come"),
        ({"name": "x", "tokens_per_day": 0}, "tokens_per_day", "must be an integer from 1"),
        ({"name": "x", "tokens_per_day": True}, "tokens_per_day", "must be an integer from 1"),
        ({"name": "x", "tokens_per_day": 1.5}, "tokens_per_day", "must be an integer from 1"),
        ({"name": "x", "tokens_per_day": 1 << 70}, "tokens_per_day", ""),
        ({"name": "x", "max_in_flight": "many"}, "max_in_flight", "must be an integer from 1"),
        ({"name": "x", "keep_alive_s": "soon"}, "keep_alive_s", "is no lifetime"),
        ({"name": "x", "token": "mctl_mine"}, "token", "known are name, rights"),
        ({"name": "x", "verb": "shutdown"}, "verb", "known are name, rights"),
        ({"name": "x", "on_behalf_of": "0" * 64}, "on_behalf_of", "known are name, rights"),
    ):  # fmt: skip
        status, reply = keyed.ask("POST", "/v1/keys", body, key="ops")
        assert (status, words in reply["error"]["message"]) == (400, True), (body, reply)
        assert reply["error"]["param"] == param or not words, (body, reply)
    for method, body in (("PATCH", {"rights": ["infer"]}), ("DELETE", None)):
        for name in ("nobody", "Not%20A%20Name"):
            status, reply = keyed.ask(method, f"/v1/keys/{name}", body, key="ops")
            assert (status, reply["error"]["code"]) == (404, "not_found")
    for nothing in ({}, {"rights": None}):
        assert keyed.ask("PATCH", "/v1/keys/guest", nothing, key="ops")[0] == 400
    assert keyed.ask("PATCH", "/v1/keys/guest", {"name": "other"}, key="ops")[1]["error"]["param"] == "name"
    assert keyed.ask("POST", "/v1/keys", {"name": "x" * 20_000}, key="ops")[0] == 413
    assert keyed.store.entries() == before


def test_a_model_that_is_not_there_yet_is_noted(keyed: Http) -> None:
    status, made = keyed.ask(
        "POST", "/v1/keys", {"name": "early", "rights": None, "models": ["m", "mm", "later*"]}, key="ops"
    )
    assert status == 200
    assert [("did you mean 'm'" in note, "has no model" in note) for note in made["notes"]] == [
        (True, True),
        (False, True),
    ]
    assert keyed.ask("DELETE", "/v1/keys/early", key="ops")[0] == 200


def test_an_administrator_cannot_lock_itself_out(keyed: Http) -> None:
    for method, body, param in (
        ("DELETE", None, "name"),
        ("PATCH", {"rights": ["infer", "status"]}, "rights"),
        ("PATCH", {"models": ["m"]}, "models"),
        ("PATCH", {"expires": "1m"}, "expires"),
    ):
        status, reply = keyed.ask(method, "/v1/keys/ops", body, key="ops")
        assert (status, reply["error"]["param"]) == (403, param)
        assert "would take the right admin away from it: use another key" in reply["error"]["message"]
    assert keyed.ask("PATCH", "/v1/keys/ops", {"rights": ["admin", "infer", "status"]}, key="ops")[0] == 200
    assert keyed.ask("PATCH", "/v1/keys/second", {"rights": ["infer"]}, key="ops")[0] == 200, "another one does it"
    assert keyed.ask("PATCH", "/v1/keys/ops", {"rights": ["infer"]}, key="second")[0] == 403
    assert keyed.ask("PATCH", "/v1/keys/second", {"rights": ["infer", "status", "admin"]}, key="ops")[0] == 200


def test_a_key_gives_no_other_key_more_than_it_has(keyed: Http) -> None:
    assert keyed.store is not None
    own = next(entry for entry in keyed.store.entries() if entry["name"] == "brief")
    for body, param in (
        ({}, "expires"), ({"expires": "2d", "tokens_per_day": 10}, "expires"), ({"expires": "1h"}, "tokens_per_day"),
        ({"expires": "1h", "tokens_per_day": 1001}, "tokens_per_day"),
    ):  # fmt: skip
        status, reply = keyed.ask("POST", "/v1/keys", {"name": "child", **body}, key="brief")
        assert (status, reply["error"]["param"]) == (403, param), reply
        assert "it can give no other key more" in reply["error"]["message"]
    for name, body in (("brief", {"expires": None}), ("brief", {"tokens_per_day": None}), ("guest", {"expires": None})):
        status, reply = keyed.ask("PATCH", f"/v1/keys/{name}", body, key="brief")
        assert status == (200 if name == "guest" else 403), "what a key has already is not given"
    status, made = keyed.ask("POST", "/v1/keys", {"name": "child", "expires": "1h", "tokens_per_day": 9}, key="brief")
    assert status == 200
    assert made["key"]["expires"] < own["expires"]
    for body in ({"rights": ["infer", "admin"]}, {"rights": ["infer", "status"], "expires": None}):
        status, reply = keyed.ask("PATCH", "/v1/keys/guest", body, key="brief")
        assert (status, reply["error"]["param"]) == (403, "expires"), "an old key would get more than its giver has"
    assert keyed.ask("PATCH", "/v1/keys/some", {"models": None}, key="brief")[0] == 403
    assert keyed.ask("PATCH", "/v1/keys/some", {"models": ["m", "n"]}, key="brief")[0] == 403
    assert keyed.ask("PATCH", "/v1/keys/some", {"rights": ["admin", "status", "infer"]}, key="brief")[0] == 200
    more = {"rights": ["infer", "status"], "expires": "1h", "tokens_per_day": 9}
    assert keyed.ask("PATCH", "/v1/keys/child", more, key="brief")[0] == 200
    assert keyed.ask("DELETE", "/v1/keys/child", key="brief")[0] == 200


@contextmanager
def locked(store: KeyStore) -> Iterator[None]:
    """Hold the lock of the list, as a command that changes it does."""
    descriptor = os.open(store.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def changing(keyed: Http) -> list[psutil.Process]:
    """Return the processes that carry out orders."""
    children = psutil.Process(keyed.serving.pid).children()
    return [child for child in children if is_helper(child, "key writer", "supervisor.keys.change")]


class Order(threading.Thread):
    """A request on a thread of its own. ``answer`` is there when it has ended."""

    def __init__(self, keyed: Http, method: str, path: str, key: str) -> None:
        super().__init__()
        self._asked = lambda: keyed.ask(method, path, key=key)
        self.start()

    def run(self) -> None:
        self.answer = self._asked()


def test_orders_wait_for_a_command_and_are_judged_when_their_turn_comes(keyed: Http) -> None:
    """Meanwhile tokens flow. A key that was revoked while its order waited changes nothing."""
    assert keyed.store is not None
    keyed.tokens["third"] = keyed.store.add_token("third", parse_rights(ADMIN))
    with locked(keyed.store):
        orders = [Order(keyed, "DELETE", "/v1/keys/guest", "third") for _ in range(MOST)]
        wait_until(lambda: len(changing(keyed)) == MOST)
        with keyed.serving.client() as client:
            assert client.generate("m", "x", max_tokens=20).complete().text
        assert keyed.ask("DELETE", "/v1/keys/nobody", key="ops")[0] == 429, "too many wait"
        left = [entry for entry in keyed.store.entries() if entry["name"] != "third"]
        (keyed.store.directory / CLIENTS).write_text(format_clients(left))
    for order in orders:
        order.join(WITHIN)
        assert order.answer[0] == 401, order.answer
    assert listed(keyed, "guest") is not None
    wait_until(lambda: not changing(keyed))


def test_the_last_use_outlives_the_supervisor(tmp_path: Path) -> None:
    """Of earlier requests the ledger has the days. Later questions count, too."""
    store, port = KeyStore(tmp_path / "keys"), free_port()
    tokens = {name: store.add_token(name, parse_rights(ADMIN)) for name in ("ops", "guest", "new")}
    today = int(time.time() // DAY_S)
    last, before, other = (day_text(today - ago) for ago in (1, 2, 3))
    days = {last: token_id(tokens["guest"]), before: token_id(tokens["guest"]), other: "f" * 64}
    with closing_for_good(UsageStore(tmp_path / "usage.sqlite3", "earlier")) as earlier:
        earlier.write([Count(day, key_id, "guest", "m", 1, 2, 0, 3) for day, key_id in days.items()])
    usage = {"file": str(tmp_path / "usage.sqlite3")}
    with Serving({"m": engine()}, gateway={"listen": port}, keys=store.directory, usage=usage) as serving:
        keyed = Http(serving, port, tokens, store)
        wait_until(lambda: (listed(keyed, "guest") or {})["last_used"] == f"{last}T00:00:00Z")
        assert (listed(keyed, "new") or {})["last_used"] is None
        assert keyed.ask("GET", "/v1/models", key="guest")[0] == 200
        assert (listed(keyed, "guest") or {})["last_used"] > format_time(time.time() - 60)


@contextmanager
def closing_for_good(store: UsageStore) -> Iterator[UsageStore]:
    """Close a store, and give up its lock, which it keeps until its process ends."""
    with closing(store):
        yield store
    os.close(store._lock)


def test_a_killed_change_is_answered(keyed: Http) -> None:
    assert keyed.store is not None
    with locked(keyed.store):
        order = Order(keyed, "DELETE", "/v1/keys/guest", "ops")
        wait_until(lambda: changing(keyed))[0].kill()
        order.join(WITHIN)
    status, reply = order.answer
    assert (status, "list the keys, and try again" in reply["error"]["message"]) == (503, True)
    assert listed(keyed, "guest") is not None


def test_an_unknown_key_gets_no_list_of_thousands(keyed: Http) -> None:
    assert keyed.store is not None
    clients = keyed.store.directory / CLIENTS
    before = clients.read_text()
    entries = keyed.store.entries()
    some = [{**entries[0], "name": f"k{n}", "token_sha256": token_id(str(n))} for n in range(1000)]
    clients.write_text(format_clients(entries + some))
    try:
        message = keyed.ask("DELETE", "/v1/keys/nobody", key="ops")[1]["error"]["message"]
        assert message.endswith(f" and {len(entries) + 1000 - 20} more")
        assert len(message) < 1000
    finally:
        clients.write_text(before)


def test_a_session_of_the_page_manages_keys_with_the_pages_header(keyed: Http) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", keyed.port, timeout=WITHIN)) as connection:
        connection.request(
            "POST", "/page/sign-in", json.dumps({"token": keyed.tokens["ops"]}), {"x-modelctl-page": "1"}
        )
        response = connection.getresponse()
        cookie = str(response.headers["set-cookie"]).partition(";")[0]
        session = json.loads(response.read())["session"]
    assert keyed.ask("GET", "/v1/keys", cookie=cookie)[0] == 401
    own = {"cookie": cookie, "x_modelctl_page": session}
    assert keyed.ask("GET", "/v1/keys", **own)[0] == 200
    assert keyed.ask("POST", "/v1/keys", {"name": "from-page"}, **own)[0] == 200
    assert keyed.ask("DELETE", "/v1/keys/from-page", **own, sec_fetch_site="cross-site")[0] == 403
    assert keyed.ask("DELETE", "/v1/keys/from-page", **own, sec_fetch_site="same-origin")[0] == 200


def test_without_keys_they_are_off_and_the_line_is_named() -> None:
    port = free_port()
    with Serving({"m": engine()}, gateway={"listen": port, "auth": "none"}) as serving:
        unkeyed = Http(serving, port)
        for method, path in (
            ("GET", "/v1/keys"),
            ("POST", "/v1/keys"),
            ("PATCH", "/v1/keys/x"),
            ("DELETE", "/v1/keys/x"),
        ):
            status, reply = unkeyed.ask(method, path, {"name": "evil", "rights": ["admin"]})
            assert (status, "set `gateway: {auth: keys}` in models.yaml" in reply["error"]["message"]) == (403, True)


def test_the_supervisors_own_user_orders_on_the_admin_socket(keyed: Http) -> None:
    with Client(runtime_dir=keyed.serving.runtime_dir) as client, pytest.raises(WireError) as raised:
        client.call("new_key", name="mine")
    assert raised.value.code is ErrorCode.UNSUPPORTED
    made = keyed.serving.order("new_key", name="mine", rights=["admin"])
    assert made["token"].startswith("mctl_")
    assert keyed.serving.order("revoke_key", name="mine") == {}
