"""The descriptors of one port's connections, from the moment at which libzmq's monitor reports that it accepted them.

libzmq shows a connection only with its first message. A connection that brings none still has a descriptor.
"""

from supervisor.ports.wires import Endings, Wire, shut_down, socket_behind


class AcceptedDescriptors:
    """The accepted connections of one port, by descriptor, and those that are about to end or have ended."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.strangers: dict[int, Wire] = {}
        """Connections that have brought no message yet, the oldest first."""
        self.endings = Endings()
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

        hears  False if libzmq, too, is to read no more of the connection
        """
        if (wire := self.wires.get(fd)) is None:
            return False
        self.endings.add(routing_id, fd, wire, now, hears=hears)
        return True
