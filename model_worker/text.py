"""From token ids to the text a client sees: characters that span tokens, and stop strings. Pure Python.

A token is not a character: byte-level tokens end in the middle of one, and tokenizers of the sentencepiece kind drop
the space before the first word that they decode. And a stop string may span tokens, so text that could be its beginning
has to wait. Both hold text back; ``TextStream.finish`` delivers what is still held when an answer ends.
"""

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out; incomplete UTF-8 becomes U+FFFD."""

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Ids of the prompt that set the scene: more than the four one-byte tokens that a character can span."""
_LONGEST_HOLD = 16
"""Ids held before the window is cut. Only endless invalid UTF-8 gets here; uncut it would cost O(n) a token."""


class Detokenizer:
    """Text of a growing sequence of ids, in a window of a few ids a call.

    decode   the tokenizer's own decoding of several ids
    context  ids before the first one, as many as there are; only the last few are looked at. With them a first word
             keeps the space that separates it from the prompt, and a character begun in the prompt is completed.

    A trailing U+FFFD may be the beginning of a character, so up to three wait for the next id. Three, because a
    character has four bytes and a tokenizer with byte fallback writes one U+FFFD for each byte of an incomplete one.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_CONTEXT:])
        self._known = len(self._ids)  # ids at the window's start whose text is out
        told = decode(self._ids) if self._ids else ""
        self._shown = _complete(told)  # text of the window that is out
        self._told = len(told) - len(self._shown)  # U+FFFD of the prompt's end, which are not the answer's to repeat

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        complete = _complete(text)
        if not complete.startswith(self._shown):
            # byte fallback decodes a run of bytes as a whole: an incomplete character right after a complete one
            # turns both to U+FFFD until it is whole. Wait for it; then give the context up.
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
        """The text still held, incomplete characters as U+FFFD. Nothing may be pushed afterwards."""
        text = self._decode(self._ids) if self._ids else ""
        return self._own(text[len(self._shown) :])

    def _own(self, new: str) -> str:
        """New text without the prompt's U+FFFD at its beginning. None are left of a character that was completed."""
        if not self._told or not new:
            return new
        own = new.removeprefix(_REPLACEMENT * min(self._told, len(new) - len(new.lstrip(_REPLACEMENT))))
        self._told = self._told - (len(new) - len(own)) if not own else 0
        return own

    def _advance(self, grew: bool) -> None:
        """Nothing is held: cut the window to the newest ids, which are the next ones' context."""
        if not grew:
            del self._ids[self._known :]  # a special token: no text now or later
            return
        shown = self._decode(self._ids[self._known :])
        if shown:  # else the space would be dropped before the next word, as at the start of a text
            del self._ids[: self._known]
            self._shown = shown
        self._known = len(self._ids)


def _complete(text: str) -> str:
    """The text without up to three trailing U+FFFD."""
    end = len(text)
    while end and len(text) - end < 3 and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


class StopMatcher:
    """Passes text on up to the first stop string. Text that may be the beginning of one is held back.

    The stop string whose end comes first wins, and of those that end there the longest: the answer does not depend on
    how the text was cut into pieces. Empty stop strings are ignored.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to deliver, whether a stop string was found). Nothing may be pushed after one was found."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        """The text held back, which was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with; ``stop`` itself does not occur."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextStream:
    """What a client gets to read of one answer: ids in, text out, cut before the first stop string."""

    def __init__(self, decode: Decode, context: Sequence[int] = (), stops: Iterable[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode, context)
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text to deliver, whether a stop string ended the answer)."""
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """All text still held. For an answer that ended otherwise than by a stop string."""
        text, found = self._matcher.push(self._detokenizer.flush())
        return text if found else text + self._matcher.flush()
