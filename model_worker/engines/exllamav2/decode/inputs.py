"""What the host writes for a step: tokens, lengths and block tables, in pinned memory and on each GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.gpu_draws.batched import RowDraw, write_words
from model_worker.engines.exllamav2.gpu_draws.sizes import WORDS

Array = np.ndarray[Any, Any]

PINNED_SETS = 3
"""Sets of pinned memory. A set is written again once the copy that reads it has run. At most two steps are queued, so
that never takes long."""
_ALIGNED = 4
"""int32 numbers to which parts are aligned: Triton launches fast with addresses that are multiples of 16 bytes."""


@dataclass
class Row:
    """One sequence of a step.

    tokens  the tokens whose logits are computed, in order; not read where ``source`` is not -1
    length  tokens of the sequence in the cache, before the step appends
    pages   int32: the numbers of its pages, in order, up to the last one that the step writes
    source  the row of the step before that draws the token; -1: the host knows it
    """

    tokens: Sequence[int]
    length: int
    pages: Array
    source: int = -1


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class StepInputs:
    """The inputs of a step with ``queries`` tokens for each of at most ``rows`` rows, on one or more GPUs.

    All of it is one block of int32 for each GPU: given tokens [rows * queries], sources [rows], lengths [rows], what
    the rows draw [rows, WORDS], and the block table [rows, width] of the step's own width. So a step is one copy.

    width  pages of the widest block table
    spare  a page that no sequence owns. Rows that fill up a step write there, and unused entries of tables hold it
    """

    def __init__(self, devices: Sequence[int], rows: int, queries: int, width: int, spare: int) -> None:
        self.rows, self.queries, self._spare = rows, queries, spare
        self._sources = _aligned(rows * queries)
        self._lengths = self._sources + _aligned(rows)
        self._words = self._lengths + _aligned(rows)
        self._table = self._words + rows * WORDS
        size = self._table + rows * width
        self._pinned = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(PINNED_SETS)]
        self._arrays = [tensor.numpy() for tensor in self._pinned]
        self._next = 0
        self._copied: list[list[Any]] = [[] for _ in range(PINNED_SETS)]  # events behind the copies of each set
        self.device = {index: torch.zeros(size, dtype=torch.int32, device=f"cuda:{index}") for index in devices}

    def given(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][: rows * self.queries]

    def sources(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][self._sources : self._sources + rows]

    def lengths(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][self._lengths : self._lengths + rows]

    def words(self, device: int) -> torch.Tensor:
        """Return what the rows draw, int32 [rows, WORDS] (``gpu_draws.kernels``)."""
        return self.device[device][self._words : self._table].view(self.rows, WORDS)

    def table(self, device: int, rows: int, width: int) -> torch.Tensor:
        return self.device[device][self._table : self._table + rows * width].view(rows, width)

    def write(self, step: Sequence[Row], draws: Sequence[RowDraw | None], rows: int, width: int) -> None:
        """Queue the copies of a step's inputs on the current streams. ``rows`` and ``width`` are those of the graph.

        draws  what each row draws; None, and rows without an element: nothing
        """
        block, pinned, copied = self._arrays[self._next], self._pinned[self._next], self._copied[self._next]
        self._next = (self._next + 1) % PINNED_SETS
        while copied:
            copied.pop().synchronize()
        queries, used = self.queries, len(step)
        end = self._table + rows * width
        table = block[self._table : end].reshape(rows, width)
        table.fill(self._spare)
        for number, row in enumerate(step):
            if row.source < 0:
                block[number * queries : (number + 1) * queries] = row.tokens
            table[number, : len(row.pages)] = row.pages
        block[self._sources : self._sources + rows] = -1
        block[self._sources : self._sources + used] = [row.source for row in step]
        block[self._lengths : self._lengths + rows] = 0
        block[self._lengths : self._lengths + used] = [row.length for row in step]
        block[used * queries : rows * queries] = 0
        write_words(block[self._words : self._words + rows * WORDS].reshape(rows, WORDS), draws)
        for index, tensor in self.device.items():
            tensor[:end].copy_(pinned[:end], non_blocking=True)
            copied.append(torch.cuda.current_stream(index).record_event())
