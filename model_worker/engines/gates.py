"""Make the constraints of one model wait: see ``gated``."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from answer_formats.families import ALL_MARKERS
from model_worker.engine import Job
from model_worker.engines.gated import GatedConstraint
from model_worker.engines.marker_texts import MarkerTexts

if TYPE_CHECKING:
    from model_worker.engines.constraint import Constraint
    from model_worker.engines.late import LateConstraint
    from model_worker.engines.tokenizer import Tokenizer


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
