"""Token healing: the prompt's last token is drawn anew, among all that begin with its text. Pure Python.

A prompt that ends inside a word is cut into tokens as no text of the training was: "https:" is a token, and what is
likely behind it was learnt behind "https://". So the last token is dropped, and the first draw is limited to the tokens
whose text begins with the dropped one's; the dropped token itself is always among them.

* The token that is drawn (the healed one) takes the dropped one's place in the prompt: it is no completion token, its
  id and log-probability are not delivered, and it does not count against the limits. Prompt tokens are counted as sent.
  What its text has beyond the dropped one's is the beginning of the answer, delivered without an id.
* It is an ordinary draw otherwise: temperature, bias and banned strings apply, and it takes one random draw. It never
  ends the answer: tokens that do have no text.
* Left as they are: a prompt of one token (nothing would be left to draw from), one whose last token has no text (a
  special token), and one whose last token is a byte of a character where bytes are only a fallback (no other token
  begins with it).
* A tokenizer whose text is not that of its tokens joined has no table of them: its engine does not offer healing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from model_worker.text import Pieces, TextStream


@dataclass(frozen=True, slots=True)
class Healing:
    """How to heal one prompt.

    prompt_ids  the prompt without its last token, at least one id
    dropped     that token's id
    allowed     ids of which the first token is drawn, ``dropped`` among them
    known       what the first token's text begins with and the client has: it is left out
    """

    prompt_ids: tuple[int, ...]
    dropped: int
    allowed: Sequence[int]
    known: str

    def rest(self, text: str) -> str:
        """What of the first token's text is delivered."""
        return text.removeprefix(self.known)


class Healer:
    """Heals prompts of one vocabulary. Made once, when a model is loaded: sorts the vocabulary."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        spelled = sorted((data, token_id) for token_id in range(len(pieces.table)) if (data := self._bytes(token_id)))
        self._texts = [data for data, _ in spelled]
        self._ids = [token_id for _, token_id in spelled]
        self.beginning_with = lru_cache(maxsize=64)(self._beginning_with)

    def heal(self, prompt_ids: Sequence[int]) -> Healing | None:
        """None where the prompt stays as it is."""
        if len(prompt_ids) < 2:
            return None
        before, dropped = tuple(prompt_ids[:-1]), prompt_ids[-1]
        if not self._bytes(dropped):
            return None
        known, _ = TextStream(self._pieces, before).push(dropped)
        return Healing(before, dropped, self.beginning_with(dropped), known)

    def _beginning_with(self, token_id: int) -> tuple[int, ...]:
        """Ids, in ascending order, whose text begins with that of ``token_id``."""
        prefix = self._bytes(token_id)
        first = bisect_left(self._texts, prefix)
        last = bisect_left(self._texts, True, first, key=lambda text: not text.startswith(prefix))
        return tuple(sorted(self._ids[first:last]))

    def _bytes(self, token_id: int) -> bytes:
        """A token's text; empty for one that has none or cannot be healed."""
        piece = self._pieces.table[token_id] if 0 <= token_id < len(self._pieces.table) else None
        if piece is None or (isinstance(piece, bytes) and self._pieces.byte_runs):
            return b""
        return piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass")
