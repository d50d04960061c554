"""Requests that were being computed when their worker died: one of them may be why. Pure.

Counted by payload, not by request: a client that sends the same again does not get a new count.
"""

from collections import OrderedDict
from dataclasses import dataclass

from supervisor.requests.digest import digest

MOST = 10_000
"""Payloads remembered; the oldest are forgotten first."""


@dataclass(frozen=True)
class StrikePolicy:
    """limit     deaths after which a payload is refused; with one less it runs alone on its worker
    window_s  seconds after the last of them that it is remembered for
    """

    limit: int = 2
    window_s: float = 600.0


class Strikes:
    """Deaths by payload."""

    def __init__(self, policy: StrikePolicy) -> None:
        self.policy = policy
        self._struck: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def count(self, model: str, body: bytes, now: float) -> int:
        """Deaths that this payload is remembered for."""
        if not self._struck:  # the usual case costs nothing
            return 0
        return self._count(_digest(model, body), now)

    def add(self, model: str, body: bytes, now: float) -> int:
        """One more; how many there are."""
        digest = _digest(model, body)
        count = self._count(digest, now) + 1
        self._struck[digest] = count, now
        self._struck.move_to_end(digest)
        if len(self._struck) > MOST:
            self._struck.popitem(last=False)
        return count

    def clear(self, model: str, body: bytes) -> None:
        """It was computed to its end: it was not the reason."""
        if self._struck:
            self._struck.pop(_digest(model, body), None)

    def isolates(self, count: int) -> bool:
        """Whether a payload with so many strikes has to run alone: its next would be the last."""
        return 0 < count == self.policy.limit - 1

    def poisons(self, count: int) -> bool:
        return count >= self.policy.limit

    def _count(self, digest: bytes, now: float) -> int:
        count, last = self._struck.get(digest, (0, now))
        if now - last <= self.policy.window_s:
            return count
        del self._struck[digest]
        return 0


def _digest(model: str, body: bytes) -> bytes:
    return digest(body, model.encode())
