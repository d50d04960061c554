"""Decide which requests a worker's death is blamed on, and refuse those that have been blamed too often. Pure.

Most deaths are not the fault of a request, but of a driver, memory, or an operator. So the requests of a dead worker go
on in the next one, and none waits for the end of another. But from then on each of them is a suspect. In its next
worker a suspect is on probation, until a few events beyond the place where it was when the worker died. ``ModelQueue``
lets only a few suspects be on probation at once, and tries those with one strike left one by one. A death during their
probation is a strike against them, and against no other request. With the limit of two strikes, a request that kills
every worker is thus found by the third death at the latest. The first death makes it a suspect, the second strikes it
with a few others, and the third finds it alone.

Payloads are remembered, not requests: a client that sends the same payload again does not get a new count.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from protocol.errors import ErrorCode, WireError
from supervisor.requests.request import InFlight, digest

MOST = 10_000
"""The number of payloads that are remembered. The oldest are forgotten first."""


@dataclass(frozen=True)
class PoisonPolicy:
    """The rule by which a payload is refused.

    limit     deaths that are blamed on a payload, after which it is refused
    window_s  seconds after the last death for which a payload is remembered
    """

    limit: int = 2
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The record of a payload that was being computed when a worker died.

    strikes  deaths that are blamed on it
    place    events that its request had when the last worker died; the most, of several requests with this payload
    at       when that worker died, monotonic seconds
    """

    strikes: int
    place: int
    at: float


class PoisonTracker:
    """The suspicions of all payloads."""

    def __init__(self, policy: PoisonPolicy) -> None:
        self.policy = policy
        self._suspicions: OrderedDict[bytes, Suspicion] = OrderedDict()

    def find(self, model: str, body: bytes, now: float) -> Suspicion | None:
        """Return the suspicion of a payload; None for a payload under no suspicion."""
        if not self._suspicions:  # nearly always, and then a request costs no digest
            return None
        return self._find(_digest(model, body), now)

    def add(self, model: str, body: bytes, place: int, now: float, *, blamed: bool) -> None:
        """Remember that a worker died while it computed this payload. The death counts only if it is ``blamed``."""
        digest = _digest(model, body)
        before = self._find(digest, now)
        strikes = (before.strikes if before else 0) + blamed
        self._suspicions[digest] = Suspicion(strikes, place, now)
        self._suspicions.move_to_end(digest)
        if len(self._suspicions) > MOST:
            self._suspicions.popitem(last=False)

    def add_death(self, model: str, running: Collection[InFlight], now: float) -> None:
        """Remember the requests that a worker was computing when it died, and add a strike to each payload that the
        death is blamed on. A last strike, which makes a payload poisoned, is added only where no other request can be
        the reason."""
        struck, sure = _blamed(running)
        for payload in {request.body for request in running}:
            place = max(request.next_seq for request in running if request.body == payload)
            last = self.next_is_last(self.find(model, payload, now))
            self.add(model, payload, place, now, blamed=payload in struck and (sure or not last))

    def finds_culprit(self, model: str, running: Collection[InFlight], now: float) -> bool:
        """Return whether the death of a worker that computes these requests makes one of them poisoned.

        Call this before ``add_death``.
        """
        payloads, sure = _blamed(running)
        return sure and all(self.next_is_last(self.find(model, payload, now)) for payload in payloads)

    def clear(self, model: str, body: bytes) -> None:
        """Forget a payload: a request with it was computed to its end."""
        if self._suspicions:
            self._suspicions.pop(_digest(model, body), None)

    def update(self, request: InFlight, suspicion: Suspicion | None) -> bool:
        """Update a waiting request from the suspicion of its payload.

        Return whether the request has become a suspect, or its ``alone`` has changed. Then the request belongs to
        another place in the queue.
        """
        if suspicion is None:
            request.place, request.alone = None, False
            return False
        alone = self.next_is_last(suspicion)
        if request.place is not None and request.alone == alone:
            return False
        request.place = suspicion.place if request.place is None else request.place
        request.alone = alone
        return True

    def next_is_last(self, suspicion: Suspicion | None) -> bool:
        """Return whether one more death that is blamed on this payload makes it poisoned."""
        return (suspicion.strikes if suspicion else 0) >= self.policy.limit - 1

    def poisons(self, suspicion: Suspicion | None) -> bool:
        """Return whether a payload is refused."""
        return suspicion is not None and suspicion.strikes >= self.policy.limit

    def error(self) -> WireError:
        """Return the error that ends a poisoned request."""
        return WireError(
            ErrorCode.POISONED,
            f"the deaths of {self.policy.limit} workers are blamed on this request, or one just like it: it is not "
            f"tried again for {self.policy.window_s:g} s",
        )

    def _find(self, digest: bytes, now: float) -> Suspicion | None:
        found = self._suspicions.get(digest)
        if found is not None and now - found.at > self.policy.window_s:
            del self._suspicions[digest]
            return None
        return found


def _blamed(running: Collection[InFlight]) -> tuple[set[bytes], bool]:
    """Return the payloads that a death is blamed on, and whether no other payload can be the reason.

    running  the requests that the worker had, including those that were given up and that it had yet to let go
    """
    payloads = {request.body for request in running}
    if len(payloads) == 1:
        return payloads, True
    tried = {request.body for request in running if request.on_probation}
    untried = {request.body for request in running if request.is_new} - tried
    return tried, len(tried) == 1 and not untried


def _digest(model: str, body: bytes) -> bytes:
    return digest(body, model.encode())
