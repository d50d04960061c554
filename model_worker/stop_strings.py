"""Stop strings in a text that comes in pieces. Pure Python."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class _State:
    """A beginning that some stop strings share: the longest one that the text ends with.

    first, last  the stop strings with this beginning, as a range of the sorted ones
    length       its characters
    shorter      the state of the longest shorter beginning that it ends with; None at the root
    ends         characters of the longest stop string that it ends with; 0 for none
    after        the states that were reached from here, by the next character
    """

    __slots__ = ("after", "ends", "first", "last", "length", "shorter")

    def __init__(self, first: int, last: int, length: int) -> None:
        self.first, self.last, self.length = first, last, length
        self.shorter: _State | None = None
        self.ends = 0
        self.after: dict[str, _State] = {}


class StopMatcher:
    """Passes text on up to the first stop string. Holds text back that may be the beginning of a stop string.

    The stop string that ends first wins. Of several that end at the same character, the longest wins. So the result
    does not depend on how the text was divided into pieces. Empty stop strings are ignored.

    All stop strings are searched at once (Aho-Corasick), so a character costs a few steps, however many there are. A
    state of the automaton is made when a text first reaches it, by a search in the sorted stop strings. To make all
    states of 64 KiB of stop strings at the beginning would take 100 ms, in which no answer of the model goes on.

    found  the stop string that was found; None before
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.found: str | None = None
        self._stops = sorted({s for s in stops if s})
        self._first = frozenset(s[0] for s in self._stops)
        self._root = self._state = _State(0, len(self._stops), 0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text to deliver, whether a stop string was found). Do not push after one was found."""
        if not self._held and self._first.isdisjoint(text):
            return text, False
        state = self._state
        for end, character in enumerate(text, 1):
            state = self._next(state, character)
            if state.ends:
                whole, end = self._held + text, len(self._held) + end
                self._held, self._state = "", self._root
                self.found = whole[end - state.ends : end]
                return whole[: end - state.ends], True
        self._state = state
        whole = self._held + text
        out = len(whole) - state.length
        self._held = whole[out:]
        return whole[:out], False

    def flush(self) -> str:
        """Return the text that was held back and turned out to be no stop string."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _next(self, state: _State, character: str) -> _State:
        """Return the state behind a state and a character. Make the states that are missing on the way.

        The same character leads from each shorter beginning to the next one's shorter beginning. So one walk over them
        finds the state, and what it needs.
        """
        made: list[_State] = []
        at: _State | None = state
        found = self._root
        while at is not None:
            known = at.after.get(character)
            new = None if known is not None else self._longer(at, character)
            if known is not None or new is not None:
                reached = known or new
                assert reached is not None
                if made:
                    made[-1].shorter = reached
                else:
                    found = reached
                if known is not None:
                    break
                made.append(reached)
            at = at.shorter
        else:
            if made:
                made[-1].shorter = self._root
        for one in reversed(made):  # the shortest first: a longer one may end with it
            if not one.ends and one.shorter is not None:
                one.ends = one.shorter.ends
        return found

    def _longer(self, state: _State, character: str) -> _State | None:
        """Make the state of a beginning with one more character. None if no stop string begins so."""
        length = state.length

        def there(stop: str) -> str:
            return stop[length : length + 1]

        first = bisect_left(self._stops, character, state.first, state.last, key=there)
        last = bisect_right(self._stops, character, first, state.last, key=there)
        if first == last:
            return None
        longer = state.after[character] = _State(first, last, length + 1)
        if len(self._stops[first]) == length + 1:  # sorted, it is before the longer ones
            longer.ends = length + 1
        return longer


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
