"""Every error on a path of Anthropic's API has Anthropic's shape, also one that is found before the endpoint."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.http.errors import ApiError, anthropic_body, anthropic_status, is_anthropic
from gateway.openai.models import page
from protocol.errors import ErrorCode, WireError
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

PATH = "/v1/messages"
BODY = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "secret-prompt"}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Serve a model to one key. Return the port and the key's token."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    token = KeyStore(keys).add_token("all", parse_rights("infer"))
    port = free_port()
    with Serving({"m": engine()}, gateway={"listen": port, "max_body": 1 << 20}, keys=keys):
        yield port, token


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Return the status, the headers and the JSON of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "kind"),
    [
        ("POST", PATH, BODY, {"authorization": ""}, 401, "authentication_error"),
        ("POST", f"{PATH}/count_tokens", BODY, {"authorization": ""}, 401, "authentication_error"),
        ("POST", PATH, BODY, {"host": "evil.example"}, 421, "invalid_request_error"),
        ("POST", PATH, BODY, {"origin": "https://evil.example"}, 403, "permission_error"),
        ("GET", f"{PATH}/batches", None, {}, 404, "not_found_error"),
        ("GET", "/v1/models/none", None, {"anthropic_version": "2023-06-01"}, 404, "not_found_error"),
        ("GET", "/v1/models?limit=no", None, {"anthropic_version": "2023-06-01"}, 400, "invalid_request_error"),
    ],
)
def test_an_error_has_anthropics_shape(
    served: tuple[int, str], method: str, path: str, body: Any, headers: dict[str, str], status: int, kind: str
) -> None:
    port, token = served
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    got, answered, answer = ask(port, method, path, data, **{"authorization": f"Bearer {token}"} | headers)
    assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer
    assert answer["request_id"] == answered["request-id"] == answered["x-request-id"]
    assert set(answer["error"]) == {"type", "message"}
    assert "secret-prompt" not in answer["error"]["message"]
    assert answered["x-should-retry"] == "false"


def test_the_same_errors_elsewhere_have_openais_shape(served: tuple[int, str]) -> None:
    port, token = served
    for path, headers in (("/v1/models/none", {"authorization": f"Bearer {token}"}), ("/v1/models", {})):
        _, _, answer = ask(port, "GET", path, **headers)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "headers", "found"),
    [
        ("/v1/messages", [], True),
        ("/messages", [], True),
        ("/v1/v1/messages/count_tokens", [], True),
        ("/v1/messages_of_mine", [], False),
        ("/v1/models", [], False),
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], True),
    ],
)
def test_the_api_of_a_request(path: str, headers: list[tuple[bytes, bytes]], found: bool) -> None:
    assert is_anthropic({"type": "http", "path": path, "headers": headers}) is found


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (WireError(ErrorCode.OVERLOADED, "the queue is full"), 529, "overloaded_error", "the queue is full"),
        (ApiError(503, "too many", code="overloaded"), 529, "overloaded_error", "too many"),
        (WireError(ErrorCode.RATE_LIMITED, "too fast"), 429, "rate_limit_error", "too fast"),
        (WireError(ErrorCode.DEADLINE_EXCEEDED, "late"), 504, "timeout_error", "late"),
        (WireError(ErrorCode.WORKER_DIED, "gone"), 502, "api_error", "gone"),
        (ApiError(408, "slow"), 408, "invalid_request_error", "slow"),
        (
            WireError(ErrorCode.CONTEXT_OVERFLOW, "long", field="messages", overflow=(120, 100)),
            400, "invalid_request_error", "prompt is too long: 120 tokens > 99 maximum",
        ),
        (
            WireError(ErrorCode.CONTEXT_OVERFLOW, "the messages have 900 bytes", field="messages"),
            400, "invalid_request_error", "prompt is too long: the messages have 900 bytes",
        ),
        (
            WireError(ErrorCode.CONTEXT_OVERFLOW, "max_tokens is 90", field="max_tokens", overflow=(20, 100)),
            400, "invalid_request_error", "max_tokens is 90",
        ),
        (
            WireError(ErrorCode.INVALID_REQUEST, "stop has 50", field="stop_sequences"),
            400, "invalid_request_error", "stop_sequences: stop has 50",
        ),
    ],
)  # fmt: skip
def test_the_status_and_the_type_of_an_error(error: Any, status: int, kind: str, message: str) -> None:
    assert anthropic_status(error) == status
    assert anthropic_body(error, "req_1") == {
        "type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "abcd", False),
        ({"limit": "1000"}, "abcd", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", False),
        ({"after_id": "d"}, "", False),
        ({"limit": "1", "before_id": "c"}, "b", True),
        ({"limit": "2", "before_id": "c"}, "ab", False),
    ],
)
def test_the_pages_of_a_list(query: dict[str, str], ids: str, more: bool) -> None:
    found = page([{"id": name} for name in "abcd"], query)
    assert ("".join(model["id"] for model in found["data"]), found["has_more"]) == (ids, more)
    assert (found["first_id"], found["last_id"]) == (ids[:1] or None, ids[-1:] or None)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"limit": "9" * 30}, {"after_id": "x"}]
)
def test_a_page_that_does_not_exist(query: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        page([{"id": "a"}], query)
    assert caught.value.param in query
