"""The client port knows which clients are connected and which have left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from protocol import limits
from protocol.codec import encode
from protocol.messages import Call, Cancel, Error, Generate, Hello, Kind, Message, Ping, Pong, Reply, Welcome
from supervisor.ports.client_port import ClientPorts
from supervisor.ports.connections import ClientConnection
from tests.raw_client import RawClient
from tests.serving import ROOT, wait_until
from tests.supervisor.port_host import PortHost


@pytest.fixture
def host(runtime_dir: Path) -> Iterator[PortHost]:
    host = PortHost(runtime_dir)
    yield host
    host.close()


def hear(host: PortHost, client: RawClient) -> Message:
    """Return the next message for a client."""
    wait_until(lambda: host.turn() and client.socket.poll(0))
    return client.receive()


def test_a_connection_is_known_until_it_ends(host: PortHost) -> None:
    with RawClient(host.directory) as client:
        wait_until(lambda: host.turn() and host.received)
        connection, _ = host.received[0]
        assert connection.channel in host.port.connections_by_channel
        wait_until(lambda: host.turn() and client.socket.poll(0))
        assert isinstance(client.receive(), Welcome)
        assert list(host.port.connections_by_channel) == [connection.channel]
    wait_until(lambda: host.turn() and host.gone)
    assert host.gone == [connection.channel]
    assert not host.port.connections_by_channel
    assert not host.port.send(connection.channel, b"anything")
    assert host.port.counters.accepted == host.port.counters.disconnected == 1


def test_the_reactor_hears_of_each_send_to_the_admin_port() -> None:
    """It does not ask that port in each turn, and a send may take note of a message without reporting it."""
    ports: list[Any] = [
        SimpleNamespace(send=lambda channel, frame, own=own: channel == own, gone=[]) for own in (1, 2, 3)
    ]
    used: list[str] = []
    clients = ClientPorts(*ports, lambda: used.append("admin"))
    for channel in (1, 3, 9):  # the front port's, the TCP port's, and nobody's
        clients.send(channel, b"frame")
    assert not used
    clients.send(2, b"frame")
    assert used == ["admin"]


def test_who_has_left_before_its_first_word_is_read_does_not_stay(host: PortHost) -> None:
    """libzmq reports the end of the connection before its first message, and only once. The port cannot find out by
    sending: a send would fail only after libzmq has removed the connection's queue."""
    with RawClient(host.directory) as client:
        # the handshake waits for the answer by ZAP; then HELLO arrives, and is not read yet
        wait_until(lambda: host.admit() and host.port.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        client.send(Ping(1))
    wait_until(lambda: host.port.read_monitor() is False and host.port.counters.disconnected)
    assert not list(host.port.receive())
    assert not host.port.connections_by_channel
    assert not host.port.take_gone()
    with RawClient(host.directory) as client:  # it may get the same descriptor
        wait_until(lambda: host.turn() and client.socket.poll(0))
        assert isinstance(client.receive(), Welcome)
        assert len(host.port.connections_by_channel) == 1
    wait_until(lambda: host.turn() and not host.port.connections_by_channel)


SENDS_AND_LEAVES = """
import sys
import time
from pathlib import Path
from protocol.messages import Ping
from tests.raw_client import RawClient

first = RawClient(Path(sys.argv[1]))
for nonce in range(5):
    first.send(Ping(nonce))
print("sent", flush=True)
sys.stdin.readline()
first.close()
print("closed", flush=True)
sys.stdin.readline()
second = RawClient(Path(sys.argv[1]))
second.send(Ping(100))
print("sent", flush=True)
sys.stdin.readline()
"""


def test_last_words_do_not_evict_the_next_owner_of_the_descriptor(host: PortHost) -> None:
    """A connection ends with unread frames. The next one gets its descriptor. Only then are the frames read."""
    with subprocess.Popen(
        [sys.executable, "-c", SENDS_AND_LEAVES, str(host.directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reported, go_on = process.stdout, process.stdin
        os.set_blocking(reported.fileno(), False)
        wait_until(lambda: host.admit() and reported.readline() == b"sent\n")
        wait_until(lambda: host.admit() and host.port.socket.poll(0))
        go_on.write(b"\n")
        go_on.flush()
        wait_until(lambda: host.admit() and reported.readline() == b"closed\n")
        wait_until(lambda: host.port.read_monitor() or host.port.counters.disconnected == 1)
        go_on.write(b"\n")
        go_on.flush()
        wait_until(lambda: host.admit() and reported.readline() == b"sent\n")
        wait_until(lambda: (host.admit() and host.port.read_monitor()) or host.port.counters.accepted == 2)
        # The second client's frame is on its way. Polling makes libzmq take it in without reading it.
        settled = time.monotonic() + 0.3
        wait_until(lambda: host.admit() and host.port.socket.poll(0) and time.monotonic() > settled)
        # only now does the busy supervisor read
        wait_until(lambda: host.turn() and any(m == Ping(100) for _, m in host.received))
        second = next(c for c, m in host.received if m == Ping(100))
        assert second.greeted
        assert second.channel not in host.gone
        assert host.port.counters.bad_frames == 0, "the frames of one that left are not malformed"
    wait_until(lambda: host.turn() and not host.port.connections_by_channel)


def test_every_malformed_frame_is_answered_and_counted(host: PortHost) -> None:
    with RawClient(host.directory) as client:
        for _ in range(100):
            client.send(b"\xc1")
        client.send(Ping(1))
        wait_until(lambda: host.turn() and host.of_kind(Ping))
        while client.receive() != Pong(1):
            pass
        assert [(request, error["name"]) for request, error in client.errors] == [(0, "bad_frame")] * 100
        assert host.port.counters.bad_frames == 100


def test_hello_comes_first(host: PortHost) -> None:
    with RawClient(host.directory, hello=False) as client:
        client.send(Ping(1))
        wait_until(lambda: host.turn() and client.socket.poll(0))
        message = client.receive()
        assert isinstance(message, Error)
        assert "HELLO" in str(client.errors[0][1]["message"])
        assert not host.received


@pytest.mark.parametrize("body", [b"", b"\x90", b"\xc1", b"\xa5hello"])
def test_the_body_of_hello_is_a_map(host: PortHost, body: bytes) -> None:
    with RawClient(host.directory, hello=False) as client:
        client.send(Hello(body))
        client.send(Generate(7, "a", {}, b"\x80"))
        client.send(Hello(b"\x80"))
        assert isinstance(hear(host, client), Error)
        assert isinstance(hear(host, client), Error)
        assert isinstance(hear(host, client), Welcome), "a HELLO that is right may follow"
        (one, refused), (two, not_greeted) = client.errors
        assert (one, refused["name"], refused["refused"]) == (0, "bad_frame", {"kind": Kind.HELLO})
        assert str(refused["message"]).startswith("HELLO: body: ")
        assert (two, not_greeted["message"]) == (7, "the first message of a connection is HELLO")


def test_a_second_hello_is_answered_by_an_error(host: PortHost) -> None:
    with RawClient(host.directory) as client:
        assert isinstance(hear(host, client), Welcome)
        client.send(Hello(b"\x80"))
        assert isinstance(hear(host, client), Error)
        ((request, error),) = client.errors
        assert (request, error["name"], error["refused"]) == (0, "bad_frame", {"kind": Kind.HELLO})
        client.send(Ping(1))
        assert hear(host, client) == Pong(1), "the connection goes on"


def test_an_error_never_names_a_request_that_goes_on(host: PortHost) -> None:
    """Clients end the request that an ERROR names. Here 7 is the number of a request in flight, and 8 is free."""
    host.unfinished.add(7)
    with RawClient(host.directory) as client:
        assert isinstance(hear(host, client), Welcome)
        for number in 7, 8:
            client.send(Generate(number, "a", {}, bytes(limits.MAX_FRAME[Kind.GENERATE])))
            client.socket.send_multipart([encode(Generate(number, "a", {}, b"\x80")), b"more"])
            client.send(encode(Cancel(number)) + b"\0")
            client.send(encode(Call(number, "status", b"")) + b"\0")
        answers = [hear(host, client) for _ in range(8)]
        assert [getattr(m, "request", None) for m in answers] == [0, 0, 0, None, 8, 8, 0, None]
        assert [m.call for m in answers if isinstance(m, Reply)] == [7, 8]
        reported = [(request, error.get("refused")) for request, error in client.errors]
        assert reported == [
            (0, {"kind": Kind.GENERATE, "number": 7}),
            (0, {"kind": Kind.GENERATE, "number": 7}),
            (0, {"kind": Kind.CANCEL, "number": 7}),
            (8, None),
            (8, None),
            (0, {"kind": Kind.CANCEL, "number": 8}),
        ]


def test_a_message_of_several_frames_is_refused_whole(host: PortHost) -> None:
    with RawClient(host.directory) as client:
        client.socket.send_multipart([encode(Ping(1)), encode(Ping(2)), encode(Ping(3))])
        client.send(Ping(4))
        wait_until(lambda: host.turn() and host.of_kind(Ping))
        assert [m.nonce for _, m in host.received if isinstance(m, Ping)] == [4]
        assert host.port.counters.bad_frames == 1


class PartFrom:
    """A received part with the fields that the port reads when it enters a connection."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def get(self, _: int) -> int:
        return self.descriptor


@pytest.mark.parametrize("counter", [5, 0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_whoever_came_later_owns_the_descriptor_in_whichever_order_they_are_read(host: PortHost, counter: int) -> None:
    def enter(nth: int) -> ClientConnection:
        routing_id = b"\0" + ((counter + nth) % (1 << 32)).to_bytes(4, "big")
        return host.port._enter(routing_id, PartFrom(77))  # type: ignore[arg-type]

    second, first = enter(2), enter(1)
    assert second.channel in host.port.connections_by_channel
    third = enter(3)
    assert second.channel not in host.port.connections_by_channel
    assert third.channel in host.port.connections_by_channel
    assert first.fd == -1
    assert host.port.take_gone() == [second.channel]
