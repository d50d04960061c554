"""Stop strings in a text that comes in pieces. Pure Python."""

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Passes text on up to the first stop string. Holds text back that may be the beginning of a stop string.

    The stop string that ends first wins. Of several that end at the same character, the longest wins. So the result
    does not depend on how the text was divided into pieces. Empty stop strings are ignored. A character costs a few
    steps at most, whatever the stop strings are (Knuth-Morris-Pratt search), so that no request slows down others.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._first = frozenset(s[0] for s in self._stops)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text to deliver, whether a stop string was found). Do not push after one was found."""
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
        """Return the text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _search(text: str, stop: str, matched: int) -> tuple[int, int]:
    """Search a stop string in the next piece of a text.

    Returns (index in ``text`` where the stop string first ends, or -1; number of its characters that the text ends
    with).

    matched  number of its characters directly before the piece
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
    """Return for each number of matched characters, less than all, the next smaller number that also matches."""
    counts = [0, 0]
    for end in range(1, len(stop) - 1):
        count = counts[end]
        while count and stop[count] != stop[end]:
            count = counts[count]
        counts.append(count + 1 if stop[count] == stop[end] else 0)
    return tuple(counts)
