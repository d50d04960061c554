"""Silent streams stay open, and streams that a client, the supervisor or an operator ends early end correctly."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest

from gateway.http.answers import LoadLines, Notes
from gateway.openai.requests import read_messages
from protocol.client.answers import Progress
from tests.deterministic_engine import answer
from tests.gateway.running import Gateway
from tests.serving import WITHIN, Serving, engine, wait_until

LONG = {"model": "m", "prompt": "long", "max_tokens": 90_000}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        "m": engine(context=100_000, max_batch_size=1),
        "wide": engine(context=20_000),
        "lazy": engine("SlowLoad", load_s=3, lazy=True),
        "soon": engine("SlowLoad", load_s=2.5, lazy=True),
    }
    with Serving(models) as serving:
        yield serving


@pytest.fixture(scope="module")
def gateway(serving: Serving) -> Iterator[Gateway]:
    with Gateway(serving, keepalive_s=0.2) as gateway:
        yield gateway


def post(port: int, body: dict[str, Any]) -> socket.socket:
    """Send a request for a completion, and return its socket."""
    text = json.dumps(body)
    connection = socket.create_connection(("127.0.0.1", port), WITHIN)
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    )
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    """Read until ``wanted`` has arrived, and return everything that has arrived."""
    got = b""
    while wanted not in got:
        part = connection.recv(65536)
        assert part, got
        got += part
    return got


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_disconnects_leaves_the_engine_and_the_queue(
    serving: Serving, gateway: Gateway, stream: bool
) -> None:
    def unfinished() -> int:
        status = serving.status("m")
        return int(status["active"] + status["queued"])

    with closing(post(gateway.port, LONG | {"stream": stream})):
        wait_until(lambda: unfinished() == 1)
        with closing(post(gateway.port, LONG | {"stream": stream, "n": 8})):
            wait_until(lambda: unfinished() == 9)
            assert serving.status("m")["queued"]
        wait_until(lambda: unfinished() == 1)
    serving.wait_idle("m")


def test_a_request_that_waits_is_kept_open_by_comments(serving: Serving, gateway: Gateway) -> None:
    with closing(post(gateway.port, LONG | {"stream": True, "n": 8})) as running:
        head = read_until(running, b"data: ")
        assert b"text/event-stream" in head
        assert b"x-accel-buffering: no" in head
        with closing(post(gateway.port, {"model": "m", "prompt": "short", "max_tokens": 5, "stream": True})) as last:
            came = read_until(last, b": queued ")
            assert came.startswith(b"HTTP/1.1 200 ")
            assert b"data:" not in came
            queued = serving.status("m")["queued"]
            assert queued > 1
            read_until(last, b": queued %d\n\n" % (queued - 1))  # the number of requests before it
    serving.wait_idle("m")


@pytest.mark.long
def test_comments_are_no_text_and_tell_of_the_load(serving: Serving, gateway: Gateway) -> None:
    with closing(post(gateway.port, {"model": "lazy", "prompt": "x", "max_tokens": 20, "stream": True})) as waiting:
        came = read_until(waiting, b"[DONE]")
        assert b": loading " in came
        assert b"%\n\n" in came
    serving.order("stop", model="lazy")
    serving.order("start", model="lazy")
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WITHIN) as client:
        stream = client.completions.create(model="lazy", prompt="x", max_tokens=20, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == answer("x", 20)


def test_the_reasoning_of_a_chat_tells_of_the_load(serving: Serving) -> None:
    """The lines count no tokens. They stand behind the chunk that begins the answer, which comes once."""
    asked: dict[str, Any] = {"model": "soon", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    with (
        Gateway(serving, keepalive="off", progress="reasoning") as gateway,
        openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WITHIN) as client,
    ):
        stream = client.chat.completions.create(**asked, stream=True, n=2, stream_options={"include_usage": True})
        chunks = list(stream)
        loaded = client.chat.completions.create(**asked, stream=True)
        assert not any(hasattr(chunk.choices[0].delta, "reasoning_content") for chunk in loaded)
        serving.order("unload", model="soon")
        whole = client.chat.completions.create(**asked)
    deltas = [(choice.index, choice.delta) for chunk in chunks for choice in chunk.choices]
    lines = [getattr(delta, "reasoning_content", None) for _, delta in deltas]
    told = [line for line in lines if line]
    assert told
    assert all(line.startswith("modelctl: loading soon") and line.endswith("\n") for line in told)
    assert any("%" in line for line in told)
    assert [index for index, delta in deltas if delta.role] == [0, 1]
    assert deltas[0][1].role == "assistant"
    last = max(place for place, line in enumerate(lines) if line)
    assert not any(delta.content for _, delta in deltas[:last]), "no line stands within the answer"
    for index in (0, 1):
        text = "".join(delta.content or "" for each, delta in deltas if each == index)
        assert text == answer("user: x", 20)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.completion_tokens_details is None
    assert whole.choices[0].message.content == answer("user: x", 20)
    assert not hasattr(whole.choices[0].message, "reasoning_content")


def test_the_lines_about_a_load() -> None:
    lines = LoadLines("m")
    told = [lines.next(Progress("loading", done=done, total=100, part="loading")) for done in (0, 9, 10, 11, 30)]
    assert told == [f"modelctl: loading m: {done}%\n" if done % 10 == 0 else "" for done in (0, 9, 10, 11, 30)]
    assert lines.next(Progress("loading", part="warmup")) == "modelctl: loading m: warmup\n"
    assert (
        lines.next(Progress("queued", 3)) == lines.next(Progress("prefill", done=1, total=2)) == lines.next(None) == ""
    )
    waits = Progress("queued", 0, waits_for="llama to finish 2 requests")
    assert [lines.next(waits), lines.next(waits)] == ["modelctl: m waits for llama to finish 2 requests\n", ""]


def test_the_model_does_not_see_the_lines_about_a_load() -> None:
    def reasoning(text: str) -> Any:
        said = {"role": "assistant", "content": "a", "reasoning_content": text}
        return read_messages([said], Notes(refuse=False))[0].get("reasoning_content")

    assert reasoning("modelctl: loading m\nmodelctl: loading m: 40%\nSo: modelctl: x\n") == "So: modelctl: x\n"
    assert reasoning("modelctl: loading m: 40%\n") is None


def test_a_chunk_or_nothing_can_stand_for_a_comment(serving: Serving) -> None:
    with (
        Gateway(serving, keepalive="chunk", keepalive_s=0.1) as gateway,
        closing(post(gateway.port, LONG | {"stream": True})) as running,
    ):
        read_until(running, b"data: ")
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
        )
        with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN)) as waiting:
            waiting.request("POST", "/v1/chat/completions", body)
            response = waiting.getresponse()
            chunk = json.loads(response.readline().removeprefix(b"data: "))
            assert chunk["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
            running.close()
            lines = [line for line in response if line != b"\n"]
            assert lines[-1] == b"data: [DONE]\n"
            chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
            text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)
            assert text == answer("user: x", 5)
    serving.wait_idle("m")


def test_a_stream_of_http_1_0_ends_with_its_connection(serving: Serving) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 5, "stream": True})
    head = f"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with Gateway(serving) as gateway, socket.create_connection(("127.0.0.1", gateway.port), WITHIN) as client:
        client.sendall(f"{head}{body}".encode())
        head, _, events = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode().partition("\r\n\r\n")
        assert "chunked" not in head
        *chunks, done = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
        assert done == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == answer("x", 5)


def test_off_sends_nothing_while_a_request_waits(serving: Serving) -> None:
    """A second gateway sends comments meanwhile, which shows that the first one could have sent some."""
    short = {"model": "m", "prompt": "x", "max_tokens": 5, "stream": True}
    with (
        Gateway(serving, keepalive="off", keepalive_s=0.05) as off,
        Gateway(serving, keepalive="comment", keepalive_s=0.05) as comments,
        closing(post(comments.port, LONG | {"stream": True})) as running,
    ):
        read_until(running, b"data: ")
        with closing(post(off.port, short)) as silent, closing(post(comments.port, short)) as talking:
            heard = b""
            while heard.count(b": queued") < 5:
                heard += read_until(talking, b"\n\n")
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.recv(1)
            silent.settimeout(WITHIN)
            running.close()
            came = read_until(silent, b"[DONE]")
        assert b"\n: " not in came
        assert came.count(b"data: ") == 7
    serving.wait_idle("m")


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stream_options": {"include_usage": True}}])
def test_each_answer_has_its_end_when_it_ends(serving: Serving, gateway: Gateway, more: dict[str, Any]) -> None:
    """Both answers fill the context. One prompt leaves 5 tokens of it, so its answer ends long before the other one."""
    body = {"model": "wide", "prompt": ["y", "x" * 19_995], "stream": True} | more
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        lines = (line for line in connection.getresponse() if line.startswith(b"data: "))
        choices = (json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines)
        ended = next(choice for choice in choices if choice["finish_reason"] is not None)
        assert (ended["index"], ended["finish_reason"]) == (1, "length")
        assert serving.status("wide")["active"] == 1
    serving.wait_idle("wide")


def test_the_tokens_of_all_answers_are_counted_at_the_end(gateway: Gateway) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 5, "n": 2, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream_options": {"include_usage": True}}))
        lines = [line for line in connection.getresponse() if line.startswith(b"data: ")]
    assert lines.pop() == b"data: [DONE]\n"
    *chunks, last = (json.loads(line.removeprefix(b"data: ")) for line in lines)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)
    (choices,) = zip(*(chunk["choices"] for chunk in chunks), strict=True)
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"] == "length") == [0, 1]


def test_an_order_to_cancel_ends_a_stream_with_an_error(serving: Serving, gateway: Gateway) -> None:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WITHIN) as client:
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        with serving.client(admin=True) as admin, serving.client() as viewer:
            (request,) = viewer.call("requests")["requests"]
            admin.call("cancel_request", id=request["id"])
        with pytest.raises(openai.APIError, match="an operator cancelled"):
            for _ in stream:
                pass
    serving.wait_idle("m")


def test_the_ids_of_a_request_over_http_tell_what_became_of_it(serving: Serving, gateway: Gateway) -> None:
    body: dict[str, Any] = {"model": "wide", "max_tokens": 3}
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WITHIN)) as connection:

        def ids_of(path: str, more: dict[str, Any]) -> list[str]:
            connection.request("POST", path, json.dumps(body | more))
            answer = connection.getresponse()
            names = [answer.headers["x-request-id"], json.loads(answer.read())["id"]]
            assert answer.status == 200
            return names

        for path, more, count in (
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 1),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, 1),
            ("/v1/responses", {"input": "x", "max_output_tokens": 3, "max_tokens": None}, 1),
        ):
            names = ids_of(path, more)
            with serving.client() as viewer:
                for name in names:
                    told = viewer.story(name)["requests"]
                    assert len(told) == count
                    assert {(each["state"], each["finish_reason"]) for each in told} == {("ended", "length")}
                    assert all(each["trace_ids"] == names for each in told)


@pytest.mark.long
def test_a_gateway_without_a_supervisor_says_when_to_try_again_and_works_with_the_next_one() -> None:
    models = {"m": engine()}
    with Serving(models) as serving, Gateway(serving) as gateway:
        with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WITHIN) as client:
            stream = client.completions.create(model="m", prompt="x", max_tokens=3900, stream=True)
            next(iter(stream))
            serving.kill()
            with pytest.raises(openai.APIError, match="connection"):
                for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="m", prompt="x")
            assert (caught.value.status_code, caught.value.code) == (503, "connection_lost")
            assert caught.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.InternalServerError):
                client.models.list()
        serving.start_again(models)
        with openai.OpenAI(base_url=gateway.url, api_key="none", timeout=WITHIN) as client:
            whole = client.completions.create(model="m", prompt="x", max_tokens=5)
            assert whole.choices[0].text == answer("x", 5)
