"""Limit how much credit in advance is used before a client has shown that it reads. Pure.

A client that grants credit only for events that it has consumed never has more credit than the window. If a client
grants more, all its events go to libzmq, which keeps any number of them although the client may not be reading. So
credit beyond the window is put aside and used one window at a time. A connection may use MOST_UNREAD windows like that.
Then the client has to answer a PING. Its answer shows that it has read everything that was sent before the PING.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Final

from protocol.codec import encode
from protocol.messages import Ping
from supervisor.requests.in_flight import InFlight, ToClient

MOST_UNREAD: Final = 32
"""Windows of credit in advance, of 256 events each, that a connection may use before it has shown that it reads."""


@dataclass(slots=True)
class _Connection:
    """The credit in advance that one connection has used.

    unread   windows that were used since the client last showed that it reads
    nonce    of the PING that is not answered yet; 0 if there is none
    proved   windows that were used when that PING was sent
    waiting  requests that hold events until more credit may be used, in order
    """

    unread: int = 0
    nonce: int = 0
    proved: int = 0
    waiting: dict[InFlight, None] = field(default_factory=dict)


class Advances:
    """The credit in advance of all connections.

    window  events of a stream that may be on the way although its client may not have read them
    """

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
        """Use one window of the credit that was put aside, if the connection may use more. Return the PING to send.

        Return an empty list if no PING is due. If the connection may use no more credit, the request is noted.
        ``answered`` returns the request when the client has answered the PING that is on its way.
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
        """Take note of a PONG. Return the next PING, if one is due, and the requests that can go on."""
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
        """Forget a request that may have waited for a PONG."""
        if (connection := self._connections.get(request.channel)) is not None:
            connection.waiting.pop(request, None)

    def gone(self, channel: int) -> None:
        """Forget a connection that has ended."""
        self._connections.pop(channel, None)

    def _ask(self, channel: int, connection: _Connection) -> list[ToClient]:
        if connection.nonce:
            return []
        connection.nonce = next(self._nonces)
        connection.proved = connection.unread
        return [ToClient(channel, encode(Ping(connection.nonce)))]
