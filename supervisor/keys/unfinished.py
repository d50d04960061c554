"""Count the unfinished requests of one key, without being told when a request ends. Pure."""

from collections.abc import Callable

CLEAR_AT = 64
"""The most requests that are kept before ended ones are removed for the first time. Later they are removed when the
number of kept requests has doubled, and is above CLEAR_AT."""


class Unfinished:
    """The requests of one key that may be unfinished.

    holds  (channel, number) → whether that request is unfinished

    Ended requests stay until the next check. The limit on kept requests is CLEAR_AT, or twice the number that remained
    after the last check if that is more.
    """

    def __init__(self, holds: Callable[[int, int], bool]) -> None:
        self._holds = holds
        self._keys: set[tuple[int, int]] = set()
        self._clear_at = CLEAR_AT

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, channel: int, request: int) -> None:
        self._keys.add((channel, request))
        if len(self._keys) > self._clear_at:
            self._clear()

    def count(self, limit: int) -> int:
        """Return the number of unfinished requests. It is exact if it is ``limit`` or more, else it may be too high."""
        if len(self._keys) >= limit:
            self._clear()
        return len(self._keys)

    def _clear(self) -> None:
        self._keys = {key for key in self._keys if self._holds(*key)}
        self._clear_at = max(CLEAR_AT, 2 * len(self._keys))
