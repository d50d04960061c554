r"""Answers of a given shape: JSON of a schema, text of a regular expression, or one of several strings.

llguidance (Rust; MIT licence; no dependencies) computes at each step which tokens may come next. This module does not
import torch.

* A constraint is compiled outside the step loop (constraint_compiler). A constraint that is unknown or costly is
  compiled before its job may start (parking). Any other takes milliseconds: its job waits beside the engine, and other
  jobs pass it. A constraint that cannot be compiled is refused with an error that names its field and the reason.
* The mask of allowed tokens is one more limit of the draw, beside allowed_tokens, banned_tokens and logit_bias. The
  penalties and the sampling parameters work on the tokens that remain. If none remains at the first token, the request
  is refused. If none remains later, the answer ends with finish_reason "banned_strings" (FinishReason.BANNED).
* An end token (the model's own, or one of stop_token_ids) is allowed where the answer is complete. Where nothing else
  can follow, the answer ends by itself, with finish_reason "stop" and without an end token, also before min_tokens and
  with ignore_eos. Until min_tokens no end token is drawn, so an answer that can go on goes on.
* max_tokens, stop strings, and stop_token_ids that have a text (allowed where their text is) may cut an answer short,
  as without a constraint. Then the answer is only the beginning of a text of the shape.
* banned_strings: the constraint goes back with the answer. token_healing is refused together with a constraint, because
  the healed token belongs to the prompt. Speculation works: a proposal of the draft is accepted only if it is the token
  that is drawn under the mask.
* A resumed answer goes through the constraint first (``replay``).
* A constraint may wait for the end of the reasoning, or for a call of a tool (``gated``). Its answer may begin
  before it is compiled (``late``).
* A mask that exceeds the library's limits (constraint_grammar.LIMITS) ends the answer with an error. The limits hold
  for each mask, so that no answer delays other answers for long.
* The model chooses the tokens that spell a text: every spelling is allowed. JSON has no white space between its parts,
  or little (``whitespace_flexible``). Its keys are in the order of the schema's properties, and none occurs twice.
* An answer's text is the joined text of its tokens. A tokenizer that drops the space before the first word of a text
  does so here too, if nothing precedes the answer: then a shape that begins with a space is delivered without it.

Measured on one core of a shared machine, in microseconds per mask (median, largest) along random answers:

    vocabulary   object of a string and an integer   [a-z]+[0-9]{2,3}   \p{L}{1,1000}
    32,000       4, 160                              12, 310            700, 2,900
    128,000      12, 140                             11, 980            1,800, 8,100

With a vocabulary of 128,000, making an array of bools of a mask, or an array of floats to add to logits, takes 10 to 40
microseconds more. Compiling takes 2 to 10 ms for ordinary schemas, 60 ms for 5,000 prefixItems, 80 ms for an enum of
20,000, and 300 ms for 180 kB of nested constants. The first mask takes under 0.1 ms. 10,000 optional keys exceed the
library's limits after 90 ms, in the child. One object may have about 450 optional keys.
"""

from collections.abc import Collection, Iterable
from typing import Any, Final

import llguidance
import numpy as np

from model_worker.engines.constraint_grammar import TOO_COSTLY
from model_worker.engines.gated import GatedConstraint
from protocol.errors import RequestError

_BIAS_OF_BITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little"), 0, -np.inf)
_BIAS_OF_BITS = _BIAS_OF_BITS.astype(np.float32).reshape(256, 8)
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Bits = np.ndarray[Any, np.dtype[np.uint8]]


def write_bias(bits: Bits, bias: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Write 0 for ids that ``bits`` of a constraint has, and -inf for all others.

    bias  float32 [size]; size is at least that of the vocabulary, and a multiple of 8
    """
    known = 8 * len(bits)
    np.take(_BIAS_OF_BITS, bits, axis=0, out=bias[:known].reshape(-1, 8), mode="clip")
    bias[known:] = -np.inf


class Constraint:
    """The constraint of one answer. Positions count the answer's tokens; end tokens are not pushed.

    kind     the field of the request
    pieces   number of ids that the matcher knows, without its own id that ends every answer
    vocab    ids below this can be drawn
    end_ids  ids that end the answer: allowed wherever the answer is complete
    hidden   ids that may not be drawn: markers that would not be part of this answer's text
    """

    free: Final = False
    """Whether every token may be drawn next. Only a constraint that waits is free at times: see engines.gated."""
    dormant: Final = False

    def takes(self, token: int) -> bool:
        """Return whether a token that was drawn while the constraint was dormant may stay."""
        return False

    def __init__(
        self,
        kind: str,
        matcher: llguidance.LLMatcher,
        pieces: int,
        vocab: int,
        end_ids: Collection[int],
        hidden: Collection[int] = (),
    ) -> None:
        self._kind, self._matcher = kind, matcher
        self._pieces, self._vocab = pieces, vocab
        self._end_ids = np.array([token for token in end_ids if token < vocab], np.int64)
        self._hidden = [token for token in hidden if token < vocab]
        self._bits: Bits | None = None
        self._allowed: Mask | None = None
        self._accepting = False
        self.position = 0

    @property
    def allowed(self) -> Mask:
        """Return which ids may come next, as bool [vocab], which must not be changed. Computed once per position.

        Raises RequestError where the computation is too costly.
        """
        if self._allowed is None:
            self._allowed = np.unpackbits(self._mask(), count=self._vocab, bitorder="little").view(np.bool_)
        return self._allowed

    @property
    def bits(self) -> Bits:
        """Return which ids may come next, a bit for each, the lowest id first, as uint8. No bit is set beyond vocab.

        The array must not be changed. It is computed once per position.

        Raises RequestError where the computation is too costly.
        """
        return self._mask()

    def _mask(self) -> Bits:
        if self._bits is None:
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            end = self._pieces  # the matcher's own end token is behind all ids (constraint_grammar.Vocabulary)
            self._accepting = bool(known[end >> 3] >> (end & 7) & 1)
            bits = np.zeros((self._vocab + 7) // 8, np.uint8)
            ids = min(self._vocab, self._pieces)
            shared = (ids + 7) // 8
            bits[:shared] = known[:shared]
            if ids & 7:
                bits[ids >> 3] &= (1 << (ids & 7)) - 1
            for token in self._hidden:
                bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if self._accepting:
                np.bitwise_or.at(bits, self._end_ids >> 3, (1 << (self._end_ids & 7)).astype(np.uint8))
            self._bits = bits
        return self._bits

    @property
    def accepting(self) -> bool:
        """Return whether the answer may end here."""
        self._mask()
        return self._accepting

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def push(self, token: int) -> None:
        """Add the next token, which is one of ``allowed`` and no end token. Raises RequestError."""
        bits = self._bits
        was_allowed = bits is not None and bool(bits[token >> 3] >> (token & 7) & 1)
        self._bits = self._allowed = None
        self._matcher.consume_token(token)
        # If the library runs out of states inside a token, it reports that the token does not match.
        self._check(too_costly=was_allowed)
        self.position += 1

    def replay(self, tokens: Iterable[int]) -> None:
        """Add the tokens that another worker delivered. Raises RequestError (field "resumed_ids") if they do not
        match."""
        for token in tokens:
            if self.finished or not self._matcher.consume_token(token):
                raise RequestError(f"resumed_ids do not satisfy {self._kind}", field="resumed_ids")
            self.position += 1
        self._bits = self._allowed = None

    def back_to(self, position: int) -> None:
        """Forget all tokens but the first ``position`` ones."""
        if position < self.position:
            self._matcher.rollback(self.position - position)
            self._check()
            self.position, self._bits, self._allowed = position, None, None

    def _check(self, *, too_costly: bool = False) -> None:
        """Raise RequestError if the library met an error. ``too_costly``: only the library's limits can be the
        reason."""
        if self._matcher.is_error():
            costs = too_costly or TOO_COSTLY.search(self._matcher.get_error())
            why = "has become too costly for the answer to go on" if costs else "does not allow what was drawn"
            raise RequestError(f"{self._kind} {why}", field=self._kind)


AnyConstraint = Constraint | GatedConstraint
