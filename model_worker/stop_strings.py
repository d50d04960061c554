"""Stop strings in a text that comes in pieces. Pure Python."""

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Passes text on up to the first stop string. Holds text back that may be the beginning of a stop string.

    The stop string that ends first wins. Of several that end at the same character, the longest wins. So the result
    does not depend on how the text was divided into pieces. Empty stop strings are ignored. A character costs a few
    steps at most, whatever the stop strings are (Knuth-Morris-Pratt search), so that no request slows down others.

    found  the stop string that was found; None before
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(s for s in stops if s)
        self._first = frozenset(s[0] for s in self._stops)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text to deliver, whether a stop string was found). Do not push after one was found."""
        if not self._held and self._first.isdisjoint(text):
            return text, False
        found: list[tuple[int, int, str]] = []  # (end, begin) in ``whole``, and the stop string
        held, whole = len(self._held), self._held + text
        for i, stop in enumerate(self._stops):
            end, self._matched[i] = _search(text, stop, self._matched[i])
            if end >= 0:
                found.append((held + end, held + end - len(stop), stop))
        if found:
            self._held = ""
            _, begin, self.found = min(found)
            return whole[:begin], True
        out = len(whole) - max(self._matched)
        self._held = whole[out:]
        return whole[:out], False

    def flush(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


class ContentStops:
    """Looks for stop strings in the text of an answer only: not in its reasoning, and not from the first call on.

    reasoning  the markers of the reasoning; None if there is none
    inside     whether the answer begins within the reasoning
    calls      texts with which a call begins
    opening    character with which a call may begin, too, where it is the first one behind the reasoning; "" for none
    """

    def __init__(
        self, reasoning: tuple[str, str] | None, inside: bool, calls: Iterable[str], opening: str = ""
    ) -> None:
        self._start, self._end = reasoning or ("", "")
        self._calls = tuple(calls)
        self._inside, self._called = inside, False
        self._opening = opening
        self._may_open = bool(opening)
        """Whether only blanks have come since the beginning, or since the reasoning."""
        self._longest = max(map(len, (self._start, self._end, *self._calls)))
        self._tail = ""
        """The end of the text so far, in which a marker may begin."""
        self._matcher = StopMatcher(())
        self._passed: str | None = None
        """The marker that the text now ends with."""

    @property
    def found(self) -> str | None:
        """Return the stop string that was found; None before."""
        return self._matcher.found

    def use(self, stops: Iterable[str]) -> None:
        """Look for these stop strings from now on. No text that could begin one of them may be held now."""
        self._matcher = StopMatcher(stops)

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text to deliver, whether a stop string was found). Do not push after one was found."""
        if self._called:
            return text, False
        out: list[str] = []
        while text:
            if self._may_open and not self._inside and (begin := text.lstrip()):
                self._may_open, self._called = False, begin.startswith(self._opening)
                if self._called:
                    out += [self._matcher.flush(), text]
                    break
            markers = (self._end,) if self._inside else (self._start, *self._calls)
            size = self._until_marker(text, markers)
            piece, text = text[:size], text[size:]
            if self._inside:
                out.append(piece)
            else:
                told, found = self._matcher.push(piece)
                out.append(told)
                if found:
                    return "".join(out), True
            if self._passed is not None:
                out.append(self._matcher.flush())
                self._called = self._passed in self._calls
                self._inside, self._tail = self._passed == self._start and not self._called, ""
                self._may_open = bool(self._opening)
                if self._called:
                    out.append(text)
                    break
        return "".join(out), False

    def _until_marker(self, text: str, markers: Iterable[str]) -> int:
        """Return how much of a text goes up to the end of the first marker, and note that marker in ``_passed``."""
        known = self._tail + text
        ends = [(at + len(marker), marker) for marker in markers if marker and (at := known.find(marker)) >= 0]
        end, self._passed = min(ends, default=(len(known), None))
        self._tail = known[max(0, end - self._longest + 1) : end]
        return end - (len(known) - len(text))

    def flush(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        return self._matcher.flush()


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
