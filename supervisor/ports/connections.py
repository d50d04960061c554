"""The connections of one port: the state of each one, and the table of them."""

import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import zmq

from supervisor.keys.rights import NOBODY, Identity

MAX_LEFT = 1024
"""Ended connections that are remembered while libzmq has no messages for the supervisor. Their last frames may still
arrive."""
MOST_LEFT = 100_000
"""Ended connections that are remembered while libzmq has messages for the supervisor. If a connection were forgotten
too early, its next message would look like the first message of a new connection."""

_channels = count(1)


@dataclass(slots=True)
class ClientConnection:
    """One client connection.

    fd        the connection's descriptor in this process, -1 if libzmq did not tell
    greeted   whether HELLO has come
    identity  the owner of the connection, with the owner's rights. NOBODY until the port's ``Listener`` has admitted it
    heard     whether a message has come since the port's limits were enforced last
    given     bytes that libzmq was given to send to the client
    """

    routing_id: bytes
    channel: int
    fd: int
    greeted: bool = False
    identity: Identity = NOBODY
    heard: bool = False
    given: int = 0

    def behind(self, arrived: int) -> int:
        """Return how many of the bytes that libzmq was given for the client have not arrived.

        arrived  bytes that have arrived since the beginning. They include encryption and heartbeats, so they can exceed
                 ``given``. ``given`` is then raised, or else the excess would hide later bytes that do not arrive
        """
        self.given = max(self.given, arrived)
        return self.given - arrived


@dataclass(slots=True)
class PortCounters:
    """Counters since the start.

    handshakes    handshakes that have succeeded, counted over TCP only
    disconnected  ended connections, including those that libzmq ended for a frame beyond 16 MiB
    cut_off       connections that the supervisor ended
    """

    accepted: int = 0
    handshakes: int = 0
    disconnected: int = 0
    handshakes_failed: int = 0
    bad_frames: int = 0
    cut_off: int = 0


class ConnectionTable:
    """The connections of one port by routing id, by channel and by descriptor, and those that have ended lately."""

    def __init__(self) -> None:
        self.by_id: dict[bytes, ClientConnection] = {}
        self.by_channel: dict[int, ClientConnection] = {}
        self.by_fd: dict[int, ClientConnection] = {}
        self.gone: list[int] = []
        """Channels of connections that were removed since the last ``take_gone``. The list stays the same object."""
        self._left: dict[bytes, None] = {}
        """Routing ids of connections that have ended, oldest first."""

    def add(self, routing_id: bytes, fd: int) -> ClientConnection:
        """Add a new connection, and give it a channel."""
        connection = ClientConnection(routing_id, next_channel(), fd)
        self.by_id[routing_id] = connection
        self.by_channel[connection.channel] = connection
        if fd >= 0:
            self.by_fd[fd] = connection
        return connection

    def remove(self, connection: ClientConnection) -> bool:
        """Remove a connection that has ended. Return False if it was removed before."""
        if self.by_channel.pop(connection.channel, None) is None:
            return False
        self.by_id.pop(connection.routing_id, None)
        if self.by_fd.get(connection.fd) is connection:
            del self.by_fd[connection.fd]
        self.ignore(connection.routing_id)
        self.gone.append(connection.channel)
        return True

    def take_gone(self) -> list[int]:
        """Return the channels of the connections that were removed since the last call."""
        gone = [*self.gone]
        self.gone.clear()
        return gone

    def ignore(self, routing_id: bytes) -> None:
        """Remember that messages with this routing id come from a connection that has ended."""
        self._left[routing_id] = None
        if len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def is_ignored(self, routing_id: bytes) -> bool:
        """Return whether the connection with this routing id has ended."""
        return routing_id in self._left

    def shorten_ignored(self) -> None:
        """Forget all but the last MAX_LEFT connections that ended. Call this when libzmq has no more messages."""
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]


def next_channel() -> int:
    """Return a number that no connection of this process has had."""
    return next(_channels)


def descriptor_of(part: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came through; -1 if libzmq does not know it."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def is_automatic(routing_id: bytes) -> bool:
    """Return whether the routing id has libzmq's own form. A client that chose another client's id could receive that
    client's frames."""
    return len(routing_id) == 5 and routing_id[0] == 0


def is_older(routing_id: bytes, other: bytes) -> bool:
    """Return whether libzmq gave ``routing_id`` before ``other``.

    libzmq's own routing ids are a zero byte and a counter of four bytes, which wraps around.
    """
    age = int.from_bytes(other[1:], "big") - int.from_bytes(routing_id[1:], "big")
    return 0 < age % (1 << 32) < 1 << 31


# End one connection of a libzmq socket, for which libzmq has no call.
#
# The socket's monitor and SRCFD tell the descriptor of a connection. ``shutdown(2)`` on that descriptor looks to
# libzmq like a peer that has left. The system uses descriptors again. So this module notes the kernel's socket behind
# a descriptor when libzmq accepts the connection, and compares it before each action.


LAST_WORD_S = 0.5
"""Seconds between the ERROR that tells a client why, and the end of its connection."""
MOST_AFTER_LAST_WORD = 4096
"""Frames that a connection may send during LAST_WORD_S. A connection that sends more is ended at once."""

WRITE_S = 0.02
"""Seconds for libzmq to write the ERROR before the supervisor stops it from reading more of the connection. When
libzmq sees the end of a connection, it drops what it has not written, and the client would not learn why."""

T = TypeVar("T")
KernelSocket = tuple[int, int]
"""Device and inode number. No two sockets that exist at the same time have the same."""


@dataclass(slots=True)
class Wire:
    """An accepted descriptor.

    socket  the kernel's socket behind the descriptor; None if that was closed before the supervisor asked
    read    bytes received up to the check that last found a complete message
    silent  how many checks of the limits have found that no message came since the descriptor was accepted
    """

    socket: KernelSocket | None
    read: int = 0
    silent: int = 0


@dataclass(slots=True)
class _Ending:
    at: float
    fd: int
    wire: Wire
    hears: bool
    frames: int = 0


def socket_behind(fd: int) -> KernelSocket | None:
    """Return the kernel's socket of which this is a descriptor now; None if the descriptor is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def process_of(fd: int) -> int:
    """Return the pid of a local client; 0 if it is not known, as over TCP."""
    credentials = borrow(fd, lambda borrowed: borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return 0 if credentials is None else int.from_bytes(credentials[:4], sys.byteorder, signed=True)


def shut_down(fd: int, wire: Wire) -> None:
    """End the connection, unless it has ended by itself and the descriptor is another connection's by now."""
    if wire.socket is not None and socket_behind(fd) == wire.socket:
        borrow(fd, lambda borrowed: borrowed.shutdown(socket.SHUT_RDWR))


def stop_reading(fd: int, wire: Wire) -> None:
    """Let libzmq read what the kernel has already received on this connection, and no more.

    Over ipc the client can send nothing more. libzmq reads the rest, some 200 KB, and then sees the end of the
    connection. libzmq should have written the ERROR that tells the client why before it sees that end, see WRITE_S.
    Over TCP the client's kernel goes on sending, and the connection ends at ``shut_down``.
    """
    if wire.socket is not None and socket_behind(fd) == wire.socket:
        borrow(fd, lambda borrowed: borrowed.shutdown(socket.SHUT_RD))


def borrow(fd: int, act: Callable[[socket.socket], T]) -> T | None:
    """Call ``act`` with libzmq's descriptor as a socket, and return the result. Return None if the descriptor is closed
    or the peer has left."""
    try:
        # Python asks the kernel for fewer properties if the kind is given. The family may be wrong, so ``act`` must not
        # ask for addresses.
        borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        return act(borrowed)
    except OSError:
        return None
    finally:
        borrowed.detach()


# The descriptors of one port's connections, from the moment at which libzmq's monitor reports that it accepted them.
#
# libzmq shows a connection only with its first message. A connection that brings none still has a descriptor.


class AcceptedDescriptors:
    """The accepted connections of one port, by descriptor, and those that are about to end or have ended."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.strangers: dict[int, Wire] = {}
        """Connections that have brought no message yet, the oldest first."""
        self._endings: dict[bytes, _Ending] = {}
        """By routing id, connections whose clients were told why they end. They are shut down LAST_WORD_S later."""
        self._unheard: set[int] = set()
        """Descriptors of connections that ended before one of their messages was read. A descriptor leaves this set
        when another connection gets it."""

    def accept(self, fd: int, most_strangers: int | None) -> int | None:
        """Note a new connection. Return the descriptor of the stranger to end, if there are too many strangers now.

        most_strangers  connections that may exist without having brought a message; None if that is not limited
        """
        self._unheard.discard(fd)
        self.wires[fd] = self.strangers[fd] = Wire(socket_behind(fd))
        if most_strangers is None or len(self.strangers) <= most_strangers:
            return None
        oldest = next(iter(self.strangers))
        del self.strangers[oldest]
        return oldest

    def note_message(self, fd: int) -> None:
        """Note that a connection has brought its first message."""
        self.strangers.pop(fd, None)

    def note_end(self, fd: int, *, heard: bool) -> None:
        """Note that a connection has ended.

        heard  whether the supervisor has read a message of this connection
        """
        self.wires.pop(fd, None)
        self.strangers.pop(fd, None)
        if not heard:
            self._unheard.add(fd)

    def ended_unheard(self, fd: int) -> bool:
        """Return whether the last connection with this descriptor ended before a message of it was read."""
        return fd in self._unheard

    def end(self, fd: int) -> None:
        """End a connection now. Do nothing if it has ended already."""
        if (wire := self.wires.get(fd)) is not None:
            shut_down(fd, wire)

    def end_soon(self, routing_id: bytes, fd: int, now: float, *, hears: bool) -> bool:
        """End a connection as soon as its client has had time to read why. Return False if the connection has ended.

        hears  False if libzmq is to read no more of the connection once it has had WRITE_S to write the ERROR
        """
        if (wire := self.wires.get(fd)) is None:
            return False
        self._endings[routing_id] = _Ending(now + LAST_WORD_S, fd, wire, hears)
        return True

    def count_dropped(self, routing_id: bytes) -> None:
        """Count a dropped frame of an ended connection. Shut the connection down now if it goes on sending."""
        ending = self._endings.get(routing_id)
        if ending is not None:
            ending.frames += 1
            if ending.frames > MOST_AFTER_LAST_WORD:
                del self._endings[routing_id]
                shut_down(ending.fd, ending.wire)

    def end_overdue(self, now: float) -> None:
        """Shut down the connections whose clients have had their time to read why they end."""
        for routing_id, ending in list(self._endings.items()):
            if ending.at <= now:
                del self._endings[routing_id]
                shut_down(ending.fd, ending.wire)
            elif not ending.hears and ending.at - LAST_WORD_S + WRITE_S <= now:
                ending.hears = True  # once is enough
                stop_reading(ending.fd, ending.wire)


# The interface to the parts of a port that differ between ipc and TCP: pausing, admission of clients, and limits.


class ForgedRoutingId(Exception):
    """A client has chosen a routing id that looks like one of libzmq's own. Nothing can be sent to the client."""


class Listener(Protocol):
    """The way into one port. ``IpcListener`` and ``TcpListener`` are the two that exist."""

    check_s: float
    """Seconds between two calls of ``find_abusers``."""
    most_strangers: int | None
    """Connections that may exist without having brought a message; None if that is not limited."""

    @property
    def problem(self) -> str | None:
        """Why the port is not open, for people; None if it is."""

    def listen(self, now: float) -> None:
        """Open the port, if that was not possible yet. ``now`` is in monotonic seconds."""

    def pause(self) -> None:
        """Take no new connections. Connections that exist go on."""

    def resume(self) -> None:
        """Take connections again."""

    def admit(
        self,
        connection: ClientConnection,
        part: zmq.Frame,
        all_connections: Collection[ClientConnection],
        handshakes: int,
    ) -> None:
        """Set the identity of a new connection. Raises WireError or ForgedRoutingId if the connection may not stay.

        part             the connection's first message
        all_connections  the connections of this port, this one included
        handshakes       how many handshakes have succeeded at this port
        """

    def find_abusers(self, wires: Mapping[int, Wire], connections: Mapping[int, ClientConnection]) -> Collection[int]:
        """Return the descriptors of the connections to end, since they exceed the limits of this kind of port.

        wires        all accepted connections, by descriptor
        connections  those of them that have brought a message, by descriptor
        """
        ...
