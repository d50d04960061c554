"""Clients that open connections and let the gateway wait keep nobody else out. Real processes, sockets and TLS."""

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from gateway.orders import SPARE, Places
from tests.gateway.running import Gateway
from tests.serving import WITHIN, Serving, engine, opened, wait_until

TLS = Path(__file__).parent / "tls"
DESCRIPTORS = 200
"""Descriptors of a gateway process in these tests."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


class Guest:
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.ended = False

    def make_way(self) -> None:
        self.ended = True


def test_the_one_that_is_waited_for_longest_makes_way_and_strangers_before_the_served() -> None:
    places = Places(3)
    first, second, third, *more = (Guest() for _ in range(6))
    assert all(places.enter(guest) for guest in (first, second, third))
    places.serve(second)
    places.wait_for(second)  # it has been served, and is idle
    places.wait_for(first)  # more of its request has come
    for newcomer, ending in zip(more, (third, first, more[0]), strict=True):
        assert places.enter(newcomer)
        assert ending.ended
    assert not second.ended
    assert (places.made_way, places.refused) == (3, 0)


def test_nobody_who_waits_for_the_gateway_makes_way() -> None:
    places = Places(1)
    busy, newcomer = Guest(), Guest()
    assert places.enter(busy)
    places.serve(busy)
    assert not places.enter(newcomer)
    assert (busy.ended, places.refused) == (False, 1)
    places.leave(busy)
    places.leave(busy)
    assert places.enter(newcomer)
    places.wait_for(busy)  # an event of a connection that has ended already
    assert not places.enter(Guest()) or newcomer.ended


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"m": engine()}) as serving:
        yield serving


class Flooded:
    """A gateway process with few descriptors, and a flood of connections to it. A context manager."""

    def __init__(self, serving: Serving, *, tls: bool) -> None:
        files = {"certificate": str(TLS / "certificate.pem"), "private_key": str(TLS / "key.pem")} if tls else {}
        self.gateway = Gateway(serving, descriptors=DESCRIPTORS, **files)
        self.context = ssl.create_default_context(cafile=TLS / "certificate.pem") if tls else None
        self._held: list[socket.socket] = []

    def __enter__(self) -> "Flooded":
        self.gateway.__enter__()
        wait_until(lambda: self.answers(), what="the gateway to serve")
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._held:
            client.close()
        self.gateway.__exit__(None, None, None)

    def ask(self, path: str = "/livez") -> int:
        """Return the status of an answer to a new connection."""
        port = self.gateway.port
        connection = (
            http.client.HTTPConnection("localhost", port, timeout=WITHIN)
            if self.context is None
            else http.client.HTTPSConnection("localhost", port, timeout=WITHIN, context=self.context)
        )
        with closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    def answers(self) -> bool:
        try:
            return self.ask() == 200
        except OSError:
            return False

    def flood(
        self, begin: Callable[[socket.socket], object] = lambda client: None, number: int = 2 * DESCRIPTORS
    ) -> None:
        """Open connections, and do the beginning of something with each."""
        for _ in range(number):
            client = socket.create_connection(("127.0.0.1", self.gateway.port), WITHIN)
            self._held.append(client)
            try:
                begin(client)
            except OSError:
                pass  # it had to make way already

    @property
    def descriptors(self) -> int:
        return len(opened(self.gateway.process.pid))


def unread(client: socket.socket) -> None:
    """Ask for much, and read nothing of it."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.05)
    client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda client: None, id="nothing"),
        pytest.param(lambda client: client.sendall(HEAD[:40]), id="half a head"),
        pytest.param(lambda client: client.sendall(HEAD + b"content-length: 9\r\n\r\n{"), id="half a body"),
        pytest.param(unread, id="answers that nobody reads"),
    ],
)
def test_whoever_lets_the_gateway_wait_keeps_nobody_out(
    serving: Serving, begin: Callable[[socket.socket], object], tls: bool
) -> None:
    with Flooded(serving, tls=tls) as flooded:
        flooded.flood(begin)
        for _ in range(5):
            assert flooded.ask() == 200
            assert flooded.ask("/v1/models") == 200
            assert flooded.descriptors < DESCRIPTORS - SPARE // 8, "the reserve holds"


def test_who_has_a_stream_keeps_it_and_who_is_idle_is_left_alone_before_strangers(serving: Serving) -> None:
    body = b'{"model": "m", "prompt": "x", "max_tokens": 3}'
    with Flooded(serving, tls=True) as flooded, ExitStack() as stack:
        assert flooded.context is not None
        kept = http.client.HTTPSConnection("localhost", flooded.gateway.port, timeout=WITHIN, context=flooded.context)
        stack.enter_context(closing(kept))
        kept.request("GET", "/livez")
        kept.getresponse().read()
        flooded.flood()
        kept.request("POST", "/v1/completions", body)
        assert kept.getresponse().status == 200


def test_a_handshake_that_does_not_come_is_ended_in_seconds(serving: Serving) -> None:
    with Flooded(serving, tls=True) as flooded:
        flooded.flood(number=100)
        wait_until(lambda: flooded.descriptors > 100, what="the connections to be accepted")
        wait_until(lambda: flooded.descriptors < 100, 30, "the end of the handshakes")
        assert all(client.recv(1) == b"" for client in flooded._held)


def test_a_client_that_does_not_close_tls_makes_way(serving: Serving) -> None:
    """It has been answered, and the gateway waits for its part of the closing handshake."""
    with Flooded(serving, tls=True) as flooded, ExitStack() as stack:
        assert flooded.context is not None
        for _ in range(DESCRIPTORS):
            plain = socket.create_connection(("localhost", flooded.gateway.port), WITHIN)
            client = stack.enter_context(flooded.context.wrap_socket(plain, server_hostname="localhost"))
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert flooded.ask() == 200
