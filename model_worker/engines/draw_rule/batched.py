"""Draw the tokens of a batch on the GPU, by the rule. Importing this module imports Triton.

A *slot* holds what belongs to a request: its numbers, bias, end tokens, constraint and counted tokens. A *row* is a
place in one step's batch. Each step maps rows to slots. All memory is allotted once, so a CUDA graph can hold a launch:
the host fills the pinned tensors and calls ``send`` before each replay. The host never waits here.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engines.draw_rule import kernels
from model_worker.engines.draw_rule.rule import Rule
from model_worker.engines.exllamav2.sampling import TokenBias
from protocol.request import SamplingParams

ROOM = 1024
"""Candidates of a row with a cut (top_k, top_p, top_a, min_p) that are sorted. With more, the row is searched."""
LARGEST_BLOCK = 2048
"""Ids that one program reads."""
GREEDY, SMOOTH, CUTS, REPEATS, COUNTS, BIASED = 1, 2, 4, 8, 16, 32
TOO_SHORT, LIMITED = 1, 2
SLOT, POINT, LENGTH, FLAGS = range(4)

Bits = np.ndarray[Any, np.dtype[np.uint8]]


class BatchedDraws:
    """The draws of one device.

    rows      most rows of a step, and the number of slots
    padded    columns of the logits, without the stride's padding
    drawable  ids below this can be drawn
    eos_ids   ids that end an answer of this model
    device    of the logits
    room      a power of 2: candidates of a row with a cut that the quick way holds

    A slot takes 12 bytes per id of the vocabulary (bias, last places, counts), and 2 bits.

    ``ids`` int64 [rows] and ``states`` int32 [rows] are the results on the device (``reference`` names the states).
    """

    def __init__(
        self,
        rows: int,
        padded: int,
        drawable: int,
        eos_ids: Iterable[int],
        device: torch.device | str,
        room: int = ROOM,
    ) -> None:
        self._room = room
        self.rows, self.padded, self.drawable = rows, padded, drawable
        self._eos = tuple(eos_ids)
        self.device = torch.device(device)
        self._block = min(LARGEST_BLOCK, max(32, 1 << (drawable - 1).bit_length()))
        self._blocks = -(-drawable // self._block)
        self._words = -(-padded // 32)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.step = zeros(rows, 4, dtype=torch.int64)
        self._whole, self._real = zeros(rows, 8, dtype=torch.int64), zeros(rows, 8, dtype=torch.float32)
        self._bias = zeros(rows, padded, dtype=torch.float32)
        self._limits = zeros(rows, self._words, dtype=torch.int32)
        self._ends = zeros(rows, self._words, dtype=torch.int32)
        self._seen, self._count = (zeros(rows, padded, dtype=torch.int32) for _ in range(2))
        self._tops = zeros(rows, self._blocks, dtype=torch.float32)
        self._places = zeros(rows, self._blocks, dtype=torch.int32)
        self._sums = zeros(rows, self._blocks, dtype=torch.int64)
        self._bins, self._filled = zeros(rows, 64, dtype=torch.int32), zeros(rows, dtype=torch.int32)
        self._keys = zeros(rows, room, dtype=torch.int64)
        self.ids, self.states = zeros(rows, dtype=torch.int64), zeros(rows, dtype=torch.int32)
        self._pinned_step = self._pinned(rows, 4)
        self._next = self._pinned_step.numpy()
        self._free = list(range(rows))[::-1]
        self._flags = [0] * rows

    def _pinned(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    # --- a request

    def assign(
        self,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        answer: Sequence[int] = (),
        end_ids: Iterable[int] = (),
    ) -> int:
        """Return the slot of a request that ``rule.fits_gpu`` lets in. Raises IndexError if no slot is free.

        answer   tokens of the answer so far; both are needed only for penalties
        end_ids  ids that are not drawn in a step that is ``too_short``
        """
        rule = Rule.of(sampling, self.drawable)
        slot = self._free.pop()
        bias = TokenBias.of(sampling, self.padded, self._eos)
        plain_bias = bias is not None and bool(
            sampling.logit_bias or sampling.banned_tokens or sampling.allowed_tokens or sampling.ignore_eos
        )
        self._flags[slot] = (
            GREEDY * rule.greedy | SMOOTH * rule.smooth | CUTS * rule.cuts | REPEATS * rule.repeats
            | COUNTS * rule.counts | BIASED * plain_bias
        )  # fmt: skip
        self._whole[slot] = torch.tensor([
            self._flags[slot], rule.top_k, rule.top_p << 11 if rule.top_p < 1 << 52 else (rule.top_p << 11) - (1 << 64),
            rule.top_a, rule.min_p, rule.reach_full, rule.reach, 0,
        ])  # fmt: skip
        self._real[slot] = torch.tensor(
            [rule.slope, rule.repetition, rule.fade, rule.frequency, rule.presence, 0, 0, 0], dtype=torch.float32
        )
        if plain_bias and bias is not None:
            self._bias[slot].copy_(bias.tensor)
        self._ends[slot].copy_(self._as_bits(end_ids))
        self.set_history(slot, prompt, answer)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. A step that is still under way may read it until the next ``assign``."""
        self._free.append(slot)

    def set_bias(self, slot: int, bias: torch.Tensor | None) -> None:
        """Replace a slot's bias, float32 [padded], from the next step on; None is none. Frequency and presence penalty
        are not part of it."""
        self._flags[slot] = self._flags[slot] & ~BIASED | (BIASED if bias is not None else 0)
        self._whole[slot, 0] = self._flags[slot]
        if bias is not None:
            self._bias[slot].copy_(bias)

    def set_history(self, slot: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Set the tokens that the slot's penalties see. Needed at the begin, and after an answer has gone back."""
        if self._flags[slot] & REPEATS:
            seen = np.zeros(self.padded, np.int32)
            ids = np.array([*prompt, *answer], np.int64)
            inside = ids < self.padded
            # For an id that occurs several times NumPy keeps the last place.
            seen[ids[inside]] = np.arange(1, len(ids) + 1, dtype=np.int32)[inside]
            self._seen[slot].copy_(torch.from_numpy(seen))
        if self._flags[slot] & COUNTS:
            counts = np.bincount(np.array(answer, np.int64), minlength=self.padded)[: self.padded]
            self._count[slot].copy_(torch.from_numpy(counts.astype(np.int32)))

    def set_limit(self, slot: int, bits: Bits) -> None:
        """Set the ids that a constraint allows in a step that is ``limited``: a bit for each id, lowest id first."""
        self._limits[slot].copy_(self._words_of(bits), non_blocking=True)

    def _words_of(self, bits: Bits) -> torch.Tensor:
        room = np.zeros(4 * self._words, np.uint8)
        room[: len(bits)] = bits
        return torch.from_numpy(room.view(np.int32))

    def _as_bits(self, ids: Iterable[int]) -> torch.Tensor:
        chosen = np.zeros(32 * self._words, np.uint8)
        chosen[[token for token in ids if token < self.padded]] = 1
        return self._words_of(np.packbits(chosen, bitorder="little"))

    # --- a step

    def set_row(
        self, row: int, slot: int, point: int, length: int = 0, *, too_short: bool = False, limited: bool = False
    ) -> None:
        """Say what the next step draws in a row.

        point      a random integer below 2**53 (``rule.point_of``)
        length     tokens of prompt and answer so far; needed only for penalties
        too_short  whether the answer is shorter than its minimum
        limited    whether a constraint limits the draw (``set_limit``)
        """
        # The point fills the top 53 bits of an unsigned number.
        bits = point << 11
        self._next[row] = (
            slot, bits - (1 << 64) if bits >= 1 << 63 else bits, length, TOO_SHORT * too_short | LIMITED * limited
        )  # fmt: skip

    def send(self) -> None:
        """Copy all rows to the device, on the current stream. The next ``set_row`` must wait until that has happened:
        the engine knows it from the ids of the step."""
        self.step.copy_(self._pinned_step, non_blocking=True)

    def launch(
        self,
        logits: torch.Tensor,
        rows: int,
        step: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> None:
        """Draw for the first ``rows`` rows of logits [at least rows, at least drawable], whose rows are contiguous.

        step, ids, states  other tensors than the own ones; tests queue many steps in one CUDA graph
        """
        if logits.stride(1) != 1:
            raise ValueError(f"the logits' rows must be contiguous, not with strides {logits.stride()}")
        step, ids = self.step if step is None else step, self.ids if ids is None else ids
        states = self.states if states is None else states
        common = (
            logits, step, self._whole, self._real, self._bias, self._limits, self._ends, self._seen, self._count,
            self._tops, self._places,
        )  # fmt: skip
        sizes: dict[str, Any] = {
            "DRAWABLE": self.drawable, "WIDTH": self.padded, "WORDS": self._words, "BLOCK": self._block,
            "BLOCKS": self._blocks, "num_warps": 4, "enable_fp_fusion": False,
        }  # fmt: skip
        stride, grid = logits.stride(0), (self._blocks, rows)
        columns = max(2, 1 << (self._blocks - 1).bit_length())
        kernels.peaks[grid](*common, self._bins, self._filled, stride, **sizes)
        sizes["COLUMNS"] = columns
        kernels.weigh[grid](*common, self._sums, self._bins, stride, **sizes)
        sizes["ROOM"] = self._room
        kernels.gather[grid](*common, self._bins, self._filled, self._keys, stride, **sizes)
        sizes["num_warps"] = 8
        kernels.choose[(rows,)](
            *common, self._sums, self._bins, self._filled, self._keys, ids, states, stride, **sizes
        )  # fmt: skip
