"""The data that all layers of a step share: the shape of its attention calls, its tables, and its attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# (q, k_cache, v_cache, k, v) -> out, with the shapes of Shape.
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    torch.Tensor,
]


@dataclass(frozen=True)
class Shape:
    """One kind of attention call: causal, over the last tokens of sequences whose keys and values are in pages.

    q                 [batch, q_len, heads, head_dim], contiguous; the result has the same shape
    k_cache, v_cache  [pages, page_size, kv_heads, head_dim], contiguous; written in place
    k, v              [batch, q_len, kv_heads, head_dim] to append behind ``lengths`` first (``appends``), or None if
                      the caches already hold them and ``lengths`` counts them
    window            the number of keys before its own position that a query sees, -1 for all
    scale             multiplies q @ k
    softcap           scores become softcap * tanh(score / softcap); 0.0 is off
    """

    batch: int
    q_len: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    appends: bool
    window: int
    scale: float
    softcap: float
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Return the number of query heads per key head."""
        return self.heads // self.kv_heads


class Step:
    """The tables of one step on one device, and the attention made for the step.

    lengths  int32 [b], tokens in the pages before the step appends
    table    int32 [b, pages], page numbers of each sequence in order; entries beyond its length are not read

    ExLlamaV2 passes the same tensor objects to all layers of a step. This object keeps them, so that no tensor of the
    next step can have the same identity. On the CPU the package changes the tensors in place, so contents are compared.
    """

    def __init__(self, lengths: torch.Tensor, table: torch.Tensor) -> None:
        self.lengths, self.table = lengths, table
        self.calls: dict[tuple[object, ...], Attend] = {}
        self._content = None if lengths.is_cuda else (lengths.clone(), table.clone())

    def is_of(self, lengths: torch.Tensor, table: torch.Tensor) -> bool:
        if self.lengths is not lengths or self.table is not table:
            return False
        return self._content is None or (
            torch.equal(self._content[0], lengths) and torch.equal(self._content[1], table)
        )

    def ends(self, shape: Shape) -> torch.Tensor:
        """Return int32 [b]: the tokens in the pages after the step has appended."""
        return self.lengths + shape.q_len if shape.appends else self.lengths
