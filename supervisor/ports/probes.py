"""Which clients are asked for a sign of life, and when: each once a second, a few at a time. Pure.

All at once, some hundred questions and answers would keep every token waiting for 10 ms, once a second.
"""

from collections.abc import Callable, Collection

PROBE_INTERVAL_S = 0.05
"""Between two parts of a round."""
PARTS = 20
"""In which a round is done: a second in all."""


class Probes:
    """Rounds through the connections with unfinished requests."""

    def __init__(self) -> None:
        self._left: list[int] = []
        self._parts = 0

    def next(self, channels: Callable[[], Collection[int]]) -> list[int]:
        """Those to ask now. To be called every PROBE_INTERVAL_S; ``channels`` is asked at the beginning of a round."""
        if not self._parts:
            self._left, self._parts = list(channels()), PARTS
        count = -(-len(self._left) // self._parts)
        self._parts -= 1
        now, self._left = self._left[:count], self._left[count:]
        return now
