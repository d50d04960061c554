"""The unfinished requests of one key, without being told of each one's end. Pure."""

from collections.abc import Callable

CLEAR_AT = 64
"""Requests from which on those that have ended are looked for, whenever there are twice as many as were left."""


class Unfinished:
    """``holds``: whether a request (connection, number) is unfinished. Those that ended stay until they are looked for:
    at most CLEAR_AT are kept, or twice as many as were left the last time."""

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
        """How many there are, exactly if that is ``limit`` or more, else at most."""
        if len(self._keys) >= limit:
            self._clear()
        return len(self._keys)

    def _clear(self) -> None:
        self._keys = {key for key in self._keys if self._holds(*key)}
        self._clear_at = max(CLEAR_AT, 2 * len(self._keys))
