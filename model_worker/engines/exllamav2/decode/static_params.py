"""The package's parameters object of a step whose tables are static tensors on the GPU."""

from functools import cache
from typing import Any

import torch

from model_worker.engines.exllamav2.decode.inputs import StepInputs


@cache
def _kind() -> Any:
    # Not imported above: importing the package is left to ``exllamav2.load``.
    from exllamav2.attn_params import PagedParams

    class StaticParams(PagedParams):  # type: ignore[misc]
        """What attention asks of a step (attn.py, forward_paged): its tables, which here are always on the GPU.

        The package's own object keeps tables on the CPU, and moves them with a wait for the GPU. A step of one row may
        be "sequential" there, which puts the position into the launches. Here no step is.
        """

        def __init__(self, table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> None:
            self.batch_size, self.page_size, self.paged = table.shape[0], page_size, True
            self.is_sequential, self.multi_cache = False, False
            self.block_index, self.cache_seqlens = table, lengths
            self.block_index_tp = None
            self.max_cache_seqlen = table.shape[1] * page_size  # only compared with 0
            self.alt_rope_embed: dict[Any, Any] = {}
            self.rope_offsets = None

        def get_block_index(self, device: Any) -> torch.Tensor:
            return self.block_index

        def get_cache_seqlens(self, device_idx: int) -> torch.Tensor:
            return self.cache_seqlens

    return StaticParams


def static_params(inputs: StepInputs, rows: int, width: int, device: int) -> Any:
    """Return the parameters object of a step of ``rows`` rows with a table of ``width`` pages, for one GPU."""
    return _kind()(inputs.table(device, rows, width), inputs.lengths(device, rows), 256)
