"""Attention over pages with PyTorch's own flash attention: from torch 2.12 on over the pages in place, else gathered.

It needs an Ampere GPU or later, 16-bit numbers, and a head_dim of up to 256 in steps of 8. It supports windows, but no
soft-capping.
"""

from collections.abc import Callable
from typing import Any

import torch

from model_worker.engines.paged.sdpa import Slots
from model_worker.engines.paged.step import Attend, Shape, Step


def varlen() -> Callable[..., Any] | None:
    """Return ``torch.nn.attention.varlen.varlen_attn`` if it reads pages by a block table, else None."""
    try:
        import inspect

        from torch.nn.attention import varlen as module

        function: Callable[..., Any] = module.varlen_attn
        known = inspect.signature(function).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return function if {"block_table", "seqused_k", "window_size", "scale", "enable_gqa"} <= set(known) else None


def reads_gathered() -> bool:
    """Return whether the operator below ``varlen_attn`` accepts the lengths in use (torch 2.9 and later)."""
    try:
        arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    except AttributeError:
        return False
    return any(a.name == "seqused_k" for a in arguments)


def _fits(shape: Shape, device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and shape.dtype in (torch.float16, torch.bfloat16)
        and shape.head_dim % 8 == 0
        and shape.head_dim <= 256
        and not shape.softcap
    )


def plan_in_place(step: Step, shape: Shape) -> Attend | None:
    """Return ``varlen_attn`` over the pages for this step; None if it cannot compute this shape."""
    attention = varlen()
    if attention is None or shape.page_size % 256 or not _fits(shape, step.table.device):
        return None
    where, ends = Slots(step, shape), step.ends(shape)
    starts = torch.arange(0, (shape.batch + 1) * shape.q_len, shape.q_len, dtype=torch.int32, device=ends.device)
    most = step.table.shape[1] * shape.page_size

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            where.append(k_cache, v_cache, k, v)
        out: torch.Tensor = attention(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            starts,
            None,
            shape.q_len,
            most,
            scale=shape.scale,
            window_size=(shape.window, 0),
            enable_gqa=shape.group > 1,
            seqused_k=ends,
            block_table=step.table,
        )
        return out.view(q.shape)

    return attend


def plan_gathered(step: Step, shape: Shape) -> Attend | None:
    """Return flash attention over gathered pages, or over a view of consecutive ones; None if it cannot compute this
    shape."""
    if not reads_gathered() or not _fits(shape, step.table.device):
        return None
    where, ends = Slots(step, shape), step.ends(shape)
    width, page_size = step.table.shape[1], shape.page_size
    first: int | None = None
    if shape.q_len > 1 and shape.batch == 1:  # once per chunk of a prompt, which is long enough to wait for the device
        used = -(-int(ends.max()) // page_size)
        numbers = step.table[0, :used].tolist()
        width, first = used, numbers[0] if numbers == list(range(numbers[0], numbers[0] + used)) else None
    pages = where.pages[:, :width].flatten()
    starts_q = torch.arange(0, (shape.batch + 1) * shape.q_len, shape.q_len, dtype=torch.int32, device=ends.device)
    starts_k = torch.arange(shape.batch + 1, dtype=torch.int32, device=ends.device) * (width * page_size)

    def together(cache: torch.Tensor) -> torch.Tensor:
        found = cache.index_select(0, pages) if first is None else cache[first : first + width]
        return found.flatten(0, 1)

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            where.append(k_cache, v_cache, k, v)
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q.flatten(0, 1),
            together(k_cache),
            together(v_cache),
            starts_q,
            starts_k,
            shape.q_len,
            width * page_size,
            0.0,
            True,
            False,
            scale=shape.scale,
            window_size_left=shape.window if shape.window >= 0 else None,
            window_size_right=0 if shape.window >= 0 else None,
            seqused_k=ends,
        )[0]
        return out.view(q.shape)

    return attend
