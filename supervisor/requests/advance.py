"""Credit that clients grant in advance: how much of it may be used before they have shown that they read. Pure.

A client that grants credit for what it has consumed never has more than the window. One that grants more has its
stream's events go to libzmq, which keeps them however many they are, although nobody may be reading. So credit beyond
the window is put aside and used a window at a time. MOST_UNREAD windows of a connection may be used like that; then the
client has to answer a PING, which shows that it has read everything that was sent before.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Final

from protocol.codec import encode
from protocol.messages import Ping
from supervisor.requests.in_flight import InFlight, ToClient

MOST_UNREAD: Final = 32
"""Windows of credit in advance, of 256 events each, that a connection may have used and not be known to have read."""


@dataclass(slots=True)
class _Connection:
    """unread    windows that were used since the client is known to have read
    nonce     of the PING that was not answered yet; 0 if there is none
    proved    windows that were used when that PING was sent
    waiting   requests that hold events until more may be used, in order
    """

    unread: int = 0
    nonce: int = 0
    proved: int = 0
    waiting: dict[InFlight, None] = field(default_factory=dict)


class Advances:
    """``window``: events of a stream that its client need not have read."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._nonces = count(1)  # 0 is what probes have
        self._connections: dict[int, _Connection] = {}

    def grant(self, request: InFlight, events: int) -> None:
        """Add to the request's credit up to the window, and put the rest aside."""
        now = min(events, max(0, self._window - request.credit))
        request.credit += now
        request.advance += events - now

    def use(self, request: InFlight) -> list[ToClient]:
        """Use a window of what was put aside, if that may be. The PING to send, if one is due.

        If not even a PING may be sent, since one is out, the request is noted and ``answered`` returns it.
        """
        if not request.advance:
            return []
        connection = self._connections.setdefault(request.channel, _Connection())
        if connection.unread >= MOST_UNREAD:
            connection.waiting[request] = None
            return []
        events = min(self._window, request.advance)
        request.credit += events
        request.advance -= events
        connection.unread += 1
        return self._ask(request.channel, connection)

    def answered(self, channel: int, nonce: int) -> tuple[list[ToClient], list[InFlight]]:
        """The client has answered a PING: the next PING, if one is due, and the requests that can go on."""
        connection = self._connections.get(channel)
        if connection is None or nonce != connection.nonce:
            return [], []
        connection.unread -= connection.proved
        connection.nonce = connection.proved = 0
        waiting, connection.waiting = list(connection.waiting), {}
        if not connection.unread:
            del self._connections[channel]
            return [], waiting
        return self._ask(channel, connection), waiting

    def leave(self, request: InFlight) -> None:
        """The request waits no more."""
        if (connection := self._connections.get(request.channel)) is not None:
            connection.waiting.pop(request, None)

    def gone(self, channel: int) -> None:
        """The connection has ended."""
        self._connections.pop(channel, None)

    def _ask(self, channel: int, connection: _Connection) -> list[ToClient]:
        if connection.nonce:
            return []
        connection.nonce = next(self._nonces)
        connection.proved = connection.unread
        return [ToClient(channel, encode(Ping(connection.nonce)))]
