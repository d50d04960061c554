"""Constraints that wait: until the reasoning has ended, or until a call of a tool begins. And the end of the reasoning.

An answer of a reasoning model has two halves. The model reasons without a constraint. Its constraint begins behind the
marker that ends the reasoning. If the reasoning has a budget of tokens and uses it up, the marker is drawn in the
model's place. Calls with ``tool_choice: auto`` are constrained from the marker that begins the first call: until then
the model writes what it likes.

While nothing limits the next draw, the constraint is ``free``, and the answer is drawn as fast as one without a
constraint. It is ``dormant`` if the next draw may be made without it and shown to ``takes`` afterwards. An engine that
draws ahead of the host does so.

Markers are looked for in the text, and not among the tokens, because some tokenizers have no token for a marker. A
token that ends a marker and begins what follows would slip past a constraint. So it is not allowed while a marker is
being written.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from model_worker.engine import Job, Layout
from model_worker.engines.tokenizer import MarkerTexts
from protocol.answer_formats.families import ALL_MARKERS
from protocol.errors import RequestError

if TYPE_CHECKING:
    from model_worker.engines.constraints import Bits, Constraint, LateConstraint, Mask
    from model_worker.engines.tokenizer import Tokenizer

BLANKS = 2
"""Tokens of white space that may stand between the reasoning and a constrained answer. Models are used to them."""


class GatedConstraint:
    """The constraint of one answer, which waits. Its methods are those of ``Constraint``.

    inner     constrains what follows the reasoning; None: nothing does
    layout    how the answer is written, and where it begins
    end_ids   ids that end the answer
    forced    ids of the marker that ends the reasoning
    lazy      whether ``inner`` waits for the first call, too. It then allows any text before the call
    """

    def __init__(
        self,
        inner: "Constraint | LateConstraint | None",
        layout: Layout,
        texts: MarkerTexts,
        vocab: int,
        end_ids: Collection[int],
        forced: Sequence[int],
        *,
        lazy: bool,
    ) -> None:
        self._inner, self._layout, self._texts, self._vocab = inner, layout, texts, vocab
        self._end_ids = frozenset(token for token in end_ids if token < vocab)
        self._forcing = list(forced)
        self._lazy = lazy
        start, end = layout.reasoning or ("", "")
        self._start, self._end = start.encode(), end.encode()
        self._calls = [call.encode() for call in layout.calls]
        self._longest_call = max(map(len, self._calls), default=0)
        self._opening = layout.opening.encode()
        self._must_go_on = inner is not None and not lazy
        self._tokens: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Go to the beginning of the answer."""
        self._tokens.clear()
        self._place = self._layout.place
        self._reasoned = 0
        self._forced: list[int] = []
        self._tail = b""
        """The end of the text, in which a marker may begin."""
        self._pending: list[int] = []
        """Tokens that ``inner`` has not seen yet."""
        self._called = False
        self._may_open = bool(self._opening)  # whether only blanks have come behind the reasoning
        self._blanks = 0
        self._strict = False
        self._fits = True  # whether ``inner`` allows what may be the marker that begins the reasoning
        self._mask: Mask | None = None
        # Asked several times for each token of each answer, so they are computed once.
        self._free: bool | None = None
        self._dormant: bool | None = None
        if self._inner is not None:
            self._inner.back_to(0)
        if self._place == "inside":
            self._limit()

    # --- what may be drawn next

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def free(self) -> bool:
        """Return whether every token may be drawn next."""
        if self._free is None:
            self._free = self._is_free()
        return self._free

    def _is_free(self) -> bool:
        if self._forced:
            return False
        if self._place == "behind":
            return self._inner is None or (self._lazy and not self._wakes)
        return not self._must_go_on and (self._place == "before" or self._inner is None or not self._ends_soon)

    @property
    def dormant(self) -> bool:
        """Return whether the next token may be drawn without this constraint, and then be shown to ``takes``."""
        if self._dormant is None:
            inside = self._place == "inside" and not (self._forced or self._strict)
            self._dormant = self.free or (inside and not self._ends_soon)
        return self._dormant

    def takes(self, token: int) -> bool:
        """Return whether a token that was drawn while the constraint was dormant may stay. If not, the next draw must
        be made under the constraint."""
        strict = not self.free and token in self._end_ids
        if strict != self._strict:
            self._strict, self._dormant = strict, None
        return not strict

    @property
    def allowed(self) -> "Mask":
        """Return which ids may come next, as bool [vocab], which must not be changed. Raises RequestError as
        ``Constraint`` does."""
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    @property
    def bits(self) -> "Bits":
        """Return which ids may come next. As ``Constraint.bits``."""
        if self._inner is not None and self._place == "behind" and not self._blanks and not self._forced:
            return self._inner.bits
        return np.packbits(self.allowed, bitorder="little")

    def _compute(self) -> "Mask":
        if self._forced:
            return self._only(self._forced[:1])
        if self.free:
            return np.ones(self._vocab, np.bool_)
        if self._place == "inside":
            mask = np.ones(self._vocab, np.bool_)
            if self._must_go_on:
                mask[list(self._end_ids)] = False
            if (written := _ending(self._tail, self._end)) and self._inner is not None:
                mask[self._known(self._texts.beyond(self._end[written:]))] = False
            return mask
        assert self._inner is not None
        mask = self._inner.allowed.copy() if self._fits else np.zeros(self._vocab, np.bool_)
        if self._place == "before":
            mask[self._known(self._texts.beginnings(self._start[len(self._tail) :]))] = True
        elif self._blanks:
            mask[self._known(self._texts.blanks)] = True
        return mask

    def _only(self, ids: Iterable[int]) -> "Mask":
        mask = np.zeros(self._vocab, np.bool_)
        mask[list(ids)] = True
        return mask

    def _known(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token < self._vocab]

    @property
    def _ends_soon(self) -> bool:
        """Return whether the text ends with the beginning of the marker that ends the reasoning."""
        return bool(_ending(self._tail, self._end))

    @property
    def _wakes(self) -> bool:
        """Return whether a call has begun, or may be beginning."""
        return self._called or any(_ending(self._tail, call) for call in self._calls)

    @property
    def accepting(self) -> bool:
        """Return whether the answer may end here."""
        if self._place == "behind" and self._inner is not None and not self.free:
            return self._inner.accepting
        return not self._must_go_on

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete and nothing can follow."""
        begun = self._place == "behind" and (self._called or not self._lazy)
        return begun and self._inner is not None and self._inner.finished

    # --- what was drawn

    def push(self, token: int) -> None:
        """Add the next token, which is one of ``allowed`` and no end token. Raises RequestError."""
        self._mask, self._strict = None, False
        self._free = self._dormant = None
        self._tokens.append(token)
        if self._place == "inside":
            self._reason(token)
        elif self._place == "before":
            self._open(token)
        elif self._inner is not None:
            self._answer(self._inner, token)

    def replay(self, tokens: Iterable[int]) -> None:
        """Add the tokens that another worker delivered. Raises RequestError (field "resumed_ids") if they do not
        match."""
        try:
            for token in tokens:
                self.push(token)
        except RequestError as e:
            raise RequestError(f"resumed_ids: {e.message}", field="resumed_ids") from None

    def back_to(self, position: int) -> None:
        """Forget all tokens but the first ``position`` ones."""
        if position < len(self._tokens):
            kept = self._tokens[:position]
            self._begin()
            for token in kept:
                self.push(token)

    def _reason(self, token: int) -> None:
        self._reasoned += 1
        if self._forced:
            self._forced.pop(0)
            if not self._forced:
                self._leave()
            return
        text = self._tail + self._texts.of(token)
        if self._end in text:
            self._leave()
        else:
            self._tail = text[-len(self._end) :]
            self._limit()

    def _limit(self) -> None:
        """End the reasoning if its budget is used up."""
        budget = self._layout.budget
        if budget is not None and self._reasoned >= budget:
            self._forced = list(self._forcing)

    def _leave(self) -> None:
        """Begin the answer behind its reasoning."""
        self._place, self._tail = "behind", b""
        self._blanks = BLANKS if self._must_go_on else 0

    def _open(self, token: int) -> None:
        """Take a token at the beginning of an answer, which may be the marker that begins the reasoning."""
        inner = self._inner
        text = self._tail + self._texts.of(token)
        if text.startswith(self._start):
            self._place, self._tail, self._pending = "inside", text[len(self._start) :], []
            if inner is not None:
                inner.back_to(0)
            self._fits = True
            self._limit()
            return
        self._pending.append(token)
        if self._start.startswith(text):
            if inner is not None and not self._lazy:
                self._fits = self._fits and bool(inner.allowed[token])
                if self._fits:
                    inner.push(token)
            self._tail = text
            return
        pending, self._pending = self._pending, []
        self._place, self._tail = "behind", b""
        if inner is not None:
            for each in pending[0 if self._lazy else inner.position :]:
                self._answer(inner, each)

    def _answer(self, inner: "Constraint | LateConstraint", token: int) -> None:
        if not self._lazy:
            if self._blanks and token in self._texts.blanks and not inner.allowed[token]:
                self._blanks -= 1
                return
            self._blanks = 0
            inner.push(token)
            return
        if not self._called:
            text = self._texts.of(token)
            if self._may_open and (begin := text.lstrip()):
                self._may_open, self._called = False, begin.startswith(self._opening)
            self._tail += text
            self._called = self._called or any(call in self._tail for call in self._calls)
            self._tail = self._tail[-self._longest_call :]
        self._pending.append(token)
        if self._wakes:
            for each in self._pending:
                inner.push(each)
            self._pending.clear()


def _ending(text: bytes, marker: bytes) -> int:
    """Return how many bytes of a marker the text ends with: less than all, 0 for none."""
    first = marker[:1]
    at = text.find(first, max(0, len(text) - len(marker) + 1)) if first else -1
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(first, at + 1)
    return 0


# Make the constraints of one model wait.


class Gates:
    """Knows the markers of a model.

    spelled    bytes of each id; b"" for an id without a text
    vocab      ids below this can be drawn
    eos_ids    ids that end an answer
    tokenizer  None: the model has no markers
    """

    def __init__(
        self, spelled: Sequence[bytes], vocab: int, eos_ids: Collection[int], tokenizer: "Tokenizer | None"
    ) -> None:
        self._vocab, self._eos_ids, self._tokenizer = vocab, frozenset(eos_ids), tokenizer
        markers = {} if tokenizer is None else tokenizer.special_ids(ALL_MARKERS)
        self._markers = markers
        self.special_ids = frozenset(markers)
        """Markers of known formats that are special tokens of this model."""
        self.spelled = [markers[token].encode() if token in markers else piece for token, piece in enumerate(spelled)]
        """The text of each token. A grammar of calls matches markers by their texts."""
        self._texts: dict[frozenset[str], MarkerTexts] = {}

    def hidden(self, visible: Collection[str]) -> frozenset[int]:
        """Return the special tokens that a call may not hold, because they would not be part of the answer's text.

        visible  markers that are part of the text. If none is, the client does not read calls, and nothing is hidden
        """
        return frozenset(token for token, text in self._markers.items() if visible and text not in visible)

    def begins_free(self, job: Job) -> bool:
        """Return whether an answer begins without its constraint: it reasons first, or may write text before a call."""
        reasons, lazy = _waits(job)
        return self._tokenizer is not None and (lazy or (reasons and job.layout.place == "inside"))

    def around(self, job: Job, inner: "Constraint | LateConstraint | None") -> GatedConstraint | None:
        """Return a constraint that waits for the end of the reasoning, or for a call; None if it has to wait for
        neither.

        inner  what follows then; None if the answer is not constrained
        """
        layout, tokenizer = job.layout, self._tokenizer
        reasons, lazy = _waits(job)
        if tokenizer is None or not (reasons or lazy):
            return None
        if not reasons:
            layout = replace(layout, place="behind")
        forced = [] if layout.reasoning is None else tokenizer.encode_rendered(layout.reasoning[1])
        end_ids = self._eos_ids.union(job.stop_token_ids)
        texts = self._texts_with(tokenizer, frozenset((*(layout.reasoning or ()), *layout.calls)))
        return GatedConstraint(inner, layout, texts, self._vocab, end_ids, forced, lazy=lazy)

    def _texts_with(self, tokenizer: "Tokenizer", markers: frozenset[str]) -> MarkerTexts:
        """Return the text of each token, with these markers, which models.yaml may have named."""
        if markers not in self._texts:
            spelled = list(self.spelled)
            for token, text in tokenizer.special_ids(markers).items():
                spelled[token] = text.encode()
            self._texts[markers] = MarkerTexts(spelled)
        return self._texts[markers]


def _waits(job: Job) -> tuple[bool, bool]:
    """Return whether a constraint waits for the end of the reasoning, and whether it waits for a call."""
    layout = job.layout
    reasons = layout.waits and layout.reasoning is not None and layout.place != "behind"
    return reasons, job.lazy and bool(layout.calls)
