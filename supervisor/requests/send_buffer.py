"""Hold the events of a stream that wait for credit, as joined bytes and three numbers for each event. Pure."""

from array import array
from collections.abc import Iterator

EVENT_COST = 12
"""Bytes of memory that a held event takes beside its own bytes."""
_FIELDS = 3


class SendBuffer:
    """A queue of the events of one stream. Their sequence numbers are consecutive, so they are not kept.

    A deque of (entry, bytes) would take 250 bytes for each event: six times the event of a token itself.
    """

    __slots__ = ("_at", "_body", "_bytes_at", "_numbers")

    def __init__(self) -> None:
        self._numbers = array("I")  # (flags, tokens, length) of each event
        self._body = bytearray()
        self._at = 0  # numbers before this one have been taken out,
        self._bytes_at = 0  # and bytes before this one

    def __len__(self) -> int:
        return (len(self._numbers) - self._at) // _FIELDS

    @property
    def cost(self) -> int:
        """Return the bytes that the queue takes."""
        return len(self._body) - self._bytes_at + EVENT_COST * len(self)

    def add(self, flags: int, tokens: int, event: bytes) -> None:
        self._numbers.extend((flags, tokens, len(event)))
        self._body += event

    def take(self, count: int) -> tuple[list[tuple[int, int, int]], bytes]:
        """Remove the first ``count`` events. Return (flags, tokens, length) of each, and their bytes joined."""
        entries = list(self._triples(count))
        size = sum(length for _, _, length in entries)
        body = bytes(memoryview(self._body)[self._bytes_at : self._bytes_at + size])
        self._at += _FIELDS * count
        self._bytes_at += size
        if 2 * self._at >= len(self._numbers):  # so at most one byte is moved for each byte that was taken
            del self._numbers[: self._at], self._body[: self._bytes_at]
            self._at = self._bytes_at = 0
        return entries, body

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _triples(self, count: int) -> Iterator[tuple[int, int, int]]:
        numbers = self._numbers
        for at in range(self._at, self._at + _FIELDS * count, _FIELDS):
            yield numbers[at], numbers[at + 1], numbers[at + 2]
