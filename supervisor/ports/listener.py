"""The interface to the parts of a port that differ between ipc and TCP: pausing, admission of clients, and limits."""

from collections.abc import Collection, Mapping
from typing import Protocol

import zmq

from supervisor.ports.connections import ClientConnection
from supervisor.ports.wires import Wire


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
