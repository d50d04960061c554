"""Streams of Anthropic's API and of the Responses API while they wait, when they fail, and when their clients leave."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anthropic
import pytest

from tests.gateway.running import Gateway
from tests.serving import WITHIN, Serving, engine, wait_until

TURN = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 50_000, "messages": TURN},
    "/v1/responses": {"model": "m", "max_output_tokens": 50_000, "input": TURN},
}
PATHS = list(BODIES)
SHORT = {"/v1/messages": {"max_tokens": 5}, "/v1/responses": {"max_output_tokens": 5}}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    dies = engine("RaisesAtToken", step_s=0.01)
    dies["options"]["template"] = "{{ messages[0].content }}"
    with Serving({"m": engine(context=100_000, max_batch_size=1), "dies": dies}) as serving:
        yield serving


@pytest.fixture(scope="module")
def gateway(serving: Serving) -> Iterator[Gateway]:
    with Gateway(serving, keepalive="chunk", keepalive_s=0.1) as gateway:
        yield gateway


def post(gateway: Gateway, path: str, **more: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN)
    connection.request("POST", path, json.dumps(BODIES[path] | more))
    return connection


def events_in(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Return the data of the events of a stream, as they come."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_disconnects_leaves_the_engine(
    serving: Serving, gateway: Gateway, path: str, stream: bool
) -> None:
    with closing(post(gateway, path, stream=stream)):
        wait_until(lambda: serving.status("m")["active"] == 1)
    serving.wait_idle("m")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_waits_is_kept_open_and_is_then_answered(serving: Serving, gateway: Gateway, path: str) -> None:
    with closing(post(gateway, path, stream=True)) as running:
        wait_until(lambda: serving.status("m")["active"] == 1)
        with closing(post(gateway, path, stream=True, **SHORT[path])) as waiting:
            events = events_in(waiting.getresponse())
            first = [next(events) for _ in range(5)]
            running.close()
            last = list(events)
    serving.wait_idle("m")
    kinds = [event["type"] for event in first]
    if path == "/v1/messages":
        assert kinds == ["message_start", *["ping"] * 4]
        assert [event["type"] for event in last][-1] == "message_stop"
        assert "message_start" not in [event["type"] for event in last]
        assert last[-2]["delta"]["stop_reason"] == "max_tokens"
    else:
        assert kinds == ["response.created", *["response.in_progress"] * 4]
        assert last[-1]["type"] == "response.incomplete"
        assert [event["sequence_number"] for event in first + last] == list(range(len(first + last)))


@pytest.mark.parametrize("path", PATHS)
def test_an_error_behind_the_first_event_is_an_event(serving: Serving, gateway: Gateway, path: str) -> None:
    with closing(post(gateway, path, stream=True)) as asked:
        response = asked.getresponse()
        assert response.status == 200
        events = events_in(response)
        next(events)
        with serving.client(admin=True) as admin, serving.client() as viewer:
            (request,) = viewer.call("requests")["requests"]
            admin.call("cancel_request", id=request["id"])
        *_, last = events
    serving.wait_idle("m")
    if path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert "an operator cancelled" in last["error"]["message"]
        assert last["request_id"] == response.headers["request-id"]
    else:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "cancelled"


def test_anthropics_package_raises_an_error_within_a_stream(gateway: Gateway) -> None:
    asked: Any = {"model": "dies", "max_tokens": 50, "messages": [{"role": "user", "content": "bad"}]}
    with anthropic.Anthropic(
        base_url=gateway.url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=WITHIN
    ) as client:
        stream = client.messages.stream(**asked, extra_body={"resume": False})
        with pytest.raises(anthropic.APIStatusError, match="the worker process ended"), stream as events:
            for _ in events:
                pass
