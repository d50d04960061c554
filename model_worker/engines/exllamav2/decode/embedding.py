"""The embedding in host memory, where the GPU can read it."""

import contextlib
import weakref
from typing import Any

import torch


class NotReadableError(Exception):
    """The GPU cannot read the host's memory."""


class HostEmbedding:
    """A model's embedding [vocabulary, hidden] in fp16, in host memory that GPUs can read.

    A captured step reads the rows that it needs over PCIe: 8 KiB for each token of a model of 8 billion parameters.
    Raises NotReadableError with the reason in words.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        size = table.numel() * table.element_size()
        code = torch.cuda.cudart().cudaHostRegister(table.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        if not int(code):
            # Memory that is freed while it is registered breaks later copies from its addresses.
            weakref.finalize(self, _unregister, table.data_ptr())
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # the next launch reports the error and clears it
        raise NotReadableError(
            f"the GPU cannot read the embedding ({size >> 20} MiB) in host memory (CUDA error {int(code)}); the limit "
            "of locked memory may be too low (ulimit -l)"
        )


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def scale_of(model: Any) -> float:
    """Return the factor by which the package multiplies embeddings (embedding.py, normalize_embeddings)."""
    return float(model.config.hidden_size**0.5) if model.modules[0].archparams.normalize_embeddings else 1.0
