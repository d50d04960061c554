"""What one model has to do and who can do it: its line, its workers, and which request goes where. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protocol.errors import ErrorCode, WireError
from supervisor.fair_queue import FairQueue
from supervisor.in_flight import InFlight
from supervisor.seats import Affinity, Seat, affinity_key

BYTES_PER_TOKEN = 4
"""Of a request's body, by which its prompt is estimated: English text has 4 to 5 a token, an id has 4."""
RETRY_MS = (100, 60_000)
"""Bounds of ``retry_after_ms``."""
UNMEASURED_RETRY_MS = 1000
RESERVE_S = 5.0
"""How long a worker is kept from new requests for one that must be alone, before it is another's turn."""
SMOOTHING = 0.2
"""Weight of the newest service time in their average."""


@dataclass(frozen=True)
class QueueLimits:
    """Most requests that wait for a model, and most tokens of all their prompts (estimated from their bytes)."""

    requests: int = 256
    tokens: int = 4_000_000


@dataclass(slots=True)
class Totals:
    """Counts since the supervisor's start. ``seconds``: average from a worker's taking a request to its end."""

    finished: int = 0
    errors: int = 0
    resumed: int = 0
    seconds: float | None = None

    def served(self, seconds: float) -> None:
        before = self.seconds
        self.seconds = seconds if before is None else before + SMOOTHING * (seconds - before)


@dataclass(slots=True)
class ModelQueue:
    """One model. Three lines: ``again`` for requests whose worker died, which have waited before; ``alone`` for those
    of them that may be why; ``line`` for the rest."""

    name: str
    limits: QueueLimits
    seats: dict[str, Seat]
    line: FairQueue = field(default_factory=FairQueue)
    again: deque[InFlight] = field(default_factory=deque)
    alone: deque[InFlight] = field(default_factory=deque)
    affinity: Affinity = field(default_factory=Affinity)
    totals: Totals = field(default_factory=Totals)
    reserved: Seat | None = None
    """It is being emptied for a request that must be alone."""
    reserved_since: float = 0.0

    @property
    def accepts(self) -> bool:
        """Whether requests may wait: some worker will serve them."""
        return any(seat.refusal is None for seat in self.seats.values())

    @property
    def running(self) -> int:
        return sum(len(seat.running) for seat in self.seats.values())

    @property
    def waiting(self) -> int:
        return len(self.line) + len(self.again) + len(self.alone)

    @property
    def refusal(self) -> WireError:
        """What a request is told that no worker will serve: a failed one says most."""
        told = [seat.refusal for seat in self.seats.values() if seat.refusal is not None]
        return next((error for error in told if error.code is ErrorCode.MODEL_FAILED), told[0])

    def all_waiting(self) -> Iterator[InFlight]:
        yield from self.alone
        yield from self.again
        yield from self.line

    def check_room(self, cost: int) -> None:
        """Raises OVERLOADED for one request more, of a prompt of ``cost`` tokens, with the time after which what waits
        now will have been started."""
        limits = self.limits
        if self.waiting < limits.requests and (not self.line.cost or self.line.cost + cost <= limits.tokens):
            return
        told = (
            f"model {self.name!r} has {self.waiting} requests waiting (at most {limits.requests}), their prompts about "
            f"{self.line.cost} tokens long (at most {limits.tokens}): try later"
        )
        raise WireError(ErrorCode.OVERLOADED, told, retry_after_ms=self._retry_after_ms())

    def _retry_after_ms(self) -> int:
        capacity = sum(seat.capacity for seat in self.seats.values())
        if self.totals.seconds is None or not capacity:
            return UNMEASURED_RETRY_MS
        least, most = RETRY_MS
        return int(min(most, max(least, 1000 * self.totals.seconds * self.waiting / capacity)))

    def push(self, request: InFlight) -> None:
        if request.alone:
            self.alone.append(request)
        elif request.resumes:
            self.again.append(request)
        else:
            self.line.push(request)

    def remove(self, request: InFlight) -> None:
        """Take out a request that waits."""
        if request.alone:
            self.alone.remove(request)
        elif request.resumes:
            self.again.remove(request)
        else:
            self.line.remove(request)

    def position(self, request: InFlight) -> int:
        """About how many requests will be started before this one."""
        if request.alone:
            return self.alone.index(request)
        if request.resumes:
            return len(self.alone) + self.again.index(request)
        return len(self.alone) + len(self.again) + self.line.position(request)

    def next(self, now: float) -> tuple[Seat, InFlight] | None:
        """A request taken out of the lines, and the worker it goes to; None if none can be started now."""
        if self.alone:
            empty = next((s for s in self.seats.values() if s.capacity and not s.running), None)
            if empty is not None:
                self.reserved = None
                empty.isolates = True
                return empty, self.alone.popleft()
            self._reserve(now)
        else:
            self.reserved = None
        free = [s for s in self.seats.values() if s.has_room and s is not self.reserved]
        if not free or not (self.again or self.line):
            return None
        request = self.again.popleft() if self.again else self._pop()
        return self._seat(free, request), request

    def _pop(self) -> InFlight:
        for seat in self.seats.values():
            for running in seat.running.values():
                running.settle()
        return self.line.pop()

    def _reserve(self, now: float) -> None:
        """Have one worker emptied, and only one: the others go on. In turns, since its last request may be endless."""
        reserved = self.reserved
        if reserved is not None and reserved.capacity and now - self.reserved_since < RESERVE_S:
            return
        able = [s for s in self.seats.values() if s.capacity and not s.isolates]
        others = [s for s in able if s is not reserved]
        self.reserved = min(others or able, key=lambda s: len(s.running), default=None)
        self.reserved_since = now

    def _seat(self, free: Sequence[Seat], request: InFlight) -> Seat:
        if len(self.seats) == 1:
            return free[0]
        return self.affinity.choose(free, affinity_key(request))
