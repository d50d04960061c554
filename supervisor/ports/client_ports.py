"""All ports that clients connect to. A channel is the number of one connection. No two ports use the same number."""

from collections.abc import Callable, Iterator

from protocol.errors import WireError
from supervisor.ports.client_port import ClientPort


class ClientPorts:
    """The ports, by purpose.

    front  requests and queries, over ipc
    admin  orders and queries, over ipc
    tcp    requests, queries and orders, as far as the client's key has the right; None if nothing listens on TCP
    used   called after a send to the admin port. The reactor does not ask that port in each turn, and a send may take
           note of input without reporting it
    """

    def __init__(
        self, front: ClientPort, admin: ClientPort, tcp: ClientPort | None, used: Callable[[], object]
    ) -> None:
        self.front = front
        self.admin = admin
        self.tcp = tcp
        self.for_requests = (front,) if tcp is None else (front, tcp)
        """The ports whose clients may have requests."""
        self._all = (*self.for_requests, admin)
        self._used = used
        # Looked up once: it is needed for every token that compiled code does not pass on.
        self._gone = [(port, port.gone) for port in self._all]

    @property
    def problem(self) -> str | None:
        """Why the port over TCP is not open, for people; None if it is, or if there is none."""
        return None if self.tcp is None else self.tcp.listener.problem

    def __iter__(self) -> Iterator[ClientPort]:
        return iter(self._all)

    def send(self, channel: int, frame: bytes) -> None:
        """Send a frame to a client. If the client is gone, ``take_gone`` returns its channel."""
        for port in self.for_requests:
            if port.send(channel, frame):
                return
        if self.admin.send(channel, frame):
            self._used()

    def end(self, channel: int, error: WireError) -> None:
        """Tell a client why its connection ends, and end it. Do nothing if the client has left."""
        for port in self._all:
            if (connection := port.connections_by_channel.get(channel)) is not None:
                port.cut(connection, error)

    def take_gone(self) -> list[int]:
        """Return the channels that have ended since the last call."""
        gone: list[int] = []
        for port, channels in self._gone:
            if channels:
                gone += port.take_gone()
        return gone

    def channels_for_requests(self) -> list[int]:
        """Return the channels of the clients that may have requests."""
        return [channel for port in self.for_requests for channel in port.connections_by_channel]

    @property
    def connected(self) -> int:
        """How many clients are connected and have sent a message."""
        return sum(len(port.connections_by_channel) for port in self._all)

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now, see ``ClientPort.lets_newcomers_in``."""
        return all(port.lets_newcomers_in(now) for port in self._all)
