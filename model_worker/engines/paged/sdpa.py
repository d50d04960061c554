"""Attention over pages with ``scaled_dot_product_attention`` alone. It works on every device and is the reference.

The pages of each sequence are gathered into one tensor and attended under a mask.
"""

import torch
import torch.nn.functional as F

from model_worker.engines.paged.step import Attend, Shape, Step


class Slots:
    """The places of new keys and of all keys in the cache.

    pages      int64 [b, pages], page numbers of each sequence
    slots      int64 [b * q_len], indices of the queries' own tokens among all tokens of the cache
    positions  int64 [b, q_len], positions of the queries in their sequences
    """

    def __init__(self, step: Step, shape: Shape) -> None:
        table, q_len, page_size = step.table, shape.q_len, shape.page_size
        self.positions = step.ends(shape).long()[:, None] - q_len + torch.arange(q_len, device=table.device)
        self.pages = table.long()
        page = self.pages.gather(1, self.positions.div(page_size, rounding_mode="floor"))
        self.slots = (page * page_size + self.positions % page_size).flatten()

    def append(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k_cache.flatten(0, 1)[self.slots] = k.flatten(0, 1)
        v_cache.flatten(0, 1)[self.slots] = v.flatten(0, 1)


def plan(step: Step, shape: Shape) -> Attend:
    """Return the attention of this shape for this step."""
    where = Slots(step, shape)
    keys = torch.arange(step.table.shape[1] * shape.page_size, device=step.table.device)
    visible = keys <= where.positions[:, :, None]
    if shape.window >= 0:
        visible &= keys >= where.positions[:, :, None] - shape.window
    hidden = torch.full((), -torch.inf, dtype=shape.dtype, device=step.table.device)
    # An additive mask, because the kernels would turn a boolean mask into an additive one at every call.
    mask = torch.where(visible, hidden.new_zeros(()), hidden)[:, None]  # [b, 1, q_len, keys]

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            where.append(k_cache, v_cache, k, v)
        return _attend(q, k_cache[where.pages].flatten(1, 2), v_cache[where.pages].flatten(1, 2), mask, shape)

    return attend


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """Compute attention. ``keys`` and ``values`` are [b, keys, kv_heads, head_dim]."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    queries = q.transpose(1, 2)
    if shape.q_len == 1:
        # The query heads that share a key head become its queries, so nothing is copied.
        queries = q.reshape(shape.batch, shape.kv_heads, shape.group, shape.head_dim)
    elif shape.group > 1:
        keys = keys.repeat_interleave(shape.group, dim=1)
        values = values.repeat_interleave(shape.group, dim=1)
    if shape.softcap:
        out = _attend_capped(queries, keys, values, mask, shape.scale, shape.softcap)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=shape.scale)
    return out.reshape(q.shape) if shape.q_len == 1 else out.transpose(1, 2).contiguous()


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Compute attention with capped scores, which SDPA cannot do. All scores are held in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap) + mask
    return scores.softmax(-1).to(v.dtype) @ v
