"""Ports over ipc and over TCP, and the connections that may not stay there.

A port over ipc has a private socket file. The handshake (ZAP) admits only processes of the supervisor's user."""

import ctypes
import fcntl
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import zmq

from protocol import limits
from protocol.errors import ErrorCode, WireError
from protocol.process.sockets import monitor_event
from supervisor.keys.rights import OWNER
from supervisor.keys.ring import KeyRing
from supervisor.ports.client_port import MONITORED, ClientPort
from supervisor.ports.connections import ClientConnection, ForgedRoutingId, Wire, borrow
from supervisor.ports.sockets import (
    Context,
    ListenAttempts,
    ListenError,
    admit_keys_only,
    bind_private,
    client_router,
    open_monitor,
    try_bind,
)
from supervisor.ports.zap import TCP_DOMAIN
from supervisor.reactor import resident
from supervisor.runtime import SocketFile

# Find local connections that fill libzmq's memory with messages that libzmq never passes on to the supervisor.
#
# libzmq reads a message of several parts whole before it passes any part on, however long the message grows. libzmq
# also reads the messages of a client that chose the routing id of another connection, and never passes them on. Over
# TCP the kernel counts the bytes of each connection (see ``TcpListener``). For a local connection the kernel tells
# only how many bytes are unread.


GROWTH = 4 * limits.SOCKET_MAX_FRAME
"""Bytes that the process must have grown by before a connection is suspected."""
GATHERED = limits.SOCKET_MAX_FRAME
"""Bytes that the process must have grown by since a connection was suspected, before that connection is ended. On a
busy machine libzmq's thread may get no processor for longer than the time between checks. Then a quick client that
sends many requests at once has a full buffer and brings no message. But libzmq's memory does not grow in that time."""
UNREAD = 32 << 10
"""Bytes that a suspected connection must have in the kernel's buffer. A flood is faster than libzmq and keeps the
buffer full. A client's request is mostly smaller."""
_FIONREAD = 0x541B


class Gathering:
    """The suspected connections of one port. This class decides which connections to end when memory grows too much.

    A connection is suspected if it has brought no message since the last check, although UNREAD of its bytes wait to
    be read. A connection is to end if each check suspects it while the process grows by GATHERED.
    """

    def __init__(self) -> None:
        self._calm: int | None = None
        """Bytes that the process had in memory when a check last found growth and suspected no connection, or at the
        first check. None before that."""
        self._suspects: dict[int, int] = {}
        """By descriptor: bytes that the process had in memory when the connection became suspected."""

    def find_abusers(self, resident: int, accepted: Collection[int], heard: Callable[[], Collection[int]]) -> set[int]:
        """Return the descriptors of the connections to end.

        resident  bytes that the process has in memory
        accepted  the descriptors of all connections
        heard     a function that returns the descriptors of connections that brought a message since its last call
        """
        if self._calm is None:
            self._calm = resident
        if resident - self._calm < GROWTH:
            self._suspects = {}
            return set()
        speaking = heard()
        self._suspects = {
            fd: min(self._suspects.get(fd, resident), resident)
            for fd in accepted
            if fd not in speaking and _has_unread(fd)
        }
        if not self._suspects:
            self._calm = resident
        return {fd for fd, before in self._suspects.items() if resident - before >= GATHERED}


def _has_unread(fd: int) -> bool:
    try:
        return int.from_bytes(fcntl.ioctl(fd, _FIONREAD, bytes(4)), sys.byteorder) >= UNREAD
    except OSError:  # closed meanwhile
        return False


class IpcListener:
    """The way into a port over ipc, see ``Listener``."""

    check_s = 0.05
    """Seconds between two calls of ``find_abusers``. libzmq can receive 100 MB in that time."""
    most_strangers: int | None = None

    def __init__(self, file: SocketFile) -> None:
        self.file = file
        self._gathering = Gathering()
        self.problem: str | None = None

    def listen(self, now: float) -> None:
        """Do nothing: the port is open."""

    def pause(self) -> None:
        """Hide the socket's file."""
        self.file.hide()

    def resume(self) -> None:
        """Show the socket's file."""
        self.file.show()

    def admit(
        self,
        connection: ClientConnection,
        part: zmq.Frame,
        all_connections: Collection[ClientConnection],
        handshakes: int,
    ) -> None:
        """Give the connection the rights of the supervisor's own user. The handshake has checked the user."""
        connection.identity = OWNER

    def find_abusers(self, wires: Mapping[int, Wire], connections: Mapping[int, ClientConnection]) -> Collection[int]:
        """Return the descriptors of the connections that fill libzmq's memory."""
        return self._gathering.find_abusers(resident(), wires, lambda: _take_heard(connections))


def open_ipc_port(
    context: Context, endpoint: str, backlog: int, holds: Callable[[int, int], bool], log: logging.Logger
) -> tuple[ClientPort, SocketFile]:
    """Bind a private ipc ROUTER, and return the port and its file. The runtime directory's lock must be held.

    backlog  connections that the kernel may have ready for us
    holds    see ``ClientPort``
    """
    socket = client_router(context, backlog)
    # The connection of a frozen client (SIGSTOP) ends after the sum of both times.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2500)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2500)
    monitor = open_monitor(context, socket, MONITORED)
    file = bind_private(socket, endpoint)
    return ClientPort(endpoint, socket, monitor, IpcListener(file), holds, log), file


def _take_heard(connections: Mapping[int, ClientConnection]) -> set[int]:
    """Return the descriptors of connections that brought a message since the last call."""
    heard = {fd for fd, connection in connections.items() if connection.heard}
    for fd in heard:
        connections[fd].heard = False
    return heard


# A port that is open to the network, with CURVE, a list of keys, and limits that libzmq does not have.
#
# * **The owner of a connection.** The handshake proves a public key. libzmq puts the key into the metadata of each
# message (User-Id). The listener looks up the key of the first message in the list. * **A message without end.**
# libzmq keeps all parts of a message until the last one has come, and no option limits that. The kernel counts the
# bytes of each connection (TCP_INFO). A connection that sends MAX_UNREAD bytes and completes no message is ended. A
# peer without a key cannot do that: libzmq keeps nothing before the handshake. * **A client that does not read.**
# libzmq limits how many frames it keeps for a client, but not their size. The kernel knows how many bytes have arrived
# at the client. The connection of a client that is MAX_BEHIND bytes behind is ended. * **A forged routing id.** libzmq
# numbers its connections, beginning with a number of 32 bits that it draws. The number is the same in each process,
# unless the C library's generator is seeded. A peer may choose a routing id that looks like the next number, and
# libzmq aborts the process when it gives out that number. So the supervisor seeds the generator, and notes the first
# number before anybody can connect. libzmq gives out a number after each handshake. An id that is further from the
# first number than the count of handshakes is forged, and its connection is ended at once. The supervisor sees an id
# only with the first message, so a connection that sends none is ended after HELLO_S. Each key may connect at a
# limited rate (``supervisor.keys.ring``), so its chance to guess among 2**32 numbers is small. * **Scarce
# descriptors.** A filter on the listening socket drops the packets of new clients. The kernels of these clients try
# again by themselves. (To unbind the socket would end the connections that exist.)


MAX_UNREAD = 2 * limits.SOCKET_MAX_FRAME
"""Bytes that a connection may send without completing a message."""
MAX_BEHIND = 64 << 20
"""Bytes that may wait for one client to read them."""
MAX_BEHIND_OF_KEY = 4 * MAX_BEHIND
"""Bytes that may wait for all clients of a key together. Credit keeps the bytes of streams below that."""
MAX_CONNECTIONS_OF_KEY = 256
CHECK_S = 0.2
"""Seconds between two calls of ``TcpListener.find_abusers``."""
HELLO_S = 5.0
"""Seconds that a connection may take until its first message, HELLO. They are counted in calls of ``find_abusers``,
because a supervisor that was stopped for a time could not read a HELLO."""
MAX_STRANGERS = 256
"""Connections that may exist without having brought a message, for they may have no key. If there are more, the oldest
one is ended. A client with a key sends its first message within milliseconds. A peer without a key would stay 3 s."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_TCP_INFO, _BYTES_ACKED = 11, 120
"""linux/tcp.h: tcpi_bytes_acked and behind it tcpi_bytes_received, each a u64, are 120 bytes into struct tcp_info
(since Linux 4.1)."""


class TcpListener:
    """The way into a port over TCP, see ``Listener``.

    ring      the keys that are on the list
    router    the socket, which is not bound yet
    monitor   its monitor
    """

    check_s = CHECK_S
    most_strangers: int | None = MAX_STRANGERS

    def __init__(
        self,
        endpoint: str,
        ring: KeyRing,
        router: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        first_number: int,
        log: logging.Logger,
    ) -> None:
        self.first_number = first_number
        self._ring = ring
        self._router = router
        self._monitor = monitor
        self._log = log
        self.attempts = ListenAttempts(endpoint, "supervisor.listen")
        self._descriptor: int | None = None
        self._paused = False

    @property
    def problem(self) -> str | None:
        """Why the port is not open; None if it is."""
        return self.attempts.problem

    def listen(self, now: float) -> None:
        """Open the port, if it is not open and an attempt is due."""
        if self._descriptor is not None or not try_bind(self._router, self.attempts, now, self._log):
            return
        self._descriptor = _listening_descriptor(self._monitor)
        if self._paused:
            self.pause()
        self._log.info("listening on %s, for keys on the list only", self.attempts.address)

    def pause(self) -> None:
        """Have the kernel drop the packets of newcomers."""
        self._paused = True
        self._filter(_SO_ATTACH_FILTER, _drop_everything())

    def resume(self) -> None:
        """Have the kernel take newcomers again."""
        self._paused = False
        self._filter(_SO_DETACH_FILTER, struct.pack("i", 0))

    def admit(
        self,
        connection: ClientConnection,
        part: zmq.Frame,
        all_connections: Collection[ClientConnection],
        handshakes: int,
    ) -> None:
        """Give the connection the rights of its key.

        Raises ForgedRoutingId; WireError if the key was revoked since the handshake or has too many connections.
        """
        number = (int.from_bytes(connection.routing_id[1:], "big") - self.first_number) % (1 << 32)
        if not 0 < number <= handshakes:
            raise ForgedRoutingId
        identity = self._ring.find(str(part.get("User-Id")))
        if identity is None:
            raise WireError(ErrorCode.UNAUTHORIZED, "this key was revoked")
        connection.identity = identity
        own = sum(other.identity.key_id == identity.key_id for other in all_connections)
        if own > MAX_CONNECTIONS_OF_KEY:
            message = f"key {identity.name!r} has {MAX_CONNECTIONS_OF_KEY} connections, the most it may have: use those"
            raise WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=1000)

    def find_abusers(self, wires: Mapping[int, Wire], connections: Mapping[int, ClientConnection]) -> Collection[int]:
        """Return the descriptors of clients that send a message without end, do not read, or send no HELLO."""
        return list(self._find(wires, connections))

    def _find(self, wires: Mapping[int, Wire], connections: Mapping[int, ClientConnection]) -> Iterator[int]:
        behind_of_key: dict[str, int] = {}
        for fd, wire in wires.items():
            arrived, received = bytes_both_ways(fd)
            connection = connections.get(fd)
            if connection is not None and (behind := connection.behind(arrived)):
                key = connection.identity.key_id
                behind_of_key[key] = behind_of_key.get(key, 0) + behind
                if behind > MAX_BEHIND or behind_of_key[key] > MAX_BEHIND_OF_KEY:
                    behind_of_key[key] -= behind
                    yield fd
                    continue
            if connection is not None and connection.heard:
                connection.heard = False
                wire.read = received
            elif received - wire.read > MAX_UNREAD:
                wire.read = received  # so that this connection is reported once
                yield fd
                continue
            if connection is None:
                wire.silent += 1
                if wire.silent == round(HELLO_S / CHECK_S):
                    yield fd

    def _filter(self, option: int, value: bytes) -> None:
        if self._descriptor is None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._descriptor)
        try:
            listener.setsockopt(socket.SOL_SOCKET, option, value)
        finally:
            listener.detach()


def open_tcp_port(
    context: Context,
    endpoint: str,
    secret_key: str,
    ring: KeyRing,
    backlog: int,
    holds: Callable[[int, int], bool],
    log: logging.Logger,
) -> ClientPort:
    """Make the port, and open it if that is possible now. Raises ListenError if it never will be.

    secret_key  the server's secret key for CURVE
    backlog     connections that the kernel may have ready for the supervisor
    holds       see ``ClientPort``
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _drop_everything())
    except OSError as e:
        message = f"cannot listen on {endpoint} safely: the kernel refuses a filter on the socket ({e.strerror})"
        raise ListenError(f"{message}; allow setsockopt(SO_ATTACH_FILTER), or remove supervisor.listen") from None
    router = client_router(context, backlog)
    admit_keys_only(router, endpoint, secret_key.encode(), TCP_DOMAIN)
    # the time-out must exceed the transfer of the largest frame, or heartbeats end the connection
    router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    monitor = open_monitor(context, router, MONITORED | zmq.EVENT_LISTENING | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    first_number = next_number(context, router)
    listener = TcpListener(endpoint, ring, router, monitor, first_number, log)
    listener.listen(time.monotonic())
    if not listener.attempts.may_pass:
        monitor.close(linger=0)
        router.close(linger=0)
        raise ListenError(listener.problem)
    return ClientPort(endpoint, router, monitor, listener, holds, log)


def _listening_descriptor(monitor: zmq.Socket[bytes]) -> int:
    """Return the descriptor of the listening socket. libzmq tells it before ``bind`` returns, and before it accepts."""
    kind, descriptor = monitor_event(monitor)
    assert kind == zmq.EVENT_LISTENING
    return descriptor


def next_number(context: Context, router: zmq.Socket[bytes]) -> int:
    """Return the number that libzmq gives the next connection of this socket, which is not bound yet."""
    endpoint = f"inproc://first-of-{id(router)}"
    router.bind(endpoint)
    probe = context.socket(zmq.DEALER)
    probe.setsockopt(zmq.LINGER, 0)
    try:
        probe.connect(endpoint)
        probe.send(b"")
        routing_id = router.recv()  # does not wait: an inproc message has arrived when ``send`` returns
        router.recv()
    finally:
        probe.close()
        router.unbind(endpoint)
    return int.from_bytes(routing_id[1:], "big")


def bytes_both_ways(fd: int) -> tuple[int, int]:
    """Return how many bytes have arrived at the connection's peer, and how many the peer has sent to us. Return zeros
    if the kernel does not tell."""
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
