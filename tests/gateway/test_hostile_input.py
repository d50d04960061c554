"""A gateway with real workers refuses each hostile request, and a stream beside them is not affected."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.body import MOST_BRACKETS, MOST_COMMAS, MOST_MARKS, parse
from gateway.http.errors import ApiError
from tests.gateway.asking import begin
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

PROMPT = {"model": "m", "prompt": "secret-prompt", "max_tokens": 3}
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    with Serving({"m": engine()}, gateway={"listen": port, "auth": "none", "max_body": "1MiB"}):
        yield port


def send(port: int, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of the answer to a body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        text = response.read()
        assert b"Traceback" not in text
        assert b"secret-prompt" not in text or response.status == 200
        return response.status, json.loads(text).get("error", {})


def with_prompt(value: bytes) -> bytes:
    return b'{"model": "m", "max_tokens": 1, "prompt": ' + value + b"}"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"model": "m", "prompt": "secret-pro', id="half"),
        pytest.param(b"[" * 200_000, id="deep"),
        pytest.param(b'{"a":' * 150_000 + b"1" + b"}" * 150_000, id="deep objects"),
        pytest.param(with_prompt(b"[" * 2000 + b"]" * 2000), id="2,000 deep"),
        pytest.param(with_prompt(b"NaN"), id="NaN"),
        pytest.param(with_prompt(b"1e999"), id="infinity"),
        pytest.param(with_prompt(b"9" * 5000), id="huge number"),
        pytest.param(with_prompt(rb'"\ud800"'), id="lone surrogate"),
        pytest.param(with_prompt(b'"\xff\xfe"'), id="no UTF-8"),
        pytest.param(json.dumps(PROMPT).encode("utf-16"), id="UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + json.dumps(PROMPT).encode(), id="byte order mark"),
        pytest.param(b"[]", id="array"),
        pytest.param(b"model=m&prompt=x", id="form"),
    ],
)
def test_what_is_no_json_object_is_refused(port: int, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, error = send(port, body, path)
        assert status == 400
        assert "body" in error["message"]


def test_a_body_that_is_nested_a_million_deep_is_refused_before_it_is_parsed(port: int) -> None:
    status, error = send(port, b"[" * 1_000_000)
    assert (status, error["code"]) == (413, "too_large")


@pytest.mark.parametrize("name", ["prompt", "stop", "seed", "logit_bias", "response_format", "stream_options"])
@pytest.mark.parametrize(
    "value", [b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900, b"123456789012345678901"]
)
def test_a_value_that_no_option_has_is_refused_by_name(port: int, name: str, value: bytes) -> None:
    status, error = send(port, b'{"model": "m", "prompt": "x", "%s": %s}' % (name.encode(), value))
    if name == "stream_options" and value.startswith(b"{"):
        assert status == 200, "unknown keys of an object are ignored, whatever they hold"
        return
    assert status == 400
    assert name in error["param"]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model": "m", "prompt": "x", "model": "other"}', "model"),
        (b'{"model": "m", "prompt": "x", "mod\\u0065l": "other"}', "model"),
        (b'{"model": "m", "prompt": "\\u0022", "\\u0022" : 1, "\\"":2}', '"'),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x", "role": "system"}]}', "role"),
        (b'{"model": "m", "prompt": "x", "a":' + b"[" * 300 + b'{"b":1,"b":2}' + b"]" * 300 + b"}", "b"),
    ],
)
def test_a_key_that_occurs_twice_in_an_object_is_refused_by_name(port: int, body: bytes, key: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        status, error = send(port, body, path)
        assert (status, error["code"], error["param"]) == (400, "invalid_request", key)
        assert "occurs twice" in error["message"]


def test_a_key_that_occurs_twice_in_a_large_body_is_refused(port: int) -> None:
    with pytest.raises(ApiError, match="a key twice"):
        parse(b'{"a": 1, "prompt": "' + b"x" * (1 << 20) + b'", "a": 2}')
    with pytest.raises(ApiError, match="deeper than 254"):
        parse(b'{"prompt": "' + b"x" * (1 << 20) + b'", "a": ' + b"[" * 300 + b"]" * 300 + b"}")


_TEXTS = st.lists(st.sampled_from(['"', "\\", "u0022", "a", ":", "\n", "é", " "]), max_size=6).map("".join)


@st.composite
def written(draw: st.DrawFn, depth: int = 3) -> str:
    """Return a JSON object as a program may write it: with repeated keys, escapes and spaces."""
    space = st.sampled_from(["", " "])

    def text(value: str) -> str:
        plain = json.dumps(value, ensure_ascii=draw(st.booleans()))
        return plain.replace('\\"', "\\u0022") if draw(st.booleans()) and "\\\\" not in plain else plain

    def value(left: int) -> str:
        kind = draw(st.integers(0, 3 if left else 1))
        if kind == 0:
            return text(draw(_TEXTS))
        if kind == 1:
            return draw(st.sampled_from(["1", "null", "1.5e3", "true", '""']))
        if kind == 2:
            return "[" + ",".join(value(left - 1) for _ in range(draw(st.integers(0, 2)))) + "]"
        return members(left - 1)

    def members(left: int) -> str:
        keys = draw(st.lists(st.sampled_from(["a", "b", '"', "\\", '\\"', "u0022"]), max_size=4))
        pairs = (f"{draw(space)}{text(key)}{draw(space)}:{draw(space)}{value(left)}" for key in keys)
        return "{" + ",".join(pairs) + "}"

    return members(depth)


@given(written())
def test_exactly_the_bodies_with_a_key_twice_are_refused(body: str) -> None:
    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        twice = twice or len(dict(pairs)) != len(pairs)
        return dict(pairs)

    twice = False
    wanted = json.loads(body, object_pairs_hook=count)
    try:
        assert parse(body.encode()) == wanted
    except ApiError:
        assert twice
    else:
        assert not twice


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content_encoding": "gzip"}, "Content-Encoding"),
        ({"content_encoding": "br, identity"}, "Content-Encoding"),
        ({"content_type": "application/json; charset=utf-16"}, "Content-Type"),
        ({"content_type": 'application/json; Charset="latin-1"'}, "Content-Type"),
    ],
)
def test_encodings_that_are_not_offered_are_refused(port: int, headers: dict[str, str], param: str) -> None:
    status, error = send(port, json.dumps(PROMPT).encode(), **headers)
    assert (status, error["code"], error["param"]) == (415, "unsupported", param)


def test_utf_8_may_be_named(port: int) -> None:
    assert send(port, json.dumps(PROMPT).encode(), content_type="application/json; charset=UTF-8")[0] == 200


def test_a_page_of_another_origin_is_refused_although_no_token_is_asked_for(port: int) -> None:
    body = json.dumps(PROMPT).encode()
    status, error = send(port, body, origin="https://evil.example", content_type="text/plain")
    assert (status, error["code"]) == (403, "unknown_origin")
    assert send(port, body, origin=f"http://127.0.0.1:{port}")[0] == 200


def test_a_body_is_bounded_whether_its_size_is_declared_or_not(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), WITHIN) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", port), WITHIN) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY // (1 << 16) + 1):
            client.sendall(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked",
        b"content-length: 4\r\ncontent-length: 5",
        b"content-length: -1",
        b"content-length: 4, 4",
        b"transfer-encoding: chunked, identity",
        b"x: 1\n\rhost: evil.example\r\n evil",
        b"bad name: 1",
        b"x: \x00",
    ],
)
def test_a_head_that_two_servers_may_read_differently_is_refused(port: int, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), WITHIN) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n0\r\n\r\n")
        answer = client.recv(1 << 16)
    assert answer.split(b" ", 2)[1] == b"400", answer


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/page/../../settings.py", "/page/%2e%2e/routes.py", "/static/..%2f..%2fapp.py", "/%00"]
)
def test_no_path_leads_out_of_the_page(port: int, path: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET", path)
        assert connection.getresponse().status == 404


def test_a_stream_beside_hostile_clients_is_whole(port: int) -> None:
    wanted = PROMPT | {"max_tokens": 200}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as alone:
        expected = begin(alone, wanted).read()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as beside:
        stream = begin(beside, wanted)
        for body in (b"[" * MAX_BODY, b" " * MAX_BODY, b"[" + b"[]," * 300_000, b'{"a":"' + b"\\u0041" * 150_000):
            assert send(port, body)[0] in (400, 413)
        found = stream.read()
    assert [_text(line) for line in found.split(b"\n\n")] == [_text(line) for line in expected.split(b"\n\n")]


def test_half_requests_of_500_connections_stop_nobody(port: int) -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
    with ExitStack() as connections:
        for i in range(500):
            client = connections.enter_context(socket.create_connection(("127.0.0.1", port), WITHIN))
            client.sendall(half if i % 2 else half[: i % len(half)])
        assert send(port, json.dumps(PROMPT).encode())[0] == 200
    assert send(port, json.dumps(PROMPT).encode())[0] == 200


def _text(event: bytes) -> Any:
    """Return the choices of an event, without the id and the time of the answer."""
    data = event.strip().removeprefix(b"data: ")
    return json.loads(data)["choices"] if data.startswith(b"{") else data


def test_values_are_counted_before_anything_is_made_of_them() -> None:
    assert parse(b'{"prompt":[' + b"1," * 1000 + b"1]}")["prompt"][:2] == [1, 1]
    keys = b",".join(b'"%d":1' % number for number in range(MOST_MARKS // 2 + 1))
    lists, numbers = b"[]," * (MOST_BRACKETS + 1), b"1," * (MOST_COMMAS + 1)
    for body in (b'{"a":[' + lists + b"1]}", b'{"a":[' + numbers + b"1]}", b"{" + keys + b"}"):
        with pytest.raises(ApiError) as refused:
            parse(body)
        assert (refused.value.status, refused.value.code) == (413, "too_large")
