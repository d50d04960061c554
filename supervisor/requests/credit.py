"""Number the events for clients, count their credit, and hold events back where a client does not read. Pure.

Events of a client that reads slowly are held, up to a limit for the stream, for the party (a connection or a key) and
for the process. If a limit is exceeded, one stream is ended: of the streams under this limit, the one that holds most.
So a client that reads loses no stream because another client does not read. A stream is also ended when its client has
granted no credit for long.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from protocol.codec import encode, pack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import EventEntry, EventFlag, Events, FinishReason, Ping
from supervisor.requests.counters import COMPLETION
from supervisor.requests.request import InFlight, ToClient
from supervisor.requests.request_phase import RequestPhase

# Limit how much credit in advance is used before a client has shown that it reads. Pure.
#
# A client that grants credit only for events that it has consumed never has more credit than the window. If a client
# grants more, all its events go to libzmq, which keeps any number of them although the client may not be reading. So
# credit beyond the window is put aside and used one window at a time. A connection may use MOST_UNREAD windows like
# that. Then the client has to answer a PING. Its answer shows that it has read everything that was sent before the
# PING.


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


_MIB = 1 << 20
MOST_IN_FRAME = 4096
"""The most held events that go in one frame. A stream may hold more events than a frame may have."""


@dataclass(frozen=True)
class SendBufferLimits:
    """The limits of held events.

    of_stream, of_party, of_all  bytes of events that may be held. A party is a connection, or a key with all its
                                 connections, as in ``InFlight``. One gateway's connection carries the streams of many
                                 keys, so a limit on connections would let one key use up the room of other keys
    stall_s                      seconds that a stream may hold events while its client shows no sign of reading
    """

    of_stream: int = _MIB
    of_party: int = 16 * _MIB
    of_all: int = 64 * _MIB
    stall_s: float = 60.0


class CreditControl:
    """Counts the sent events and the credit of every stream, and holds events back.

    window  events that a stream may be ahead of its client's grants
    """

    def __init__(self, window: int, bounds: SendBufferLimits | None = None) -> None:
        self.window = window
        self.advances = Advances(window)
        self.bounds = bounds or SendBufferLimits()
        self._of_party: Counter[int] = Counter()
        self.held_bytes = 0
        """Bytes of all held events."""
        self._holding: dict[InFlight, float] = {}
        """The time, in monotonic seconds, since which each stream has held events without a new grant of its client."""

    # --- sending ------------------------------------------------------------------------------------------------

    def count_sent(self, request: InFlight, entry: EventEntry) -> None:
        """Take note that an event goes to the client."""
        request.sent = entry.seq + 1
        request.credit -= 1
        request.delivered_tokens += entry.tokens
        if request.counters is not None:
            request.counters[COMPLETION] += entry.tokens

    def hold(self, request: InFlight, entry: EventEntry, event: bytes, now: float) -> None:
        """Hold an event until its client grants credit. Ask ``excess`` afterwards."""
        before = request.held.cost
        request.held.add(entry.flags, entry.tokens, event)
        request.holds = True
        self._charge(request, request.held.cost - before)
        self._holding.setdefault(request, now)

    def grant(self, request: InFlight, events: int) -> None:
        """Add credit: the client has consumed events, or has room for them."""
        self.advances.grant(request, min(events, self.window))
        if events:
            self._holding.pop(request, None)

    def has_read(self, request: InFlight) -> None:
        """Take note that the client reads. The time for which its stream may hold events begins anew."""
        self._holding.pop(request, None)

    def release(self, request: InFlight, now: float, *, all_of_it: bool = False) -> tuple[list[ToClient], int]:
        """Take out held events in order, as far as credit goes. A terminal event needs no credit.

        all_of_it  take out all events, whatever the credit

        Returns the frames to send, PINGs for credit in advance included, and the flags of the last event; 0 if none.
        """
        frames, last = self._take_held(request, now, all_of_it=all_of_it)
        while request.holds:
            pings = self.advances.use(request)
            if request.credit <= 0:
                break
            more, last = self._take_held(request, now)
            frames += [*more, *pings]
        return frames, last

    def _take_held(self, request: InFlight, now: float, *, all_of_it: bool = False) -> tuple[list[ToClient], int]:
        """Take out held events as far as the present credit goes."""
        held = len(request.held)
        count = held if all_of_it else min(held, max(0, request.credit))
        if count == held - 1 and not all_of_it and request.phase is RequestPhase.HELD:
            count = held
        if not count:
            return [], 0
        before = request.held.cost
        frames: list[ToClient] = []
        while count:
            entries, body = request.held.take(min(count, MOST_IN_FRAME))
            count -= len(entries)
            index = []
            for flags, tokens, length in entries:
                entry = EventEntry(request.request, request.sent, flags, tokens, length)
                self.count_sent(request, entry)
                index.append(entry)
            frames.append(ToClient(request.channel, encode(Events(request.channel, 0, index, body))))
        self._charge(request, request.held.cost - before)
        request.holds = bool(request.held)
        if not request.holds:
            self._holding.pop(request, None)
            self.advances.leave(request)
        else:
            self._holding.setdefault(request, now)
        return frames, index[-1].flags

    def end(self, request: InFlight, error: WireError | None) -> ToClient:
        """Return the terminal event of a request whose worker cannot make it. Held events are dropped.

        error  None for a request that was cancelled
        """
        self.drop(request)
        sent = request.delivered_tokens
        if error is not None:
            flag, fields = EventFlag.ERROR, {"error": error.to_wire(), "delivered_tokens": sent}
        else:
            usage = {"prompt_tokens": request.prompt_tokens or 0, "completion_tokens": sent}
            flag = EventFlag.FINISHED
            fields = {"text": "", "finish_reason": FinishReason.CANCELLED, "usage": usage, "timings": {}}
        event = pack_event((), fields)
        entry = EventEntry(request.request, request.sent, int(flag), 0, len(event))
        request.sent += 1
        return ToClient(request.channel, encode(Events(request.channel, 0, [entry], event)))

    def drop(self, request: InFlight) -> None:
        """Drop the held events of a request. No client will read them."""
        self._charge(request, -request.held.cost)
        request.held.clear()
        request.holds = False
        self._holding.pop(request, None)
        self.advances.leave(request)

    # --- bounds -------------------------------------------------------------------------------------------------

    def excess(self, request: InFlight) -> tuple[InFlight, WireError] | None:
        """Return the request that has to be ended because an event was just held for this one, and the error that ends
        it. Return None if the held events are within their limits."""
        bounds, of_party = self.bounds, self._of_party[request.party]
        if request.held.cost > bounds.of_stream:
            return request, _slow(request, f"a stream may hold {bounds.of_stream}")
        if of_party > bounds.of_party:
            its = (other for other in self._holding if other.party == request.party)
            most = max(its, key=_held_bytes, default=request)
            whose = f"all streams of its client held {of_party} (at most {bounds.of_party})"
            return most, _slow(most, f"more than any other while {whose}")
        if self.held_bytes > bounds.of_all:
            most = max(self._holding, key=_held_bytes, default=request)
            whose = f"all streams of all clients held {self.held_bytes} (at most {bounds.of_all})"
            return most, _slow(most, f"more than any other while {whose}")
        return None

    def stalled(self, now: float) -> list[tuple[InFlight, WireError]]:
        """Return the requests whose clients have granted nothing for too long although events wait, and the errors that
        end them."""
        stall_s = self.bounds.stall_s
        return [
            (
                request,
                WireError(
                    ErrorCode.SLOW_CONSUMER,
                    f"{len(request.held)} events waited, and the client read none for {stall_s:g} s",
                ),
            )
            for request, since in self._holding.items()
            if now - since >= stall_s
        ]

    def _charge(self, request: InFlight, cost: int) -> None:
        self.held_bytes += cost
        self._of_party[request.party] += cost
        if not self._of_party[request.party]:
            del self._of_party[request.party]


def _held_bytes(request: InFlight) -> int:
    return request.held.cost


def _slow(request: InFlight, limit: str) -> WireError:
    """Return the error of a stream that is ended because of a limit on held bytes."""
    message = f"{len(request.held)} events waited for the client to read them, {request.held.cost} bytes: {limit}"
    return WireError(ErrorCode.SLOW_CONSUMER, message)
