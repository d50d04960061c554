"""The port that is open to other machines: CURVE, keys on a list, and what libzmq does not bound.

* A connection is its key's: the public key, as the handshake proved it, stands in the metadata of each message
  (User-Id) and is looked up once, with the first.
* libzmq gathers a message of many parts whole before it gives us any, however long it grows, and no option limits that.
  The kernel counts the bytes of each connection (TCP_INFO): one that sends MAX_UNREAD without a message being complete
  is cut off. A peer without a key gets nowhere near: it has no session to gather for.
* libzmq keeps what a peer does not read, up to a number of frames, however large each is. Of the bytes that were given
  to it for a connection, the kernel knows how many have arrived: whoever is MAX_BEHIND behind is cut off.
* libzmq numbers its connections, from a number of 32 bits that it draws (the same in each process, unless the C
  library's generator is seeded), and aborts the process when the next number is taken: by a peer that chose its routing
  id to look like one. So we seed the generator, and note what we were given first before anybody can connect. An id
  beyond as many as have shaken hands since (a number is given after that, so strangers do not count) is a chosen one,
  and cut off at once. An id shows with the first message only: who sends none is cut off after HELLO_S. Each key may
  connect at a bounded rate (see ``supervisor.keys.handshakes``), which leaves it a guess among 2**32 now and then.
* When descriptors are scarce, a filter on the listening socket drops what wants to connect; kernels of clients try
  again by themselves. (Unbinding would end the connections that are there.)
"""

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from protocol import limits
from protocol.errors import ErrorCode, WireError
from supervisor.keys.ring import KeyRing
from supervisor.ports.client_port import MONITORED, ClientPort, client_router
from supervisor.ports.connections import Connection
from supervisor.ports.monitors import open_monitor
from supervisor.ports.sockets import Context
from supervisor.ports.wires import Wire, borrow
from supervisor.ports.zap import TCP_DOMAIN

MAX_UNREAD = 2 * limits.SOCKET_MAX_FRAME
"""Bytes that a connection may send without a whole message coming of it."""
MAX_BEHIND = 64 << 20
"""Bytes that may wait for one connection to read them, ..."""
MAX_BEHIND_OF_KEY = 4 * MAX_BEHIND
"""... and for all of a key. Streams alone are kept to less by their credit."""
MAX_CONNECTIONS_OF_KEY = 256
CHECK_S = 0.2
"""Seconds between two calls of ``look``."""
HELLO_S = 5.0
"""Between a connection and its first message, HELLO, at most. Counted in looks: a loop that is stopped hears nobody."""
MAX_STRANGERS = 256
"""Connections without a message so far, which nobody has shown a key for. If there are more, the oldest is ended: a
client with a key needs some milliseconds, and one without would stay for 3 s."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_TCP_INFO, _BYTES_ACKED = 11, 120
"""linux/tcp.h: tcpi_bytes_acked and behind it tcpi_bytes_received, each a u64, are 120 bytes into struct tcp_info
(since Linux 4.1)."""


class ListenError(Exception):
    """The port cannot be opened. One line that says why."""


@dataclass(slots=True)
class TcpPort(ClientPort):
    """``ring`` says who is admitted."""

    ring: KeyRing | None = None
    _listener: int = -1
    _first: int = 0
    """The number that libzmq gave out before anybody could connect."""
    _handshakes: int = 0
    """That succeeded."""
    _strangers: dict[int, Wire] = field(default_factory=dict)
    """By descriptor, the oldest first."""

    @staticmethod
    def listen(
        context: Context,
        endpoint: str,
        secret_key: str,
        ring: KeyRing,
        backlog: int,
        holds: Callable[[int, int], bool],
        log: logging.Logger,
    ) -> "TcpPort":
        """Open the port. Raises ListenError."""
        router = client_router(context, backlog)
        router.curve_server = True
        router.curve_secretkey = secret_key.encode()
        router.setsockopt(zmq.ZAP_DOMAIN, TCP_DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.IPV6, int("[" in endpoint))
        # the time-out must exceed the transfer of the largest frame, or heartbeats kill it
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        events = MONITORED | zmq.EVENT_LISTENING | zmq.EVENT_HANDSHAKE_SUCCEEDED
        monitor = open_monitor(context, router, events)
        port = TcpPort(endpoint, router, monitor, holds, ring=ring, log=log, _first=_next_number(context, router))
        try:
            router.bind(endpoint)
        except zmq.ZMQError as e:
            port.close()
            message = f"cannot listen on {endpoint} (supervisor.listen): {os.strerror(e.errno or 0)}"
            raise ListenError(f"{message}; choose another port, or an address of this machine") from None
        try:
            port.pause()  # it has to work when it is needed
            port.resume()
        except OSError as e:
            port.close()
            message = f"cannot listen on {endpoint} safely: the kernel refuses a filter on the socket ({e.strerror})"
            raise ListenError(f"{message}; allow setsockopt(SO_ATTACH_FILTER), or remove supervisor.listen") from None
        return port

    def pause(self) -> None:
        """Take no new connections; those there are go on."""
        if self.listening:
            self.watch()  # which descriptor listens
            self._filter(_SO_ATTACH_FILTER, _drop_everything())
            self.listening = False

    def resume(self) -> None:
        if not self.listening:
            self._filter(_SO_DETACH_FILTER, struct.pack("i", 0))
            self.listening = True

    def send(self, channel: int, frame: bytes) -> bool:
        # a dataclass with slots is another class than the one that super() without arguments means
        sent = ClientPort.send(self, channel, frame)
        connection = self._by_channel.get(channel)
        if sent and connection is not None and (wire := self._wires.get(connection.fd)) is not None:
            wire.given += len(frame)
        return sent

    def connections(self) -> list[Connection]:
        return list(self._by_channel.values())

    def connection(self, channel: int) -> Connection | None:
        return self._by_channel.get(channel)

    def enforce_limits(self, now: float) -> None:
        """End the connections of clients that send a message without end, do not read, send no HELLO, or have had time
        to read why they are ended. The loop calls this every CHECK_S."""
        self._endings.end_overdue(now)
        behind_of_key: dict[str, int] = {}
        for fd, wire in list(self._wires.items()):
            arrived, received = _bytes_both_ways(fd)
            connection = self._by_fd.get(fd)
            behind = wire.behind(arrived)
            if connection is not None and behind:
                key = connection.identity.public_key
                behind_of_key[key] = behind_of_key.get(key, 0) + behind
                if behind > MAX_BEHIND or behind_of_key[key] > MAX_BEHIND_OF_KEY:
                    behind_of_key[key] -= behind
                    self.end(connection)
                    continue
            if connection is not None and connection.heard:
                connection.heard = False
                wire.read = received
            elif received - wire.read > MAX_UNREAD:
                wire.read = received  # said once
                self.end_wire(fd, wire)
                continue
            if connection is None:
                wire.silent += 1
                if wire.silent == round(HELLO_S / CHECK_S):
                    self.end_wire(fd, wire)

    def _listens(self, fd: int) -> None:
        self._listener = fd

    def _accepted(self, fd: int) -> None:
        self._strangers[fd] = self._wires[fd]
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self.end_wire(oldest, self._strangers.pop(oldest))

    def _disconnected(self, fd: int) -> None:
        self._strangers.pop(fd, None)

    def _shook_hands(self) -> None:
        self._handshakes += 1

    def _admit(self, connection: Connection, part: zmq.Frame) -> bool:
        assert self.ring is not None
        self._strangers.pop(connection.fd, None)
        number = (int.from_bytes(connection.routing_id[1:], "big") - self._first) % (1 << 32)
        if not 0 < number <= self._handshakes:
            self.counters.bad_frames += 1
            self.end(connection)
            return False
        user = part.get("User-Id")
        identity = self.ring.find(str(user))
        if identity is None:  # revoked since its handshake
            self.cut(connection, WireError(ErrorCode.UNAUTHORIZED, "this key was revoked"))
            return False
        connection.identity = identity
        own = sum(other.identity.public_key == identity.public_key for other in self._by_channel.values())
        if own > MAX_CONNECTIONS_OF_KEY:
            message = f"key {identity.name!r} has {MAX_CONNECTIONS_OF_KEY} connections, the most it may have: use those"
            self.cut(connection, WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=1000))
            return False
        return True

    def _filter(self, option: int, value: bytes) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, option, value)
        finally:
            listener.detach()


def _next_number(context: Context, router: zmq.Socket[bytes]) -> int:
    """What libzmq calls the next connection of this socket, which is not bound yet."""
    endpoint = f"inproc://first-of-{id(router)}"
    router.bind(endpoint)
    probe = context.socket(zmq.DEALER)
    probe.setsockopt(zmq.LINGER, 0)
    try:
        probe.connect(endpoint)
        probe.send(b"")
        routing_id = router.recv()  # within the process: it is there already
        router.recv()
    finally:
        probe.close()
        router.unbind(endpoint)
    return int.from_bytes(routing_id[1:], "big")


def _bytes_both_ways(fd: int) -> tuple[int, int]:
    """Of this connection: bytes that have arrived at its other end, and those that came from there."""
    info = borrow(fd, lambda borrowed: borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 192))
    if info is None or len(info) < _BYTES_ACKED + 16:
        return 0, 0
    arrived, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
    return int(arrived), int(received)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


_RETURN_NOTHING = (_Instruction * 1)(_Instruction(0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0: keep no byte of any packet


def _drop_everything() -> bytes:
    return bytes(_Program(1, ctypes.cast(_RETURN_NOTHING, ctypes.POINTER(_Instruction))))
