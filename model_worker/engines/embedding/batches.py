"""Decide which texts of which requests are computed next, in one batch. Pure.

The cost of a batch is its number of rows times its longest row, because shorter rows are padded. So a batch takes texts
of similar lengths, and never more tokens than it may have.

Requests share the model fairly, by tokens: the request that has had least leads the next batch, and the others fill it
in turns. A request with thousands of texts delays another one by a single batch. A clock counts what each of the
waiting requests should have had, and a new request begins with its present value. So requests that come later cannot
be first for ever.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
JOIN_S = 0.003
"""The longest time in seconds for which a text waits for others, so that they are computed together."""
_SMALL = 8
"""A batch of up to this part of its most tokens takes texts of any length: then launches cost more than padding."""


@dataclass(eq=False)
class _Waiting:
    """A request with texts that were not given out yet.

    texts  (length, number of the text), shortest first
    came   when the first of them came, in seconds
    """

    came: float
    texts: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class TextBatch(Generic[K]):
    """The texts to be computed together.

    texts    (request, number of its text)
    longest  tokens of the longest one
    """

    texts: list[tuple[K, int]]
    longest: int


class Batches(Generic[K]):
    """The texts that wait, of all requests.

    most    the most tokens of a batch: rows times the longest row. A longer text is computed alone
    join_s  see JOIN_S
    """

    def __init__(self, most: int, join_s: float = JOIN_S) -> None:
        self._most, self._join_s = most, join_s
        self._waiting: dict[K, _Waiting] = {}
        self._had: dict[K, float] = {}
        """The tokens that each request has had, added to the value of the clock when it came."""
        self._clock = 0.0
        """The tokens that a request should have had that has waited since the beginning."""
        self._together = 1
        """The requests in the last batch. As many are expected again, since clients send the next text behind an
        answer. So a single client never waits for others."""

    def add(self, request: K, lengths: Sequence[int], now: float, first: int = 0) -> None:
        """Add texts of a request.

        lengths  tokens of each text
        first    number of the first one
        now      monotonic seconds
        """
        self._had.setdefault(request, self._clock)
        waiting = self._waiting.setdefault(request, _Waiting(now))
        waiting.texts += [(length, number) for number, length in enumerate(lengths, first)]
        waiting.texts.sort()

    def remove(self, request: K) -> None:
        """Forget a request, and its texts that were not given out yet."""
        self._waiting.pop(request, None)
        self._had.pop(request, None)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def joins_until(self, now: float) -> float | None:
        """Return the time until which the next batch waits for more requests; None if it waits for none."""
        if not self._waiting or len(self._waiting) >= self._together:
            return None
        until = min(waiting.came for waiting in self._waiting.values()) + self._join_s
        tokens = sum(length for waiting in self._waiting.values() for length, _ in waiting.texts)
        return None if until <= now or tokens >= self._most else until

    def take(self) -> TextBatch[K]:
        """Take the next batch out. There must be texts."""
        turns = sorted(self._waiting.items(), key=lambda item: (self._had[item[0]], len(item[1].texts)))
        clock, sharers = max(self._clock, self._had[turns[0][0]]), len(turns)
        longest = turns[0][1].texts[-1][0]
        texts: list[tuple[K, int]] = []
        sharing: set[K] = set()
        while turns:
            left = []
            for request, waiting in turns:
                length, number = self._next(waiting, longest, len(texts))
                if not length:
                    continue
                texts.append((request, number))
                sharing.add(request)
                self._had[request] += length
                clock += length / sharers
                if waiting.texts:
                    left.append((request, waiting))
                else:
                    del self._waiting[request]
            turns = left
        self._clock, self._together = clock, len(sharing)
        return TextBatch(texts, longest)

    def _next(self, waiting: _Waiting, longest: int, rows: int) -> tuple[int, int]:
        """Take the longest text out that fits the batch. Return (its length, its number); (0, 0) if none fits."""
        tokens = (rows + 1) * longest
        if rows and tokens > self._most:
            return 0, 0
        place = bisect_left(waiting.texts, (longest + 1, 0)) - 1
        if place < 0 or (2 * waiting.texts[place][0] < longest and tokens > self._most // _SMALL):
            return 0, 0
        return waiting.texts.pop(place)
