"""Stop strings in a text that comes in pieces. Pure Python."""

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Passes text on up to the first stop string. Text that may be the beginning of one is held back.

    The stop string whose end comes first wins, and of those that end there the longest: the answer does not depend on
    how the text was cut into pieces. Empty stop strings are ignored. Costs a few steps for each character at most,
    whatever the stop strings are (Knuth, Morris and Pratt's search): a request must not slow down its neighbours.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._first = frozenset(s[0] for s in self._stops)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to deliver, whether a stop string was found). Nothing may be pushed after one was found."""
        if not self._held and self._first.isdisjoint(text):
            return text, False
        found: list[tuple[int, int]] = []  # (end, begin) in ``whole``
        held, whole = len(self._held), self._held + text
        for i, stop in enumerate(self._stops):
            end, self._matched[i] = _search(text, stop, self._matched[i])
            if end >= 0:
                found.append((held + end, held + end - len(stop)))
        if found:
            self._held = ""
            return whole[: min(found)[1]], True
        out = len(whole) - max(self._matched)
        self._held = whole[out:]
        return whole[:out], False

    def flush(self) -> str:
        """The text held back, which was no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _search(text: str, stop: str, matched: int) -> tuple[int, int]:
    """(where in ``text`` the stop string first ends, or -1; how many of its characters the text ends with).

    matched  as many of its characters stand before the text
    """
    at = 0
    if not matched:
        at = text.find(stop[0])
        if at < 0:
            return -1, 0
    shorter = _shorter_matches(stop)
    for end, character in enumerate(text[at:], at + 1):
        while matched and stop[matched] != character:
            matched = shorter[matched]
        if stop[matched] == character:
            matched += 1
            if matched == len(stop):
                return end, 0
    return -1, matched


@lru_cache(maxsize=256)
def _shorter_matches(stop: str) -> tuple[int, ...]:
    """For each count of matched characters, below the whole: the next smaller one that is a match as well."""
    counts = [0, 0]
    for end in range(1, len(stop) - 1):
        count = counts[end]
        while count and stop[count] != stop[end]:
            count = counts[count]
        counts.append(count + 1 if stop[count] == stop[end] else 0)
    return tuple(counts)
