"""The port over TCP handles connections correctly, in one process, and the port over ipc admits the right users."""

import ctypes
import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from protocol.client.transport import Transport
from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Hello, Ping, Pong, Welcome
from protocol.process.sockets import send_to
from protocol.verbs import Right
from supervisor.cluster.port import RemotePort
from supervisor.keys.ring import KeyRing
from supervisor.keys.store import KeyStore
from supervisor.ports.connections import ClientConnection, Wire, _Ending
from supervisor.ports.floods import ArrivalLimits
from supervisor.ports.listeners import (
    MAX_CONNECTIONS_OF_KEY,
    TcpListener,
    bytes_both_ways,
    next_number,
    open_ipc_port,
    open_tcp_port,
)
from supervisor.ports.sockets import RETRY_MAX_S, ListenAttempts, ListenError
from supervisor.ports.zap import ZapHandler
from tests.keyed import free_port
from tests.raw_client import RawClient
from tests.serving import ROOT, WITHIN, wait_until
from tests.supervisor.port_host import LOG, LoopWithPort, holds_none


class TcpHost(LoopWithPort):
    """A loop around the port over TCP, with the key of one client."""

    def __init__(self, directory: Path, address: str = "127.0.0.1", number: int | None = None) -> None:
        self.store = KeyStore(directory / "keys")
        self.key = self.store.add("a", frozenset({Right.INFER}), directory / "a.key")
        self.ring = KeyRing(self.store, LOG)
        self.number = number or free_port()
        self.endpoint = f"tcp://{address}:{self.number}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        zap = ZapHandler(context, os.getuid(), ring=self.ring)
        port = open_tcp_port(
            context, self.endpoint, self.store.server_pair()[1], self.ring, 64, holds_none, logging.getLogger()
        )
        super().__init__(context, zap, port)

    def turn(self) -> bool:
        super().turn()
        self.port.enforce_limits()
        return True

    def connections(self) -> list[ClientConnection]:
        return list(self.port.connections_by_channel.values())

    def greet(self) -> RawClient:
        client = RawClient(self.endpoint, key=self.key)
        wait_until(lambda: self.turn() and client.socket.poll(0))
        assert isinstance(client.receive(), Welcome)
        return client

    def is_answered(self, client: RawClient, nonce: int) -> bool:
        client.send(Ping(nonce))
        wait_until(lambda: self.turn() and client.socket.poll(0))
        return client.receive() == Pong(nonce)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make HELLO_S very long: the port counts it in looks, and each turn of these tests looks."""
    monkeypatch.setattr("supervisor.ports.listeners.HELLO_S", 1e6)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TcpHost]:
    host = TcpHost(tmp_path)
    yield host
    host.close()


def test_a_connection_is_its_keys(host: TcpHost) -> None:
    with host.greet():
        (connection,) = host.connections()
        assert connection.identity.name == "a"
        assert connection.identity.key_id == host.key.public_key
        assert connection.identity.rights == {Right.INFER}
    wait_until(lambda: host.turn() and host.gone == [connection.channel])
    assert not host.port._accepted.wires


@pytest.mark.parametrize("address", ["[::1]", "[::]"])
def test_over_ipv6(tmp_path: Path, address: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    host = TcpHost(tmp_path, address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = Transport(context, f"tcp://[::1]:{host.number}", encode(Hello(pack_body({}))), host.key)
    wait_until(lambda: host.turn() and line.read_monitor(None) is None and line.has_input)
    (connection,) = host.connections()
    host.port.cut(connection, WireError(ErrorCode.UNAUTHORIZED, "its descriptor is found there, too"))
    wait_until(lambda: host.turn() and host.port.counters.disconnected == 1)
    line.hang_up(0)
    context.term()
    host.close()


def test_while_it_pauses_nobody_comes_and_nobody_has_to_go(host: TcpHost) -> None:
    with host.greet() as client:
        host.port.pause()
        host.port.pause()
        with socket.socket() as late:
            late.settimeout(0.3)
            with pytest.raises(TimeoutError):
                late.connect(("127.0.0.1", host.number))
        assert host.is_answered(client, 1)
        host.port.resume()
        assert host.is_answered(client, 2)
        with host.greet() as other:
            assert host.is_answered(other, 3)


def test_one_connection_is_cut_off_and_told_why(host: TcpHost) -> None:
    with host.greet() as client, host.greet() as other:
        first, second = host.connections()
        host.port.cut(first, WireError(ErrorCode.UNAUTHORIZED, "told why"))
        wait_until(lambda: host.turn() and client.socket.poll(0))
        client.receive()
        assert [error["message"] for _, error in client.errors] == ["told why"]
        client.send(Ping(1))  # the client ignores the warning
        wait_until(lambda: host.turn() and host.port.counters.disconnected == 1)
        assert host.gone == [first.channel]
        assert host.connections() == [second]
        assert host.is_answered(other, 2)


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(host: TcpHost) -> None:
    with host.greet() as client:
        (connection,) = host.connections()
        endings = host.port._accepted._endings
        endings[b"1"] = _Ending(-1.0, connection.fd, Wire((0, 1)), hears=True)
        endings[b"2"] = _Ending(-1.0, 1_000_000, Wire((0, 1)), hears=True)
        host.turn()
        assert not endings
        assert host.is_answered(client, 1)


def test_a_key_has_so_many_connections_and_no_more(host: TcpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CONNECTIONS_OF_KEY > 16
    monkeypatch.setattr("supervisor.ports.listeners.MAX_CONNECTIONS_OF_KEY", 1)
    with host.greet() as client, RawClient(host.endpoint, key=host.key) as second:
        wait_until(lambda: host.turn() and second.socket.poll(0))
        second.receive()
        assert second.errors[0][1]["name"] == "rate_limited"
        assert host.is_answered(client, 1)


def test_a_port_that_is_taken_opens_when_it_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = TcpHost(tmp_path, number=taken.getsockname()[1])
        listener, now = host.port.listener, time.monotonic()
        descriptors = len(os.listdir("/proc/self/fd"))
        for attempt in range(1, 40):
            assert f"{host.endpoint} (supervisor.listen): Address already in use, tried {attempt} time" in str(
                listener.problem
            )
            now += RETRY_MAX_S
            listener.listen(now)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        host.port.pause()
        host.port.resume()
    listener.listen(now + RETRY_MAX_S)
    assert listener.problem is None
    with host.greet() as client:
        assert host.is_answered(client, 1)
    host.close()


def test_a_port_that_opens_while_newcomers_have_to_wait_lets_none_in(tmp_path: Path) -> None:
    number = free_port()
    with socket.create_server(("127.0.0.1", number)):
        host = TcpHost(tmp_path, number=number)
        host.port.pause()
    host.port.listener.listen(time.monotonic() + RETRY_MAX_S)
    with socket.socket() as newcomer:
        newcomer.settimeout(0.5)
        with pytest.raises(TimeoutError):
            newcomer.connect(("127.0.0.1", number))
    host.port.resume()
    socket.create_connection(("127.0.0.1", number), WITHIN).close()
    host.close()


def test_an_address_that_can_never_be_opened(host: TcpHost) -> None:
    endpoint = f"tcp://[fe80::1]:{free_port()}"
    with pytest.raises(ListenError, match=r"\(supervisor.listen\): .*; give another port, or an address"):
        open_tcp_port(host.context, endpoint, host.store.server_pair()[1], host.ring, 64, holds_none, LOG)


def test_attempts_become_rarer_and_say_each_reason_once() -> None:
    attempts = ListenAttempts("tcp://10.0.0.7:5570", "supervisor.listen")
    lines, tried = [], []
    for half_second in range(400):
        if attempts.due(half_second / 2):
            tried.append(half_second / 2)
            lines.append(attempts.failed(errno.EADDRNOTAVAIL if half_second < 60 else errno.EADDRINUSE))
    assert tried[:4] == [0.0, 0.5, 1.5, 3.5]
    assert tried[-1] - tried[-2] == RETRY_MAX_S
    says = "cannot listen on tcp://10.0.0.7:5570 (supervisor.listen): "
    told = [line for line in lines if line is not None]
    assert [line.split("; ")[0] for line in told] == [
        f"{says}Cannot assign requested address", f"{says}Address already in use"
    ]  # fmt: skip
    assert attempts.problem == f"{says}Address already in use, tried {len(tried)} times; {told[1].split(': ')[-1]}"
    assert attempts.may_pass
    attempts.failed(errno.EACCES)
    assert not attempts.may_pass


@contextmanager
def forger(host: TcpHost, number: int) -> Iterator["zmq.Socket[bytes]"]:
    """Make a connection with a valid key and a routing id that looks like one of libzmq's own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    dealer.curve_serverkey, dealer.curve_publickey = host.key.server_key.encode(), host.key.public_key.encode()
    dealer.curve_secretkey = host.key.secret_key.encode()
    dealer.routing_id = b"\0" + (number % (1 << 32)).to_bytes(4, "big")
    dealer.connect(host.endpoint)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def is_free(host: TcpHost, number: int) -> bool:
    """Return whether libzmq has freed this number. It does so a moment after it reports the end of the connection."""
    try:
        send_to(host.port.socket, b"\0" + (number % (1 << 32)).to_bytes(4, "big"), b"")
    except zmq.ZMQError as e:
        return e.errno == zmq.EHOSTUNREACH
    return False


def test_a_chosen_name_that_looks_like_libzmqs_own_is_cut_off(host: TcpHost) -> None:
    """Otherwise libzmq 4.3.5 would abort the process by an assertion when its own numbers reach that id."""
    with host.greet() as client:
        (connection,) = host.connections()
        number = int.from_bytes(connection.routing_id[1:], "big")
        for _ in range(20):  # connections without a handshake get no number
            socket.create_connection(("127.0.0.1", host.number)).close()
        wait_until(lambda: host.turn() and host.port.counters.disconnected >= 20)
        for ahead in (3, 10, 1000, 1 << 31):
            before, left = host.port.counters.cut_off, host.port.counters.disconnected
            with forger(host, number + ahead) as dealer:
                dealer.send(encode(Hello(pack_body({}))))
                wait_until(lambda before=before: host.turn() and host.port.counters.cut_off == before + 1)  # type: ignore[misc]
                wait_until(lambda left=left: host.turn() and host.port.counters.disconnected == left + 1)  # type: ignore[misc]
                assert not dealer.poll(0)
        assert host.connections() == [connection]
        with host.greet() as other:  # this client gets the next number
            assert host.is_answered(other, 1)
        assert host.is_answered(client, 2)


def test_whoever_says_nothing_is_cut_off(host: TcpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port sees a chosen routing id only with the first message. A connection without one is cut off in the end."""
    with host.greet() as client:
        (connection,) = host.connections()
        monkeypatch.setattr("supervisor.ports.listeners.HELLO_S", 5.0)
        number = int.from_bytes(connection.routing_id[1:], "big") + 1
        with forger(host, number):
            wait_until(lambda: host.turn() and host.port.counters.disconnected == 1)
            wait_until(lambda: is_free(host, number))
            assert host.port.counters.cut_off == 1
            monkeypatch.setattr("supervisor.ports.listeners.HELLO_S", 1e6)
            with host.greet() as other:
                assert host.is_answered(other, 1)
        assert host.is_answered(client, 2), "one that has said HELLO may be silent for as long as it likes"


@pytest.mark.parametrize("limit", ["MAX_BEHIND", "MAX_BEHIND_OF_KEY"])
def test_whoever_does_not_read_is_cut_off(host: TcpHost, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """libzmq would keep 100,000 frames of up to 3 MiB each for such a client."""
    monkeypatch.setattr(f"supervisor.ports.listeners.{limit}", 8 << 20)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with host.greet() as reader, context.socket(zmq.DEALER) as deaf:
        (good,) = host.connections()
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 1 << 16)
        deaf.setsockopt(zmq.RECONNECT_IVL, -1)
        deaf.curve_serverkey, deaf.curve_publickey = host.key.server_key.encode(), host.key.public_key.encode()
        deaf.curve_secretkey = host.key.secret_key.encode()
        deaf.connect(host.endpoint)
        deaf.send(encode(Hello(pack_body({}))))
        wait_until(lambda: host.turn() and len(host.connections()) == 2)
        (bad,) = (connection for connection in host.connections() if connection is not good)
        for number in range(40):  # 20 MiB for each client
            assert host.port.send(bad.channel, encode(Pong(number)) + bytes(1 << 19))
            host.port.send(good.channel, encode(Pong(number)) + bytes(1 << 19))
            wait_until(lambda: host.turn() and reader.socket.poll(0))
            reader.socket.recv()
            if bad not in host.connections():
                break
        wait_until(lambda: host.turn() and host.port.counters.disconnected == 1)
        assert host.port.counters.cut_off == 1
        assert host.connections() == [good]
        assert host.is_answered(reader, 1)
    context.term()


def test_whoever_is_too_far_ahead_is_cut_off(host: TcpHost) -> None:
    """libzmq has no high water mark here, since with one it may abort when a connection ends at the wrong time."""
    assert host.port.socket.get(zmq.RCVHWM) == 0
    question = encode(Call(1, "tokenize", pack_body({"prompt": bytes(1 << 19)})))
    with host.greet() as client, host.greet() as other:
        for _ in range(32):  # as many bytes as below, but the port handles them
            client.socket.send(question)
            wait_until(lambda: host.turn() and isinstance(host.received[-1][1], Call))
            host.received[:] = [(host.connections()[0], Ping(0))]
        assert not host.port.counters.cut_off
        host.port._arrivals.bounds = ArrivalLimits(bytes_of_connection=4 << 20)
        (fd, *_) = sorted(host.port._table.by_fd, key=lambda fd: -bytes_both_ways(fd)[1])
        before = bytes_both_ways(fd)[1]
        for _ in range(32):
            client.socket.send(question)
        wait_until(lambda: bytes_both_ways(fd)[1] - before > 32 << 19, what="all of it to have come")
        wait_until(lambda: host.turn() and client.socket.poll(0))
        client.receive()
        assert [error["name"] for _, error in client.errors] == ["rate_limited"]
        wait_until(lambda: host.turn() and host.port.counters.disconnected == 1)
        assert len(host.connections()) == 1
        assert host.is_answered(other, 1)


def test_nobody_knows_the_numbers(host: TcpHost, runtime_dir: Path) -> None:
    """Without a random seed, libzmq's numbers would be equal in every process."""
    firsts = set()
    for number in range(3):
        ctypes.CDLL(None).srand(1)
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        port = open_tcp_port(host.context, endpoint, host.store.server_pair()[1], host.ring, 64, holds_none, LOG)
        firsts.add(cast(TcpListener, port.listener).first_number)
        port.close()
        ctypes.CDLL(None).srand(1)
        local, _ = open_ipc_port(host.context, f"ipc://{runtime_dir}/{number}", 64, holds_none, LOG)
        firsts.add(next_number(host.context, local.socket))
        local.close()
    assert len(firsts) == 6


def test_a_key_that_connects_too_often_is_told_so_and_keeps_nobody_out(
    host: TcpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.keys.ring.AT_ONCE", 2)
    monkeypatch.setattr("supervisor.keys.ring.PER_S", 1e-6)
    other_key = host.store.add("b", frozenset({Right.INFER}), host.store.directory.parent / "b.key")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with host.greet() as first, host.greet() as second:
        line = Transport(context, host.endpoint, encode(Hello(pack_body({}))), host.key)
        why = wait_until(lambda: host.turn() and line.read_monitor(None))
        assert "key 'a' has connected too often" in why
        assert not line.refused
        assert not line.rejected
        line.hang_up(0)
        host.key = other_key
        with host.greet() as other:
            assert host.is_answered(other, 1)
        assert host.is_answered(first, 2)
        assert host.is_answered(second, 3)
        assert host.ring.refused_handshakes == 1
    context.term()


def test_connections_that_show_no_key_keep_nobody_out(host: TcpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished handshake holds a descriptor for up to 3 s. If there are too many, the oldest are ended."""
    monkeypatch.setattr(TcpListener, "most_strangers", 8)
    with host.greet() as client:
        strangers = [socket.create_connection(("127.0.0.1", host.number)) for _ in range(40)]
        wait_until(lambda: host.turn() and host.port.counters.cut_off == 32)
        assert len(host.port._accepted.strangers) == 8
        with host.greet() as other:
            assert host.is_answered(other, 1)
        assert host.is_answered(client, 2)
        for stranger in strangers:
            stranger.close()
        wait_until(lambda: host.turn() and not host.port._accepted.strangers)


# ipc


def test_connections_without_a_key_keep_no_worker_of_another_machine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take all descriptors, and libzmq would abort the supervisor."""
    most, endpoint = 16, f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr("supervisor.cluster.port.MAX_STRANGERS", most)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    zap = ZapHandler(context, os.getuid(), worker_keys={own_public.decode()})
    clients: Any = SimpleNamespace(socket=context.socket(zmq.ROUTER), connections_by_channel={})
    port = RemotePort(context, endpoint, secret, clients, lambda routing_id: None, lambda *sent: False, 60.0)
    port.socket.bind(endpoint)
    heard: list[bytes] = []
    most_seen = 0

    def turn() -> bool:
        nonlocal most_seen
        zap.handle()
        port.read_monitor()
        most_seen = max(most_seen, len(port._accepted.wires))
        heard.extend(routing_id for routing_id, _ in port.receive())
        return True

    def worker(name: bytes) -> "zmq.Socket[bytes]":
        dealer = context.socket(zmq.DEALER)
        dealer.routing_id, dealer.linger, dealer.reconnect_ivl = name, 0, -1
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = public, own_public, own_secret
        dealer.connect(endpoint)
        dealer.send(b"x")
        wait_until(lambda: turn() and name in heard, what=f"{name!r} to be heard")
        heard.clear()
        return dealer

    with ExitStack() as stack:
        first = stack.enter_context(worker(b"first"))
        for number in range(8 * most):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), WITHIN))
            before = port.accepted  # it grows in ``turn`` only
            wait_until(lambda before=before: turn() and port.accepted > before, what="the connection to be taken")
            if number == 4 * most:
                stack.enter_context(worker(b"second"))
        first.send(b"y")
        wait_until(lambda: turn() and heard == [b"first"], what="the first worker to be heard again")
        assert most_seen <= 2 * most
    port.close()
    clients.socket.close(linger=0)
    zap.socket.close(linger=0)
    context.term()


def test_another_user_is_not_admitted_over_ipc(runtime_dir: Path) -> None:
    """The kernel tells the uid of the peer. Here the supervisor expects a uid other than the test's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapHandler(context, os.getuid() + 1)
    port, _ = open_ipc_port(context, f"ipc://{runtime_dir}/front", 64, holds_none, LOG)

    def turn() -> bool:
        zap.handle()
        port.read_monitor()
        assert not list(port.receive())
        return True

    with RawClient(runtime_dir) as client:
        wait_until(lambda: turn() and port.counters.handshakes_failed)
        assert zap.denied
        assert not client.socket.poll(50)
    port.close()
    zap.socket.close(linger=0)
    context.term()


STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as peer:
    try:
        peer.connect(sys.argv[1])
    except OSError as e:
        sys.exit(f"refused: {e.strerror}")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_even_reach_the_socket(runtime_dir: Path) -> None:
    """The directory (0700) keeps other users out, and if it were open, the socket file (0600) would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapHandler(context, os.getuid())
    port, _ = open_ipc_port(context, f"ipc://{runtime_dir}/front", 64, holds_none, LOG)
    runtime_dir.chmod(0o700)
    for mode in (0o700, 0o711):
        runtime_dir.chmod(mode)
        ended = subprocess.run(
            [sys.executable, "-c", STRANGER, str(runtime_dir / "front")],
            capture_output=True, text=True, timeout=60, cwd="/", env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert ended.stderr.strip() == "refused: Permission denied", (oct(mode), ended)
    port.close()
    zap.socket.close(linger=0)
    context.term()
