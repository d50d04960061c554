"""A key for some models gets one answer for a name that does not exist and for one that it may not use, everywhere."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from modelctl import Client
from protocol import verbs
from protocol.errors import WireError
from supervisor.keys.store import token_id
from tests.keyed import Keyed, free_port
from tests.serving import WITHIN, engine

HIDDEN, ABSENT = "hidden", "absent"
FORMS = ("{}", "{}:covert", "{}:1", "{}-alias", "{}-alias:covert", "op-{}", "op-{}:covert")
"""Names of the hidden model, and names that nothing has. The key may use models named ``op*``."""
MESSAGES = [{"role": "user", "content": "x"}]
VERBS: dict[str, dict[str, Any]] = {
    **{
        verb: {}
        for verb in (
            *("status", "usage", "start", "stop", "unload", "sleep", "wake", "restart", "reload", "logs"),
            *("events", "metrics", "settings"),
        )
    },
    "log_level": {"level": "info"},
    "tokenize": {"prompt": "x"},
    "detokenize": {"token_ids": b"\0\0\0\0"},
    "chat_template": {},
}
NAME_NO_MODEL = {"models", "requests", "ended_requests", "story", "config", "shutdown", "cancel_request"}
NAME_NO_MODEL |= {"keys", "new_key", "set_key", "revoke_key"}
POSTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/chat/completions": {"messages": MESSAGES, "keep_alive": "5m", "thinking_token_budget": 5, "unknown": 1},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/token/encode": {"text": "x"},
    "/v1/token/decode": {"tokens": [1]},
    "/v1/model/load": {},
    "/v1/model/unload": {},
}
GETS = (
    "/v1/models/{}", "/v1/model?model={}", "/props?model={}", "/tokenizer_info?model={}", "/v1/usage?model={}",
    "/v1/logs?model={}", "/v1/events?model={}", "/readyz?model={}",
)  # fmt: skip


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    hidden = engine(aliases=["hidden-alias", "op-hidden"], variants={"covert": {"sampling": {"max_tokens": 3}}})
    port = free_port()
    models, gateway = {"open": engine(), "hidden": hidden}, {"listen": port}
    with Keyed(models, {"all": "infer"}, gateway=gateway, default_model="op-hidden") as keyed:
        keyed.new("some", "infer,status,admin", models=("op*",))
        keyed.gateway_port = port  # type: ignore[attr-defined]
        keyed.token = keyed.new_http("web", "infer,status,admin", models=("op*",))  # type: ignore[attr-defined]
        yield keyed


@pytest.fixture(scope="module")
def client(keyed: Keyed) -> Iterator[Client]:
    with keyed.client("some") as client:
        yield client


def called(client: Client, verb: str, **params: Any) -> str:
    try:
        return repr(client.call(verb, **params))
    except WireError as e:
        return repr(e.to_wire())


def generated(client: Client, model: str) -> str:
    try:
        return client.complete(model, "x", max_tokens=1).text
    except WireError as e:
        return repr(e.to_wire())


def asked(keyed: Keyed, method: str, path: str, body: dict[str, Any] | None, token: str | None) -> str:
    """Return the status and the body of an answer, and the headers but for those that differ each time."""
    headers = {"x-modelctl-page": "1"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    port = keyed.gateway_port  # type: ignore[attr-defined]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        if response.headers.get_content_type() == "application/json":
            found = json.loads(text)
            found.pop("request_id", None)
            text = json.dumps(found).encode()
        told = {name: value for name, value in response.headers.items() if "id" not in name and name != "date"}
        told.pop("content-length", None)
        return f"{response.status} {told} {text.decode()}"


def same(hidden: str, absent: str, what: str) -> None:
    assert hidden.replace(HIDDEN, ABSENT) == absent, what


def test_every_verb_is_tried() -> None:
    assert verbs.VERBS.keys() == VERBS.keys() | NAME_NO_MODEL


@pytest.mark.parametrize("form", FORMS)
def test_verbs_and_requests_over_zeromq(client: Client, form: str) -> None:
    hidden, absent = form.format(HIDDEN), form.format(ABSENT)
    for verb, params in VERBS.items():
        same(called(client, verb, model=hidden, **params), called(client, verb, model=absent, **params), verb)
    same(generated(client, hidden), generated(client, absent), "generate")


@pytest.mark.parametrize("form", FORMS)
def test_endpoints_of_the_gateway(keyed: Keyed, form: str) -> None:
    hidden, absent = form.format(HIDDEN), form.format(ABSENT)
    token: str = keyed.token  # type: ignore[attr-defined]
    for path, body in POSTS.items():
        answers = [asked(keyed, "POST", path, {"model": name} | body, token) for name in (hidden, absent)]
        same(*answers, path)
    for verb in ("load", "stop", "restart", "unload", "reload", "sleep", "wake"):
        path = f"/v1/models/{{}}/{verb}"
        answers = [asked(keyed, "POST", path.format(name), None, token) for name in (hidden, absent)]
        same(*answers, path)
    for path in GETS:
        answers = [asked(keyed, "GET", path.format(name), None, token) for name in (hidden, absent)]
        same(*answers, path)
    for path in ("/readyz?model={}", "/v1/models/{}", "/props?model={}"):
        answers = [asked(keyed, "GET", path.format(name), None, None) for name in (hidden, absent, "open")]
        assert len({answer.replace(HIDDEN, ABSENT) for answer in answers}) == 1, path


def test_what_names_no_model_tells_of_none_that_is_hidden(keyed: Keyed, client: Client) -> None:
    token: str = keyed.token  # type: ignore[attr-defined]
    seen = [
        called(client, "shutdown"),
        called(client, "reload"),
        called(client, "tokenize", prompt="x"),
        generated(client, ""),
        *(called(client, verb) for verb in ("models", "status", "requests", "events", "metrics", "usage", "logs")),
        *(asked(keyed, "GET", path, None, token) for path in (
            "/v1/models", "/v1/model", "/v1/template/list", "/metrics", "/v1/usage", "/props",
            "/v1/events", "/v1/logs",
        )),
        *(asked(keyed, "POST", path, body, token) for path, body in POSTS.items()),
        asked(keyed, "POST", "/v1/reload", None, token),
    ]  # fmt: skip
    for answer in seen:
        assert HIDDEN not in answer


def test_a_wrong_models_yaml_tells_a_key_for_some_models_nothing_of_the_others(keyed: Keyed) -> None:
    serving = keyed.serving
    text = serving.config.read_text()
    try:
        with keyed.client("some") as client:
            assert called(client, "reload", model="openx") == called(client, "reload", model="openx")
            assert HIDDEN not in called(client, "reload", model="openx")
            serving.config.write_text(text.replace("hidden-alias", "open"))
            told = called(client, "reload", model="open")
            assert "models.yaml cannot be used" in told
            assert HIDDEN not in told
    finally:
        serving.config.write_text(text)


def test_the_reason_of_a_state_names_no_hidden_model() -> None:
    """A model was evicted for one that the key may not use. Neither its state nor its events say for which."""
    models = {"open": engine(lazy=True), HIDDEN: engine(lazy=True)}
    groups = {"few": {"models": list(models), "loaded": 1}}
    with Keyed(models, {"ops": "admin"}, groups=groups) as keyed, keyed.serving.client() as owner:
        token = keyed.new_http("some", "infer,status", models=("op*",))
        for name in models:
            owner.complete(name, "x", max_tokens=1)
        key = {"on_behalf_of": token_id(token)}
        (seen,) = owner.call("status", **key)["models"]
        assert seen["reason"] == "evicted for another model (group few: 1 at once)"
        told = owner.call("events", **key)["events"]
        assert any("evicted for another model" in event["message"] for event in told)
        assert HIDDEN not in json.dumps([seen, told])
        assert keyed.serving.status("open")["reason"] == "evicted for hidden (group few: 1 at once)"
