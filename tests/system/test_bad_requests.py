"""The error for a client's mistake names the field, its value and its limit. Other clients are not affected."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Generate
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import Serving, engine


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(context=100), "off": engine(autostart=False)}) as serving:
        pid = serving.status("a")["pid"]
        yield serving
        status = serving.status("a")
        assert (status["pid"], status["restarts"], status["state"]) == (pid, 0, "ready"), "the worker was harmed"
        serving.wait_idle("a")


CASES: list[tuple[dict[str, Any], ErrorCode, str, list[str]]] = [
    ({"model": "b"}, ErrorCode.MODEL_NOT_FOUND, "model", ["'b'", "a, off"]),
    ({"model": "../a"}, ErrorCode.MODEL_NOT_FOUND, "model", ["'../a'"]),
    ({"prompt": "x" * 100}, ErrorCode.CONTEXT_OVERFLOW, "prompt", ["100 tokens", "99", "100"]),
    ({"prompt": "x" * 50_000}, ErrorCode.CONTEXT_OVERFLOW, "prompt", ["50000 bytes"]),
    ({"prompt": "x" * 90, "max_tokens": 11}, ErrorCode.CONTEXT_OVERFLOW, "max_tokens", ["11", "10"]),
    ({"max_tokens": -1}, ErrorCode.INVALID_REQUEST, "max_tokens", ["is -1", "at least 0"]),
    ({"prompt_logprobs": 21}, ErrorCode.INVALID_REQUEST, "prompt_logprobs", ["is 21", "at most 20"]),
    (
        {"prompt": "abc", "prompt_logprobs": 1, "prompt_logprobs_from": 3},
        ErrorCode.INVALID_REQUEST,
        "prompt_logprobs_from",
        ["is 3", "has 3 tokens"],
    ),
    ({"max_tokens": True}, ErrorCode.INVALID_REQUEST, "max_tokens", ["is true"]),
    ({"max_tokens": "5"}, ErrorCode.INVALID_REQUEST, "max_tokens", ["string"]),
    ({"temprature": 0.5}, ErrorCode.INVALID_REQUEST, "temprature", ["did you mean 'temperature'"]),
    ({"temperature": float("nan")}, ErrorCode.INVALID_REQUEST, "temperature", ["nan", "0 to 10"]),
    ({"temperature": float("inf")}, ErrorCode.INVALID_REQUEST, "temperature", ["inf"]),
    ({"temperature": -0.1}, ErrorCode.INVALID_REQUEST, "temperature", ["-0.1", "at least 0"]),
    ({"top_p": 0}, ErrorCode.INVALID_REQUEST, "top_p", ["more than 0"]),
    ({"top_k": -2}, ErrorCode.INVALID_REQUEST, "top_k", ["at least 0"]),
    ({"stop": {"a": 1}}, ErrorCode.INVALID_REQUEST, "stop", ["a string, or an array of strings"]),
    ({"stop": [""]}, ErrorCode.INVALID_REQUEST, "stop.0", ["at least 1"]),
    ({"prompt": ""}, ErrorCode.INVALID_REQUEST, "prompt", ["no tokens"]),
    ({"prompt": None, "token_ids": [256]}, ErrorCode.INVALID_REQUEST, "token_ids", ["vocabulary of 256"]),
    ({"prompt": None, "messages": [{"role": "boss", "content": ""}]}, ErrorCode.INVALID_REQUEST, "messages.0.role", []),
]


@pytest.mark.parametrize(("changes", "code", "field", "says"), CASES, ids=[str(c[0])[:40] for c in CASES])
def test_the_error_names_field_value_and_limit(
    serving: Serving, changes: dict[str, Any], code: ErrorCode, field: str, says: list[str]
) -> None:
    request: dict[str, Any] = {"model": "a", "prompt": "p", "max_tokens": 5, **changes}
    with serving.client() as client:
        neighbour = client.generate("a", "neighbour", max_tokens=50)
        with pytest.raises(WireError) as caught:
            client.complete(request.pop("model"), request.pop("prompt"), **request)
        error = caught.value
        assert (error.code, error.field) == (code, field)
        assert all(word in error.message for word in says), error.message
        assert not error.retryable
        assert neighbour.complete().text == answer("neighbour", 50)


def test_a_stopped_model_says_how_to_start_it(serving: Serving) -> None:
    with serving.client() as client, pytest.raises(WireError, match="modelctl start off") as caught:
        client.complete("off", "p", max_tokens=1)
    assert caught.value.code is ErrorCode.MODEL_NOT_RUNNING


@pytest.mark.parametrize(
    ("route", "request_id", "field"),
    [({"resume": 1}, 1, "route.resume"), ({"priority": 9}, 1, "route.priority"), ({}, 0, "request")],
)
def test_the_head_of_a_request_is_checked_too(
    serving: Serving, route: dict[str, object], request_id: int, field: str
) -> None:
    with RawClient(serving.runtime_dir) as client:
        client.send(Generate(request_id, "a", route, pack_body({"prompt": "p"})))
        client.barrier()
        ((request, error),) = client.errors
        assert (request, error["field"]) == (request_id, field)


def test_orders_are_for_the_admin_socket_and_requests_for_the_front(serving: Serving) -> None:
    with serving.client() as client, pytest.raises(WireError) as caught:
        client.call("stop", model="a", reply_timeout=60)
    assert (caught.value.code, caught.value.field) == (ErrorCode.UNSUPPORTED, "verb")
    with RawClient(serving.runtime_dir, admin=True) as operator:
        operator.generate(1, "a", "p", max_tokens=1)
        operator.barrier()
        assert [error["name"] for _, error in operator.errors] == ["unsupported"]
    assert serving.status("a")["state"] == "ready"


@pytest.mark.parametrize(
    ("verb", "params", "field", "says"),
    [
        (
            "exec",
            {},
            "verb",
            "unknown verb 'exec': known are .*detokenize, ended_requests, events, .*models, .*tokenize",
        ),
        ("start", {}, "model", "is missing"),
        ("start", {"model": "b"}, "model", "no model 'b'"),
        ("start", {"model": 5}, "model", "must be a string"),
        ("stop", {"model": "a", "now": 1}, "now", "must be true or false"),
        ("stop", {"model": "a", "path": "/"}, "path", "unknown parameter 'path'"),
        ("status", {"x": 1}, "x", "unknown parameter 'x'"),
    ],
)
def test_calls_are_checked(serving: Serving, verb: str, params: dict[str, Any], field: str, says: str) -> None:
    with serving.client(admin=True) as client, pytest.raises(WireError, match=says) as caught:
        client.call(verb, reply_timeout=60, **params)
    assert caught.value.field == field


def test_a_call_whose_body_is_no_map_is_answered(serving: Serving) -> None:
    with RawClient(serving.runtime_dir) as client:
        for body in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\x01\x02"):
            client.send(encode(Call(9, "status", body)))
            client.barrier()
        assert serving.overview()["supervisor"]["pid"] == serving.pid


def test_a_path_that_is_no_text_does_not_end_the_supervisor() -> None:
    """Answers have its bytes as escapes."""
    serving = Serving({"m": engine()}, begin=False)
    directory = serving.directory / os.fsdecode(b"no-text\xff")
    directory.mkdir()
    serving.config = directory / "models.yaml"
    serving.write_models({"m": engine()})
    serving.start_again({"m": engine()})
    with serving:
        assert serving.overview()["supervisor"]["config"] == f"{serving.directory}/no-text\\udcff/models.yaml"
        with serving.client() as client:
            assert client.call("config")["file"].endswith("no-text\\udcff/models.yaml")
        serving.config.write_text("models: 5")
        with pytest.raises(WireError, match="nothing is changed"):
            serving.order("reload")
