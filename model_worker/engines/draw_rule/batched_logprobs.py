"""Compute the log-probabilities of a batch's drawn tokens on the GPU. Importing this module imports Triton."""

import torch

from model_worker.engines.draw_rule import logprobs

MOST = 32
BLOCK = 2048


class BatchedLogprobs:
    """The log-probabilities of one device. All memory is allotted once.

    rows, drawable, device  as in ``batched.BatchedDraws``

    The host fills ``wanted`` int32 [rows]: -1 for a row without log-probabilities, else the number of likeliest ids.
    Results on the device: ``own`` float32 [rows], ``values`` float32 and ``ids`` int32 [rows, 32], likeliest first.
    """

    def __init__(self, rows: int, drawable: int, device: torch.device | str) -> None:
        self._drawable = drawable
        self._block = min(BLOCK, max(32, 1 << (drawable - 1).bit_length()))
        self._blocks = -(-drawable // self._block)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.wanted = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.own, self.values, self.ids = zeros(rows), zeros(rows, MOST), zeros(rows, MOST, dtype=torch.int32)
        self._values = zeros(rows, self._blocks, MOST)
        self._ids = zeros(rows, self._blocks, MOST, dtype=torch.int32)
        self._sums = zeros(rows, self._blocks)

    def launch(self, logits: torch.Tensor, rows: int, drawn: torch.Tensor) -> None:
        """Compute for the first ``rows`` rows of the model's own logits. ``drawn`` int64 [rows] are the drawn ids."""
        stride = logits.stride(0)
        logprobs.block_tops[(self._blocks, rows)](
            logits, self.wanted, self._values, self._ids, self._sums, stride,
            DRAWABLE=self._drawable, BLOCK=self._block, BLOCKS=self._blocks, num_warps=4,
        )  # fmt: skip
        logprobs.merge[(rows,)](
            logits, self.wanted, drawn, self._values, self._ids, self._sums, self.own, self.values, self.ids, stride,
            BLOCKS=self._blocks, COLUMNS=max(2, 1 << (self._blocks - 1).bit_length()),
            CANDIDATES=1 << (self._blocks * MOST - 1).bit_length(), num_warps=4,
        )  # fmt: skip
