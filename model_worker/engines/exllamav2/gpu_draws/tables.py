"""The tables of rows with penalties or biases: which slot belongs to which job, and what is in it.

Most rows have no penalties, biases or minimum, and no slot. A slot is filled when its job draws for the first time.
From then on the kernels enter each drawn token, so that nothing has to be read back before the next draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from model_worker.engines.exllamav2.gpu_draws.batched import RowDraw
from model_worker.engines.exllamav2.gpu_draws.rule import DrawRule
from model_worker.engines.exllamav2.sampling import NEVER

Array = np.ndarray[Any, Any]

_SIZE_OF_POINT = 1 << 53


def draws_on_gpu(job: Any) -> bool:
    """Return whether the GPU can draw the next token of an AnswerJob."""
    return job.rule is not None and len(job.sequences) == 1


def draws_ahead(job: Any) -> bool:
    """Return whether the GPU can draw the next token of an AnswerJob while the host does not know the one before it."""
    return draws_on_gpu(job) and (job.constraint is None or job.constraint.dormant)


class DrawTables(Protocol):
    """The tables, one slot for each of ``rows`` rows, of ``vocab`` ids each."""

    rows: int
    vocab: int

    def fill(self, table: str, slot: int, values: Array) -> None:
        """Queue the filling of one slot of "bias", "last_seen" or "counts"."""
        ...

    def fill_masks(self, bits: Array) -> None:
        """Queue the filling of the first masks: uint8 [masks, vocab / 8, rounded up], a bit for each id."""
        ...


@dataclass
class _Slot:
    """What a slot holds.

    place  the number of the next token to draw: if the job draws another one, the tables are not up to date
    bias   what its bias was made of
    """

    job: Any
    place: int
    bias: tuple[bool, bool]


class RowTables:
    """Gives the jobs of each step what ``BatchedDraws`` needs to know of them."""

    def __init__(self, batched: DrawTables) -> None:
        self._batched = batched
        self._slots: dict[int, _Slot] = {}
        self._free = list(range(batched.rows))

    def step(self, jobs: Sequence[Any | None], places: Sequence[int], lengths: Sequence[int]) -> list[RowDraw | None]:
        """Return what each row draws. Queue the filling of tables on the current stream.

        jobs     None for a row that the host draws
        places   the number of the token that each row draws, counted from the answer's first as 0
        lengths  tokens of each row's sequence in the cache, before the step
        """
        here = {id(job) for job in jobs if job is not None}
        for number in [number for number, slot in self._slots.items() if id(slot.job) not in here]:
            del self._slots[number]
            self._free.append(number)
        of_job = {id(slot.job): number for number, slot in self._slots.items()}
        draws: list[RowDraw | None] = []
        masks: list[Array] = []
        for job, place, length in zip(jobs, places, lengths, strict=True):
            if job is None:
                draws.append(None)
                continue
            rule = job.rule
            number = self._slot(job, place, of_job.get(id(job), -1), rule)
            point = 0 if rule.greedy else int(job.draws.at(place, returns=job.returns) * _SIZE_OF_POINT)
            mask = -1
            if job.mask is not None and not job.constraint.dormant:
                mask = len(masks)
                masks.append(job.mask)
            draws.append(RowDraw(rule, number, length + 1, point, mask))
        if masks:
            self._batched.fill_masks(np.stack(masks))
        return draws

    def _slot(self, job: Any, place: int, number: int, rule: DrawRule) -> int:
        """Return the slot of a job whose tables are right for its next draw; -1 if it needs none."""
        bias = job.first_bias is not None and not job.begun_here(place), 0 <= place < job.minimum
        if number < 0:
            if not (rule.needs_history or job.bias is not None or any(bias)):
                return -1
            number = self._free.pop()
            self._slots[number] = _Slot(job, place - 1, (not bias[0], bias[1]))
        slot = self._slots[number]
        if slot.place != place:
            self._fill_history(number, job)
        if slot.bias != bias:
            self._batched.fill("bias", number, self._bias(job, *bias))
        slot.place, slot.bias = place + 1, bias
        return number

    def _fill_history(self, number: int, job: Any) -> None:
        """Enter the tokens so far. No token of the job is on its way: the host knows them all."""
        if not job.rule.needs_history:
            return
        ids = job.sequences[0].sequence_ids.torch()[0].numpy()
        vocab = self._batched.vocab
        inside = ids < vocab
        seen, counts = np.zeros(vocab, np.int32), np.zeros(vocab, np.int32)
        seen[ids[inside]] = np.flatnonzero(inside) + 1  # of equal ids, the last one stays
        if job.bias is not None:
            for token, count in job.bias.counted.items():
                counts[token] = count
        self._batched.fill("last_seen", number, seen)
        self._batched.fill("counts", number, counts)

    def _bias(self, job: Any, first: bool, unfinished: bool) -> Array:
        """Return the bias of a job's next draw, float32 [vocabulary]."""
        vocab = self._batched.vocab
        bias = np.zeros(vocab, np.float32)
        if job.bias is not None:
            bias += job.bias.base.numpy()[:vocab]
        if first:
            bias += job.first_bias.numpy()[:vocab]
        if unfinished:
            bias[job.end_list] = NEVER
        return bias
