"""Token healing: draw the prompt's last token again, among all tokens that begin with its text. Pure Python.

A prompt that ends inside a word is divided into tokens as no text of the training was. For example "https:" is a token,
but the model learnt continuations of "https://". So the last token is dropped. The first draw is limited to the tokens
whose text begins with the text of the dropped token, which is itself one of them.

* The drawn token is called the healed token. It takes the place of the dropped token in the prompt. It is no completion
  token, its id and log-probability are not delivered, and it does not count towards the limits. Prompt tokens are
  counted as the client sent them. The part of the healed token's text that goes beyond the dropped one's text is the
  beginning of the answer. It is delivered without an id.
* In all other respects it is an ordinary draw: temperature, bias and banned strings apply, and it takes one random
  number. It never ends the answer, because end tokens have no text.
* Three kinds of prompts are not changed:
      a prompt of one token, because nothing would be left to draw from
      a prompt that ends with a special token, because that token has no text
      a prompt that ends with a byte of a character, where bytes are only a fallback: no other token begins with it
* Some tokenizers have a text that is not the joined text of their tokens, and so no table of token texts. Their engine
  does not offer healing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from model_worker.text import Pieces, TextStream


@dataclass(frozen=True, slots=True)
class Healing:
    """The plan for healing one prompt.

    prompt_ids  the prompt without its last token, at least one id
    dropped     the id of the dropped token
    allowed     ids that the first draw may choose from, including ``dropped``
    known       the beginning of the first token's text that the client already has; it is left out
    """

    prompt_ids: tuple[int, ...]
    dropped: int
    allowed: Sequence[int]
    known: str

    def rest(self, text: str) -> str:
        """Return the part of the first token's text that is delivered."""
        return text.removeprefix(self.known)


class Healer:
    """Heals prompts of one vocabulary. Made once when a model is loaded, because it sorts the vocabulary."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        spelled = sorted((data, token_id) for token_id in range(len(pieces.table)) if (data := self._bytes(token_id)))
        self._texts = [data for data, _ in spelled]
        self._ids = [token_id for _, token_id in spelled]
        self.beginning_with = lru_cache(maxsize=64)(self._beginning_with)

    def heal(self, prompt_ids: Sequence[int]) -> Healing | None:
        """Return the plan for healing a prompt; None if the prompt stays as it is."""
        if len(prompt_ids) < 2:
            return None
        before, dropped = tuple(prompt_ids[:-1]), prompt_ids[-1]
        if not self._bytes(dropped):
            return None
        known, _ = TextStream(self._pieces, before).push(dropped)
        return Healing(before, dropped, self.beginning_with(dropped), known)

    def _beginning_with(self, token_id: int) -> tuple[int, ...]:
        """Return the ids, in ascending order, whose text begins with that of ``token_id``."""
        prefix = self._bytes(token_id)
        first = bisect_left(self._texts, prefix)
        last = bisect_left(self._texts, True, first, key=lambda text: not text.startswith(prefix))
        return tuple(sorted(self._ids[first:last]))

    def _bytes(self, token_id: int) -> bytes:
        """Return a token's text; empty for a token that has none or cannot be healed."""
        piece = self._pieces.table[token_id] if 0 <= token_id < len(self._pieces.table) else None
        if piece is None or (isinstance(piece, bytes) and self._pieces.byte_runs):
            return b""
        return piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass")
