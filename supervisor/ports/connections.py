"""The connections of one port: the state of each one, and the table of them."""

from dataclasses import dataclass
from itertools import count

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
