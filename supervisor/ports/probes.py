"""Choose the clients that get a PING now: each client once a second, a few clients at a time. Pure.

Some hundred PINGs and PONGs at once would delay every token by 10 ms, once a second.
"""

from collections.abc import Callable, Collection

PROBE_INTERVAL_S = 0.05
"""Seconds between two parts of a round."""
PARTS = 20
"""Number of parts in a round. A round takes a second."""


class Probes:
    """Rounds through the connections with unfinished requests."""

    def __init__(self) -> None:
        self._left: list[int] = []
        self._parts = 0

    def next(self, channels: Callable[[], Collection[int]]) -> list[int]:
        """Return the channels of the clients to probe now. Call this every PROBE_INTERVAL_S.

        channels  returns all connections with unfinished requests. It is called when a round begins
        """
        if not self._parts:
            self._left, self._parts = list(channels()), PARTS
        count = -(-len(self._left) // self._parts)
        self._parts -= 1
        now, self._left = self._left[:count], self._left[count:]
        return now
