"""Draws of all rows of a step, launched together on one GPU."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.gpu_draws.rule import DrawRule
from model_worker.engines.exllamav2.gpu_draws.sizes import BINS, BLOCK, LEVELS, MOST, WORDS

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
        self._slow: Any = importlib.import_module("model_worker.engines.exllamav2.gpu_draws.slow_kernels")

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
