"""Draws of all rows of a step, launched together on one GPU."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Any, Protocol

import numpy as np
import torch

from model_worker.engines.exllamav2.gpu_draws.rule import POINT_BITS, DrawRule, draw, penalised
from model_worker.engines.exllamav2.gpu_draws.sizes import BINS, BLOCK, LEVELS, MOST, WORDS
from model_worker.engines.exllamav2.sampling import NEVER

Array = np.ndarray[Any, Any]

HOST, GREEDY, WEIGHED = 0, 1, 2


@dataclass(frozen=True)
class RowDraw:
    """What one row draws: its rule, its tables (-1: none), the tokens of its sequence, its point of 53 bits, and the
    mask of the tokens that its constraint allows (-1: none)."""

    rule: DrawRule
    slot: int
    position: int
    point: int
    mask: int = -1


def write_words(words: Array, draws: Sequence[RowDraw | None]) -> None:
    """Write the rows of a step into int32 [rows, WORDS]. Rows beyond ``draws``, and those of None, draw nothing."""
    words[:, 0] = HOST
    for row, drawn in zip(words, draws, strict=False):
        if drawn is None:
            continue
        rule = drawn.rule
        pack_into(
            "<8i3Qd5fiQ", row, 0,
            GREEDY if rule.greedy else WEIGHED, drawn.slot, drawn.position, rule.penalty_range, rule.penalty_end,
            rule.top_k, rule.smoothed, rule.cuts,
            drawn.point << 11, rule.top_p, rule.min_p, rule.top_a * 2.0**80,
            rule.scale, rule.penalty, rule.fade, rule.frequency, rule.presence,
            drawn.mask, rule.typical_p,
        )  # fmt: skip


class BatchedDraws:
    """Buffers and tables of the kernels. Nothing is allocated after this.

    rows    most rows of a step, and number of slots with tables
    padded  elements of a row of logits; ids below ``vocab`` can be drawn
    words   int32 [rows, WORDS] on the device: what the rows draw; by default zeros
    drawn   int64 [rows]: where the tokens go; -1 for a row whose logits are not numbers
    most    the most candidates of a row that are gathered, a power of 2
    """

    def __init__(
        self,
        rows: int,
        padded: int,
        vocab: int,
        device: torch.device | str,
        words: torch.Tensor | None = None,
        drawn: torch.Tensor | None = None,
        most: int = MOST,
    ) -> None:
        self.rows, self.vocab, self._padded = rows, vocab, padded
        self.blocks, self._most = -(-vocab // BLOCK), most
        # Not imported above: it needs Triton.
        self._kernels: Any = importlib.import_module("model_worker.engines.exllamav2.gpu_draws.kernels")
        self._slow: Any = importlib.import_module("model_worker.engines.exllamav2.gpu_draws.kernels")

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.words = make(rows, WORDS) if words is None else words
        self.bias = make(rows, vocab, dtype=torch.float32)
        self.last_seen, self.counts = make(rows, vocab), make(rows, vocab)
        self.masks = make(rows, -(-vocab // 8), dtype=torch.uint8)
        self.drawn = make(rows, dtype=torch.int64) if drawn is None else drawn
        self._largest = make(rows, self.blocks, dtype=torch.float32)
        self._where, self._wrong = make(rows, self.blocks), make(rows, self.blocks)
        self._powers = make(rows, vocab, dtype=torch.float32)
        self._sums = make(rows, self.blocks, dtype=torch.int64)
        self._above = make(rows, LEVELS, self.blocks)
        self._mass_above = make(rows, LEVELS, self.blocks, dtype=torch.int64)
        self._likely, self._likely_ids = make(rows, most, dtype=torch.int64), make(rows, most)
        self._gathered = make(rows)
        self._counted, self._summed = make(rows, BINS), make(rows, BINS, dtype=torch.int64)

    def fill(self, table: str, slot: int, values: Array) -> None:
        """Queue the filling of one slot of "bias", "last_seen" or "counts" on the current stream."""
        tables = {"bias": self.bias, "last_seen": self.last_seen, "counts": self.counts}
        tables[table][slot].copy_(torch.from_numpy(values))

    def fill_masks(self, bits: Array) -> None:
        """Queue the filling of the first masks on the current stream: uint8 [masks, vocab / 8, rounded up]."""
        given = torch.from_numpy(bits)
        if self.masks.is_cuda:
            given = given.pin_memory()
        self.masks[: len(bits)].copy_(given, non_blocking=True)

    def launch(self, logits: torch.Tensor, rows: int) -> None:
        """Queue the draws of fp16 logits [rows, padded] by ``words``; the tokens go to ``drawn``. May be captured."""
        k, blocks = self._kernels, self.blocks
        tables = self.bias, self.last_seen, self.counts, self.masks
        power = max(1 << (blocks - 1).bit_length(), 2)
        options = {"num_warps": 8, "enable_fp_fusion": False}
        sizes = {"VOCAB": self.vocab, "BLOCKS": blocks, "BLOCK": BLOCK}
        grid = rows, blocks
        k.adjust[grid](
            logits, self.words, *tables, self._largest, self._where, self._wrong, ROW=self._padded, **sizes, **options
        )
        sizes["BLOCKS_2"] = power
        k.weigh[grid](
            logits, self.words, *tables, self._largest, self._powers, self._sums, self._above, self._mass_above,
            ROW=self._padded, **sizes, **options,
        )  # fmt: skip
        chosen = self._likely, self._likely_ids, self._gathered
        k.gather[grid](
            self.words, self._powers, self._sums, self._above, self._mass_above, *chosen, self._counted, self._summed,
            MOST=self._most, BINS=BINS, **sizes, **options,
        )  # fmt: skip
        k.choose[(rows,)](
            self.words, self._largest, self._where, self._wrong, self._powers, self._sums, *chosen, self.drawn,
            MOST=self._most, **sizes, **options,
        )  # fmt: skip
        self._slow.choose_slowly[(rows,)](
            self.words, self._powers, self._sums, self._counted, self._summed, self._gathered, self.drawn,
            BINS=BINS, **sizes, **options | {"num_warps": 32},
        )  # fmt: skip
        k.note[(rows,)](self.words, self.drawn, self.last_seen, self.counts, VOCAB=self.vocab)


# The tables of rows with penalties or biases: which slot belongs to which job, and what is in it.
#
# Most rows have no penalties, biases or minimum, and no slot. A slot is filled when its job draws for the first time.
# From then on the kernels enter each drawn token, so that nothing has to be read back before the next draw.


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


# The rule's draws on the host, for answers whose draws cannot wait for the GPU: speculation and constraints.


def draw_by_rule(job: Any, logits: torch.Tensor) -> int:
    """Return the next token of an AnswerJob with a rule: the one that the GPU would draw from these logits.

    logits  float32 [1, 1, padded vocabulary]

    Raises RuntimeError for logits that are not numbers.
    """
    rule, vocab = job.rule, job.vocab
    seen = counts = bias = None
    ids = job.sequences[0].sequence_ids.torch()[0].numpy()
    if rule.penalty != 1:
        inside = ids < vocab
        seen = np.zeros(vocab, np.int32)
        seen[ids[inside]] = np.flatnonzero(inside) + 1  # of equal ids, the last one stays
    if job.bias is not None and job.bias.counts:
        counts = np.zeros(vocab, np.int32)
        for token, count in job.bias.counted.items():
            counts[token] = count
    if job.limits is not None and job.gen_settings.token_bias is job.limits:
        bias = job.limits.numpy()[:vocab]
    elif job.bias is not None or job.first_bias is not None:
        bias = np.zeros(vocab, np.float32)
        for own in (job.bias.base if job.bias else None, job.first_bias):
            if own is not None:
                bias += own.numpy()[:vocab]
    x = penalised(logits[0, 0, :vocab].numpy(), rule, len(ids), seen, counts, bias)
    if 0 <= job.new_tokens < job.minimum:
        x[job.end_list] = NEVER
    point = 0 if rule.greedy else int(job.draws.at(job.new_tokens, returns=job.returns) * 2.0**POINT_BITS)
    try:
        return draw(x, rule, point)
    except ValueError:
        raise RuntimeError("the model's logits are not numbers") from None
