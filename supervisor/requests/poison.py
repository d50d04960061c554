"""Remember the requests that a worker was computing when it died, since one of them may be the reason. Pure.

Payloads are remembered, not requests: a client that sends the same payload again does not get a new count.
"""

from collections import OrderedDict
from dataclasses import dataclass

from supervisor.requests.digest import digest

MOST = 10_000
"""Payloads remembered; the oldest are forgotten first."""


@dataclass(frozen=True)
class PoisonPolicy:
    """limit     deaths that are blamed on a payload, after which it is refused
    window_s  seconds after the last death for which a payload is remembered
    """

    limit: int = 2
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is remembered of one payload.

    strikes  deaths that are blamed on it
    place    events that its request had when the last worker died; the most, of several requests with this payload
    at       when that worker died, monotonic seconds
    """

    strikes: int
    place: int
    at: float


class PoisonTracker:
    """Suspicions by payload."""

    def __init__(self, policy: PoisonPolicy) -> None:
        self.policy = policy
        self._suspicions: OrderedDict[bytes, Suspicion] = OrderedDict()

    def find(self, model: str, body: bytes, now: float) -> Suspicion | None:
        """Return what is remembered of a payload; None for one that is under no suspicion."""
        if not self._suspicions:  # the usual case costs nothing
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

    def clear(self, model: str, body: bytes) -> None:
        """Forget a payload: a request with it was computed to its end."""
        if self._suspicions:
            self._suspicions.pop(_digest(model, body), None)

    def next_is_last(self, suspicion: Suspicion | None) -> bool:
        """Return whether one more death that is blamed on this payload makes it poisoned."""
        return (suspicion.strikes if suspicion else 0) >= self.policy.limit - 1

    def poisons(self, suspicion: Suspicion | None) -> bool:
        """Return whether a payload is refused."""
        return suspicion is not None and suspicion.strikes >= self.policy.limit

    def _find(self, digest: bytes, now: float) -> Suspicion | None:
        found = self._suspicions.get(digest)
        if found is not None and now - found.at > self.policy.window_s:
            del self._suspicions[digest]
            return None
        return found


def _digest(model: str, body: bytes) -> bytes:
    return digest(body, model.encode())
