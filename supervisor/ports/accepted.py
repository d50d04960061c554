"""The descriptors of one port's connections, from the moment in which libzmq accepts them, as its monitor tells.

libzmq shows a connection only with its first message. A connection that brings none still has a descriptor.
"""

from supervisor.ports.wires import Endings, Wire, shut_down, socket_behind


class AcceptedDescriptors:
    """Accepted connections by descriptor, and what is known of their ends."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.strangers: dict[int, Wire] = {}
        """Connections that have brought no message yet, the oldest first."""
        self.endings = Endings()
        self._unheard: set[int] = set()
        """Descriptors of connections that ended before a message of them was read, until another connection has the
        descriptor."""

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

        heard  whether a message of it was read
        """
        self.wires.pop(fd, None)
        self.strangers.pop(fd, None)
        if not heard:
            self._unheard.add(fd)

    def ended_unheard(self, fd: int) -> bool:
        """Return whether the last connection with this descriptor ended before a message of it was read."""
        return fd in self._unheard

    def end(self, fd: int) -> None:
        """End a connection now, unless it has ended."""
        if (wire := self.wires.get(fd)) is not None:
            shut_down(fd, wire)

    def end_soon(self, routing_id: bytes, fd: int, now: float, *, hears: bool) -> bool:
        """End a connection when its client has had time to read why. Return False if it has ended.

        hears  False if not even libzmq is to read more of it
        """
        if (wire := self.wires.get(fd)) is None:
            return False
        self.endings.add(routing_id, fd, wire, now, hears=hears)
        return True
