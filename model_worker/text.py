"""Make the text that a client sees from token ids: characters that span tokens, and stop strings. Pure Python.

A token is not a character. Byte-level tokens may end in the middle of a character, and tokenizers of the sentencepiece
kind drop the space before the first word that they decode. A stop string may span tokens, so text that could be its
beginning has to wait. For both reasons text is held back. ``TextStream.finish`` delivers the text that is still held
when an answer ends.

There are two ways from ids to text. ``PieceDetokenizer`` looks ids up in a table, which takes a fraction of a
microsecond for each. It serves tokenizers whose text is the joined text of their tokens. ``Detokenizer`` serves any
tokenizer: at every token it has the tokenizer decode a few ids again.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from model_worker.stop_strings import ContentStops, StopMatcher

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
