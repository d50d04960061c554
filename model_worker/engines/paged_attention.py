"""Paged attention for ExLlamaV2 from PyTorch alone: stand-ins for the modules of flash-attn.

ExLlamaV2 batches only if flash-attn is there. It asks the package for a version, two signatures and one function that
computes: ``flash_attn_with_kvcache`` over pages of 256 tokens. Without it, its own fallback takes one request at a
time and does not mask the future while it reads a prompt. ``install`` puts modules of these names in place, which must
happen before exllamav2 is imported.

The pages of each sequence are gathered into one tensor and attended with ``scaled_dot_product_attention`` under a mask.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NAME = "paged, PyTorch SDPA over gathered pages (slower than flash-attn)"

_installed = False


class StepPlan:
    """What is the same for every layer of a step: where new keys go, and which keys each query may see.

    seqlens      int32 [b], tokens in the cache before this step (``appends``) or after it
    block_table  int32 [b, pages], page numbers of each sequence in order; entries beyond its length are not read
    q_len        queries per sequence, the last tokens of it
    appends      the step writes q_len new tokens behind seqlens
    window       keys before and after a query's own position that it sees, -1 for all; the future never is
    """

    def __init__(
        self,
        seqlens: torch.Tensor,
        block_table: torch.Tensor,
        page_size: int,
        q_len: int,
        appends: bool,
        window: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        device = seqlens.device
        end = seqlens.long()[:, None] + (q_len if appends else 0)
        positions = end - q_len + torch.arange(q_len, device=device)  # [b, q], of the queries
        self.pages = block_table.long()
        page = self.pages.gather(1, positions.div(page_size, rounding_mode="floor"))
        self.slots = (page * page_size + positions % page_size).flatten()  # [b * q], in the cache seen as one row
        keys = torch.arange(block_table.shape[1] * page_size, device=device)
        visible = keys <= positions[:, :, None]
        if window[0] >= 0:
            visible &= keys >= positions[:, :, None] - window[0]
        hidden = torch.full((), -torch.inf, dtype=dtype, device=device)
        # additive, as the kernels turn a boolean mask into one at every call
        self.mask = torch.where(visible, hidden.new_zeros(()), hidden)[:, None]  # [b, 1, q, keys]


class _Plans:
    """The plans of the current step. ExLlamaV2 passes the very same tensors to all layers of a step; they are kept
    here, so that their identity cannot be reused by the next step's."""

    def __init__(self) -> None:
        self._step: tuple[torch.Tensor, torch.Tensor] | None = None
        self._plans: dict[tuple[Any, ...], StepPlan] = {}

    def get(self, seqlens: torch.Tensor, block_table: torch.Tensor, *rest: Any) -> StepPlan:
        if self._step is None or self._step[0] is not seqlens or self._step[1] is not block_table:
            self._step, self._plans = (seqlens, block_table), {}
        if (plan := self._plans.get(rest)) is None:
            plan = self._plans[rest] = StepPlan(seqlens, block_table, *rest)
        return plan


def attend_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: StepPlan,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the last tokens of sequences whose keys and values lie in pages.

    q                 [b, q_len, heads, head_dim]
    k_cache, v_cache  [pages, page_size, kv_heads, head_dim], written in place where ``plan`` says
    k, v              [b, q_len, kv_heads, head_dim] to append first, None if the caches already hold them
    softmax_scale     default head_dim ** -0.5
    softcap           scores become softcap * tanh(score / softcap); 0 is off

    Returns [b, q_len, heads, head_dim].
    """
    batch, q_len, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    if k is not None and v is not None:
        k_cache.view(-1, kv_heads, dim)[plan.slots] = k.reshape(-1, kv_heads, dim)
        v_cache.view(-1, kv_heads, dim)[plan.slots] = v.reshape(-1, kv_heads, dim)
    keys = k_cache[plan.pages].flatten(1, 2).transpose(1, 2)  # [b, kv_heads, keys, head_dim]
    values = v_cache[plan.pages].flatten(1, 2).transpose(1, 2)
    group = heads // kv_heads
    queries = q.transpose(1, 2)
    if q_len == 1:
        # the query heads that share a key head become its queries: nothing is copied
        queries = q.reshape(batch, kv_heads, group, dim)
    elif group > 1:
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
    if softcap:
        out = _attend_capped(queries, keys, values, plan.mask, softmax_scale or dim**-0.5, softcap)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=plan.mask, scale=softmax_scale)
    return out.reshape(batch, 1, heads, dim) if q_len == 1 else out.transpose(1, 2).contiguous()


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention whose scores are capped, which SDPA cannot do: all scores are held in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap) + mask
    return scores.softmax(-1).to(v.dtype) @ v


_plans = _Plans()


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """flash-attn's function of this name, as far as paged generation calls it (always causal, no rotary embedding)."""
    if not causal:
        raise NotImplementedError("paged attention without a causal mask")
    plan = _plans.get(
        cache_seqlens, block_table, k_cache.shape[1], q.shape[1], k is not None, tuple(window_size), q.dtype
    )
    return attend_pages(q, k_cache, v_cache, plan, k, v, softmax_scale=softmax_scale, softcap=softcap)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Never called by paged generation; ExLlamaV2 reads the names of its parameters to see what flash-attn can do."""
    raise NotImplementedError("attention outside of paged generation")


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Never called by paged generation."""
    raise NotImplementedError("attention outside of paged generation")


def is_installed() -> bool:
    """Whether ``flash_attn`` means the stand-in in this process."""
    return _installed


def install() -> None:
    """Put stand-ins for ``flash_attn`` and ``flash_attn_2_cuda`` into ``sys.modules``, replacing what is there."""
    global _installed
    _installed = True
    functions: tuple[Callable[..., torch.Tensor], ...] = (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    for name in [n for n in sys.modules if n == "flash_attn" or n.startswith("flash_attn.")]:
        del sys.modules[name]
    for name in ("flash_attn", "flash_attn_2_cuda"):
        module = types.ModuleType(name, "Stand-in: paged attention from PyTorch.")
        # a module without a spec makes importlib.util.find_spec raise, which other libraries call
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    stand_in: Any = sys.modules["flash_attn"]
    stand_in.__version__ = "2.5.7"  # the least that ExLlamaV2 takes for paged attention
    for function in functions:
        setattr(stand_in, function.__name__, function)
