"""A cache of keys and values for many sequences, one row each, allocated once."""

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers cache of ``rows`` independent sequences of up to ``length`` tokens.

    ``select`` chooses the rows that the next forward pass computes, and the positions of its tokens. The model's
    attention then calls ``update`` once per layer. The mask must hide positions that do not belong to a row, because
    the returned keys reach up to the end of the longest row.

    Per layer: keys and values [rows, kv_heads, length + 1, head_dim], allocated when the layer first writes. The last
    position takes the padding of prompts of different lengths and is never returned.
    """

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(layers=[])
        self.rows, self._length = rows, length
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._index: torch.Tensor
        self._positions: torch.Tensor
        self._dense = True
        self._batch = self._span = 0

    def select(self, rows: torch.Tensor, positions: torch.Tensor, span: int, *, dense: bool) -> None:
        """Choose the rows and positions of the next forward pass.

        rows       int64 [n], on the cache's device
        positions  int64 [n, t], where each row's t tokens are written; positions beyond ``length`` are padding
        span       number of positions returned, from 0: the longest row's length after this pass
        dense      whether the rows are 0 to n-1 in order; they are returned as a view then, not as a copy
        """
        self._index, self._dense, self._batch, self._span = rows, dense, rows.shape[0], span
        self._positions = positions.clamp(max=self._length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's [n, kv_heads, t, head_dim]. Return [n, kv_heads, span, head_dim] of the selected rows."""
        if layer_idx not in self._keys:
            for store, states in ((self._keys, key_states), (self._values, value_states)):
                shape = (self.rows, states.shape[1], self._length + 1, states.shape[3])
                # Zeros, not empty: a masked weight of 0 times an uninitialised NaN is NaN.
                store[layer_idx] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        # Another index is between the two advanced ones, so their dimensions [n, t] come first.
        rows = self._index[:, None]
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        if self._dense:
            return keys[: self._batch, :, : self._span], values[: self._batch, :, : self._span]
        return keys[self._index, :, : self._span], values[self._index, :, : self._span]

    @torch.inference_mode()  # a cancel calls this between steps, outside of a step's inference mode
    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` tokens of two rows."""
        if a == b or not length:
            return
        for store in (*self._keys.values(), *self._values.values()):
            kept = store[a, :, :length].clone()
            store[a, :, :length] = store[b, :, :length]
            store[b, :, :length] = kept

    def drop(self) -> None:
        """Give the memory of all layers back. ``restore`` allocates it again."""
        for store in (self._keys, self._values):
            for layer, states in store.items():
                store[layer] = states.new_empty((0, *states.shape[1:]))

    def restore(self) -> None:
        """Allocate the memory again that ``drop`` has given back. It is filled with zeros."""
        for store in (self._keys, self._values):
            for layer, states in store.items():
                store[layer] = states.new_zeros((self.rows, *states.shape[1:]))

    # A model may call the following methods, although it also gets positions and a mask.

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self._span - self._positions.shape[1] if self._batch else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0, *args: Any) -> tuple[int, int]:
        return self._span, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._length

    @property
    def is_compileable(self) -> bool:
        return False
