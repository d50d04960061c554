"""Connections keep within their limits. These tests use real sockets, uvicorn and a small application."""

import gc
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from gateway import server as connection
from gateway.orders import Places
from gateway.server import HEAD_BYTES, IDLE_S, MOST_PIPELINED, AcceptingServer, HttpConnection
from tests.serving import WITHIN, wait_until

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CLOSING = HEAD + b"connection: close\r\n\r\n"


class Application:
    """An ASGI application that reads a body, and answers with the names of the headers. The answer to /stream has no
    end."""

    def __init__(self) -> None:
        self.calls = self.left = 0

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        self.calls += 1
        while (event := await receive())["type"] == "http.request" and event["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"".join(name + b"\n" for name, _ in scope["headers"])
        streams = scope["path"] == "/stream"
        await send({"type": "http.response.body", "body": body, "more_body": streams})
        while streams and (await receive())["type"] != "http.disconnect":
            pass
        self.left += streams


class Server:
    """The application, served on a port of its own by a thread of its own."""

    def __init__(self) -> None:
        self.application = Application()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = self._listener.getsockname()
        config = uvicorn.Config(
            self.application, http="httptools", loop="uvloop", ws="none", log_config=None, lifespan="off",
            timeout_keep_alive=IDLE_S,
        )  # fmt: skip
        self.places = Places(100)
        self._server = AcceptingServer(config, self.places)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(self._address, WITHIN) as client:
            yield client

    def ask(self, request: bytes) -> bytes:
        """Send bytes, and return everything that comes until the server ends the connection."""
        with self.connected() as client:
            client.sendall(request)
            return rest(client)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with Server() as server:
        yield server


def rest(client: socket.socket) -> bytes:
    """Return everything that comes until the server ends the connection. A reset also counts as the end."""
    received = b""
    try:
        while piece := client.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def refusal(answer: bytes) -> tuple[int, str]:
    """Return the status and the error code of an answer that closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert len(error["message"]) > 20
    return int(head.split()[1]), error["code"]


def test_a_head_that_is_too_large_is_refused_in_one_piece_and_in_many(server: Server) -> None:
    long = b"x-long: " + b"a" * HEAD_BYTES
    assert refusal(server.ask(HEAD + long + b"\r\n\r\n")) == (431, "too_large")
    many = b"".join(b"x-%d: a\r\n" % number for number in range(HEAD_BYTES // 6))
    assert refusal(server.ask(HEAD + many + b"\r\n")) == (431, "too_large")
    assert refusal(server.ask(b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n")) == (431, "too_large")
    with server.connected() as client:  # one header that never ends
        client.sendall(HEAD + long)
        feeder = threading.Thread(target=feed, args=(client, b"a" * 1000))
        feeder.start()
        assert refusal(rest(client)) == (431, "too_large")
        feeder.join()
    assert server.application.calls == 0
    fits = HEAD + b"x-long: " + b"a" * (HEAD_BYTES - 1000) + b"\r\nconnection: close\r\n\r\n"
    assert server.ask(fits).startswith(b"HTTP/1.1 200 ")


def feed(client: socket.socket, piece: bytes) -> None:
    """Send a piece again and again, until the server has ended the connection."""
    try:
        while True:
            client.sendall(piece)
    except OSError:
        pass


def test_a_head_that_does_not_come_in_time_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    assert refusal(server.ask(HEAD)) == (408, "too_slow")
    assert server.ask(b"") == b"", "a connection that was opened in advance is closed without an error"
    with server.connected() as client:  # the second request of a connection
        client.sendall(HEAD + b"\r\n")
        received = b""
        while b"0\r\n\r\n" not in received:
            received += client.recv(1 << 16)
        client.sendall(HEAD)
        assert refusal(rest(client)) == (408, "too_slow")
    with server.connected() as client:  # an idle connection between two requests may wait longer
        client.sendall(b"POST /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert refusal(server.ask(HEAD)) == (408, "too_slow")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1 << 16)


@pytest.mark.parametrize(
    "request_head", [HEAD + b"connection: upgrade\r\nupgrade: h2c\r\n", b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n"]
)
def test_another_protocol_is_refused_by_name(server: Server, request_head: bytes) -> None:
    assert refusal(server.ask(request_head + b"content-length: 2\r\n\r\n{}")) == (400, "unsupported")
    assert server.application.calls == 0


def test_what_is_no_request_is_refused(server: Server) -> None:
    for request in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/1.1\nhost x\r\n\r\n", b"* * *\r\n\r\n"):
        assert refusal(server.ask(request)) == (400, "invalid_http")
    both = HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert refusal(server.ask(both)) == (400, "invalid_http"), "request smuggling: two lengths"


@pytest.mark.parametrize("chunks", [b"zz\r\n{}\r\n", b"1\r\na\r\nzz\r\n", b"-1\r\n", b"1\r\naXX", b"f" * 20 + b"\r\n"])
def test_a_malformed_chunk_is_answered(server: Server, chunks: bytes) -> None:
    """The application waits for the rest of the body meanwhile, and has answered nothing."""
    answer = server.ask(CHUNKED + chunks)
    assert refusal(answer) == (400, "invalid_http")
    assert b"the chunks of the body are not valid" in answer
    assert answer.count(b"HTTP/1.1 ") == 1, answer


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"foo", b"xchunked"])
@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_an_unknown_transfer_coding_is_answered(server: Server, method: bytes, coding: bytes) -> None:
    answer = server.ask(method + b" / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: " + coding + b"\r\n\r\n0\r\n\r\n")
    assert refusal(answer) == (501, "unsupported")
    assert coding in answer
    assert server.application.calls == 0


def test_a_malformed_chunk_never_passes_for_the_answer_to_an_earlier_request(server: Server) -> None:
    with server.connected() as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" + CHUNKED + b"zz\r\n")
        assert b"invalid_http" not in rest(client)
    wait_until(lambda: server.application.left == 1, what="the application to hear that the client has gone")


@pytest.mark.parametrize(
    "behind",
    [
        HEAD + b"\r\n",
        HEAD + b"content-length: 9\r\n\r\n{",
        HEAD + b"content-length: 999999\r\n\r\n" + b"a" * (HEAD_BYTES - 200),
        (HEAD + b"\r\n") * MOST_PIPELINED,
    ],
)
def test_who_leaves_with_a_request_behind_the_running_one_is_missed(server: Server, behind: bytes) -> None:
    with server.connected() as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: server.application.left == 1, what="the application to hear that the client has gone")


@pytest.mark.parametrize(
    "behind",
    [(HEAD + b"\r\n") * (MOST_PIPELINED + 1), HEAD + b"content-length: 999999\r\n\r\n" + b"a" * (HEAD_BYTES + 1)],
    ids=["many", "large"],
)
def test_what_waits_for_the_answer_to_an_earlier_request_is_bounded(server: Server, behind: bytes) -> None:
    with server.connected() as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        assert b"overloaded" not in rest(client)
    wait_until(lambda: server.application.left == 1, what="the application to hear that the client has gone")


def test_http_1_0_has_no_chunks(server: Server) -> None:
    old = b"GET / HTTP/1.0\r\nhost: x\r\nexpect: 100-continue\r\n\r\n"
    head, _, body = server.ask(old).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"chunked" not in head
    assert body == b"host\nexpect\n", "the end of the connection is the end of the answer"
    assert refusal(server.ask(CHUNKED.replace(b"1.1", b"1.0"))) == (400, "invalid_http")
    assert refusal(server.ask(old.replace(b"1.0", b"2.0"))) == (505, "unsupported")
    assert refusal(server.ask(b"GET /\r\n\r\n")) == (505, "unsupported")


def test_trailers_never_become_headers(server: Server) -> None:
    answer = server.ask(
        CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    )
    assert b"transfer-encoding\n" in answer
    assert b"authorization" not in answer


def test_a_trailer_without_an_end_is_refused(server: Server) -> None:
    with server.connected() as client:
        client.sendall(CHUNKED + b"1\r\na\r\n0\r\nx-long: ")
        feeder = threading.Thread(target=feed, args=(client, b"a" * 1000))
        feeder.start()
        assert refusal(rest(client)) == (431, "too_large")
        feeder.join()


def test_an_error_is_not_mixed_into_a_stream(server: Server) -> None:
    with server.connected() as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        received = client.recv(1 << 16)
        client.sendall(b"\x00\x01 this is no request\r\n\r\n")
        received += rest(client)
    assert received.count(b"HTTP/1.1") == 1
    assert b"error" not in received


def test_a_process_has_a_most_of_connections(server: Server) -> None:
    server.places.most = 2
    with server.connected() as first, server.connected() as second:
        for client in (first, second):
            client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1 << 16)
        with server.connected() as third:
            assert refusal(rest(third)) == (503, "overloaded")
        assert refusal(server.ask(CLOSING)) == (503, "overloaded")
        for client in (first, second):
            client.setblocking(False)
            with suppress(BlockingIOError):  # what there is to read may come in several pieces
                while True:
                    assert client.recv(1 << 16), "the connection was ended"
    wait_until(lambda: server.ask(CLOSING).startswith(b"HTTP/1.1 200 "), what="a place for a connection")


def test_nothing_is_kept_of_a_connection_that_was_reset(server: Server) -> None:
    """A client that closes before it has read everything resets the connection. Its idle timer must not keep it."""
    for _ in range(20):
        with server.connected() as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def kept() -> int:
        gc.collect()
        return sum(type(one) is HttpConnection for one in gc.get_objects())

    wait_until(lambda: not kept(), what="the connections to be forgotten")
