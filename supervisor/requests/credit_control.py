"""Number the events for clients, count their credit, and hold events back where a client does not read. Pure.

Events of a client that reads slowly are held, up to a limit for the stream, for the party (a connection or a key) and
for the process. If a limit is exceeded, one stream is ended: of the streams under this limit, the one that holds most.
So a client that reads loses no stream because another client does not read. A stream is also ended when its client has
granted no credit for long.
"""

from collections import Counter
from dataclasses import dataclass

from protocol.codec import encode, pack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import EventEntry, EventFlag, Events, FinishReason
from supervisor.requests.advance import Advances
from supervisor.requests.in_flight import InFlight, ToClient
from supervisor.requests.request_phase import RequestPhase
from supervisor.usage.counters import COMPLETION

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
        self._total = 0
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
        if self._total > bounds.of_all:
            most = max(self._holding, key=_held_bytes, default=request)
            whose = f"all streams of all clients held {self._total} (at most {bounds.of_all})"
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

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all held events."""
        return self._total

    def _charge(self, request: InFlight, cost: int) -> None:
        self._total += cost
        self._of_party[request.party] += cost
        if not self._of_party[request.party]:
            del self._of_party[request.party]


def _held_bytes(request: InFlight) -> int:
    return request.held.cost


def _slow(request: InFlight, limit: str) -> WireError:
    """Return the error of a stream that is ended because of a limit on held bytes."""
    message = f"{len(request.held)} events waited for the client to read them, {request.held.cost} bytes: {limit}"
    return WireError(ErrorCode.SLOW_CONSUMER, message)
