"""Make the text that a client sees from token ids: characters that span tokens, and stop strings. Pure Python.

A token is not a character. Byte-level tokens may end in the middle of a character, and tokenizers of the sentencepiece
kind drop the space before the first word that they decode. A stop string may span tokens, so text that could be its
beginning has to wait. For both reasons text is held back. ``TextStream.finish`` delivers the text that is still held
when an answer ends.

There are two ways from ids to text. ``PieceDetokenizer`` looks ids up in a table, which takes a fraction of a
microsecond for each. It serves tokenizers whose text is the joined text of their tokens. ``Detokenizer`` serves any
tokenizer: at every token it has the tokenizer decode a few ids again.
"""

from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Stop strings in a text that comes in pieces. Pure Python.


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


Decode = Callable[[Sequence[int]], str]
"""A function that decodes token ids to text. It leaves special tokens out. Incomplete UTF-8 becomes U+FFFD."""

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""The number of prompt ids used as context: more than the four one-byte tokens that a character can span."""
_LONGEST_HOLD = 16
"""The number of ids that are held before the window is cut. Only endless invalid UTF-8 reaches this number. Without the
cut each token would cost O(n)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The text of each token, for tokenizers that make a text by joining the texts of its tokens.

    table         by id: str is text; bytes are text only together with their neighbours; None adds nothing (special
                  tokens, ids without a token). Ids beyond the table add nothing either
    byte_runs     bytes are a fallback for characters that have no token. In a run of such tokens, each byte from the
                  first one that belongs to no character on becomes one U+FFFD. If false, UTF-8's own rule holds: one
                  U+FFFD for all bytes together that could have begun a character
    strips_space  the first character of a whole text is left out if it is a space
    """

    table: Sequence[str | bytes | None]
    byte_runs: bool = False
    strips_space: bool = False


class PieceDetokenizer:
    """Makes text of a growing sequence of ids, by a table.

    context  the ids before the first one, as many as there are; only the last few are looked at. With them a first word
             keeps the space that separates it from the prompt, and a character that the prompt began is completed
    """

    def __init__(self, pieces: Pieces, context: Sequence[int] = ()) -> None:
        self._table = pieces.table
        self._byte_runs = pieces.byte_runs
        self._pending = b""  # the beginning of a character
        self._broken = False  # in a run of bytes, behind one that belongs to no character
        self._at_start = pieces.strips_space
        self._prompts_own = 0  # U+FFFD of the prompt's end, which the answer must not repeat
        self._plain = not self._at_start  # none of the above applies: text is delivered unchanged
        for token_id in context[-_CONTEXT:]:
            self.push(token_id)
        self._prompts_own = self._unfinished()
        self._settle()

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; "" while a character is incomplete."""
        try:
            piece = self._table[token_id]
        except IndexError:
            return ""
        if self._plain and piece.__class__ is str:
            return piece
        return "" if piece is None else self._add(piece)

    def flush(self) -> str:
        """Return the text that is still held, with incomplete characters as U+FFFD. Do not push afterwards."""
        return self._own(_REPLACEMENT * self._unfinished())

    def _add(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            text = self._add_bytes(piece)
        else:  # whole characters: the pending bytes will not become one
            text = _REPLACEMENT * self._unfinished() + piece
            self._pending, self._broken = b"", False
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        text = self._own(text)
        self._settle()
        return text

    def _add_bytes(self, piece: bytes) -> str:
        if self._broken:
            return _REPLACEMENT * len(piece)
        data = self._pending + piece
        try:
            text, used = utf_8_decode(data, "strict" if self._byte_runs else "replace", False)
        except UnicodeDecodeError:
            self._broken, text, used = True, _REPLACEMENT * len(data), len(data)
        self._pending = data[used:]
        return text

    def _unfinished(self) -> int:
        """Return how many U+FFFD the pending bytes become if they never form a character."""
        # Not always one: Python, unlike UTF-8, lets the first two bytes of a surrogate begin a character.
        return len(self._pending if self._byte_runs else self._pending.decode(errors="replace"))

    def _own(self, text: str) -> str:
        if self._prompts_own:
            text, self._prompts_own = _without_prompts(text, self._prompts_own)
        return text

    def _settle(self) -> None:
        self._plain = not (self._pending or self._broken or self._at_start or self._prompts_own)


class Detokenizer:
    """Makes text of a growing sequence of ids. It decodes a window of a few ids in each call.

    decode   the tokenizer's own decoding of several ids
    context  the ids before the first one, as many as there are; only the last few are looked at. With them a first word
             keeps the space that separates it from the prompt, and a character that the prompt began is completed

    A trailing U+FFFD may be the beginning of a character, so up to three wait for the next id. Three, because a
    character has at most four bytes, and a tokenizer with byte fallback writes one U+FFFD for each byte of an
    incomplete character.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_CONTEXT:])
        self._known = len(self._ids)  # how many ids at the window's start have their text delivered
        prompt_text = decode(self._ids) if self._ids else ""
        self._shown = _complete(prompt_text)  # the text of the window that was delivered
        # U+FFFD of the prompt's end, which the answer must not repeat
        self._prompts_own = len(prompt_text) - len(self._shown)

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        complete = _complete(text)
        if not complete.startswith(self._shown):
            # Byte fallback decodes a run of bytes as a whole: an incomplete character right after a complete one turns
            # both to U+FFFD until it is complete. Wait for that. After three ids, give up the context.
            if len(self._ids) - self._known <= 3:
                return ""
            del self._ids[: self._known]
            self._known, self._shown = 0, ""
            text = self._decode(self._ids)
            complete = _complete(text)
        new = complete[len(self._shown) :]
        self._shown = complete
        if len(text) == len(complete):
            self._advance(bool(new))
        elif len(self._ids) - self._known > _LONGEST_HOLD:
            del self._ids[: -_LONGEST_HOLD // 2]
            self._known, self._shown = 0, _complete(self._decode(self._ids))
        return self._own(new)

    def flush(self) -> str:
        """Return the text that is still held, with incomplete characters as U+FFFD. Do not push afterwards."""
        text = self._decode(self._ids) if self._ids else ""
        return self._own(text[len(self._shown) :])

    def _own(self, new: str) -> str:
        """Return new text without the prompt's U+FFFD at its beginning. If the character was completed, there is
        none to remove."""
        if self._prompts_own:
            new, self._prompts_own = _without_prompts(new, self._prompts_own)
        return new

    def _advance(self, grew: bool) -> None:
        """Cut the window to the newest ids, which are the context of the next ones. Call this when no text is held."""
        if not grew:
            new = self._ids[self._known :]
            if self._shown or not self._decode(new + new):
                del self._ids[self._known :]  # a special token: it has no text now or later
            else:  # only the space before the first word, which is dropped: later spaces are not
                self._known = len(self._ids)
            return
        shown = self._decode(self._ids[self._known :])
        if shown:  # without this check the space before the next word would be dropped, as at the start of a text
            del self._ids[: self._known]
            self._shown = shown
        self._known = len(self._ids)


def _complete(text: str) -> str:
    """Return the text without up to three trailing U+FFFD."""
    end = len(text)
    while end and len(text) - end < 3 and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


def _without_prompts(text: str, prompts_own: int) -> tuple[str, int]:
    """Remove the prompt's U+FFFD from the beginning of a text.

    prompts_own  how many of them may still come. If the character was completed, none come

    Returns (the remaining text, how many may still come after it).
    """
    if not text:
        return text, prompts_own
    own = text.removeprefix(_REPLACEMENT * min(prompts_own, len(text) - len(text.lstrip(_REPLACEMENT))))
    return own, 0 if own else prompts_own - len(text)


class TextStream:
    """Makes the text of one answer: ids in, text out, cut before the first stop string.

    source   how ids become text: a table, or the tokenizer's decoding
    context  the ids before the answer, as Detokenizer takes them
    stops    the stop strings; ``stop_at`` replaces them
    matcher  looks for the stop strings, if they do not act everywhere
    """

    def __init__(
        self,
        source: Pieces | Decode,
        context: Sequence[int] = (),
        stops: Iterable[str] = (),
        matcher: ContentStops | None = None,
    ) -> None:
        self._detokenizer: PieceDetokenizer | Detokenizer = (
            PieceDetokenizer(source, context) if isinstance(source, Pieces) else Detokenizer(source, context)
        )
        self._matcher: StopMatcher | ContentStops = matcher or StopMatcher(())
        self.stop_at(stops)

    def stop_at(self, stops: Iterable[str]) -> None:
        """Use these stop strings from the next id on. No text that could begin one of them may be held now."""
        if isinstance(self._matcher, ContentStops):
            self._matcher.use(stops)
        else:
            self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Return (text to deliver, whether a stop string ended the answer)."""
        return self._matcher.push(self._detokenizer.push(token_id))

    @property
    def found(self) -> str | None:
        """Return the stop string that ended the answer; None if none has."""
        return self._matcher.found

    def finish(self) -> str:
        """Return all text that is still held. Call this for an answer that did not end by a stop string."""
        text, found = self._matcher.push(self._detokenizer.flush())
        return text if found else text + self._matcher.flush()


# Find out whether an answer repeats itself (option ``stop_on_loop``). Does not import torch.
#
# An answer loops if its last N tokens are one block of at most N / 3 tokens, written again and again. So the block is
# there three times at least, and the last time may be cut. In other words, the last N tokens have a period p <= N //
# 3: each of them, except for the first p, is the same token as the one p places before it.


REPEATS = 3
"""How often a block has to be there."""


class LoopWatch:
    """Takes the tokens of one answer, and says when the answer loops.

    A token costs a few operations on arrays of N / 3 numbers: about 3 microseconds for an N of 300, and 5 for 4096. The
    cost does not depend on the tokens, so no text makes it slow.

    length  N
    """

    __slots__ = ("_at", "_ids", "_needed", "_periods", "_runs")

    def __init__(self, length: int) -> None:
        most = self._periods = length // REPEATS
        # The last tokens begin at _at, the newest one first. Before _at is room for new ones. When there is none left,
        # the last tokens move to the back.
        self._ids = np.full(8 * most + 1, -1, np.int64)
        self._at = len(self._ids) - most
        # For each period p, how many tokens in a row equal the one p places before them.
        self._runs = np.zeros(most, np.int64)
        self._needed = length - np.arange(1, most + 1)

    def push(self, token: int) -> bool:
        """Take the next token. Return whether the answer loops now."""
        at, ids = self._at, self._ids
        if at == 0:
            kept = ids[: self._periods].copy()
            at = len(ids) - self._periods
            ids[at:] = kept
        equal = ids[at : at + self._periods] == token
        self._runs += 1
        self._runs *= equal
        self._at = at - 1
        ids[self._at] = token
        return bool((self._runs >= self._needed).any())
