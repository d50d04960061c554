"""Quantised caches without the package's copies: captured steps read the pages where they lie, and append to them.

For each layer and step the package makes fp16 tensors of the whole past, and quantises the new tokens afterwards. Its
kernels store 512 numbers at a time. Where a token has fewer (Qwen2.5 up to 3B, SmolLM2), older tokens are quantised
again, from what they have become, at every step: their error grows 3 to 5 times. ``store_once`` ends that, also where
prompts are read.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from model_worker.engines.exllamav2.decode.buckets import reads_in_place
from model_worker.engines.exllamav2.nvrtc import Module, NoKernelsError
from model_worker.engines.paged.attention import flash_attn_with_kvcache
from model_worker.engines.paged.launch import (
    MOST_SPLIT_QUERIES,
    Attend,
    AttentionShape,
    AttentionStep,
    SplitPlan,
)
from protocol.process.worker_spec import PAGE_TOKENS

_MOST_DIFFERENCE = 2e-2
"""Of attention over random numbers, as in ``paged.attention.check``: both round to fp16, in other places."""
_SOURCE = Path(__file__).with_name("quantised_pages.cu")
_WARPS, _TILE, _KEYS = 4, 16, 64


class _Attention(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q", "k", "v", "k_scales", "v_scales", "k_new", "v_new", "out", "table", "lengths", "work", "sums",
                "tops", "totals", "done",
            )
        ),
        *((name, ctypes.c_int) for name in ("queries", "pitch", "window", "kv_heads", "group", "parts_rows")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]  # fmt: skip


class _Quantise(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("k", "v", "k_pages", "v_pages", "k_scales", "v_scales", "table", "lengths")
        ),
        *((name, ctypes.c_int) for name in ("queries", "pitch", "kv_heads")),
    ]


@cache
def _kernels(device: int, head_dim: int, key_bits: int, value_bits: int) -> Module:
    """Raises NoKernelsError."""
    return Module(_SOURCE.read_text(), [f"DIM={head_dim}", f"KB={key_bits}", f"VB={value_bits}"], device)


def _shared(head_dim: int, rows: int) -> int:
    """Return the bytes of shared memory of ``attend``, if its tile has as many rows: the warps' sums, fp32; turned
    queries, and new keys and values, fp16."""
    return _WARPS * rows * (head_dim + 8) * 4 + _TILE * head_dim * 3 * 2


@dataclass(frozen=True)
class QuantisedPages:
    """The keys, or the values, of a layer (``paged.launch.ForeignPages``).

    levels  uint8 [pages, page_size, kv_heads, head_dim * bits / 8]
    scales  fp16, one for each 32 numbers

    The package's attention passes on what ``view`` returns of a cache's tensors. So this can take their place.
    """

    levels: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    def view(self, *size: int) -> "QuantisedPages":
        return QuantisedPages(self.levels.view(*size), self.scales)

    def bits(self, head_dim: int) -> int:
        return self.levels.shape[-1] * 8 // head_dim

    def plan(self, step: AttentionStep, shape: AttentionShape, values: "QuantisedPages") -> Attend:
        """Return the attention of at most MOST_SPLIT_QUERIES queries that appends. Raises NoKernelsError."""
        device, head_dim = step.table.device, shape.head_dim
        kernels = _kernels(device.index, head_dim, self.bits(head_dim), values.bits(head_dim))
        with torch.cuda.device(device):
            plan = SplitPlan(step, shape, _TILE, _KEYS)
        shared = _shared(head_dim, plan.parts_rows)
        function = kernels.function("attend", _shared(head_dim, _TILE))
        given = _Attention(
            table=step.table.data_ptr(), lengths=step.lengths.data_ptr(), work=plan.work.data_ptr(),
            sums=plan.sums.data_ptr(), tops=plan.tops.data_ptr(), totals=plan.totals.data_ptr(),
            done=plan.done.data_ptr(), queries=shape.q_len, pitch=step.table.stride(0), window=shape.window,
            kv_heads=shape.kv_heads, group=shape.group, parts_rows=plan.parts_rows, scale=shape.scale,
            softcap=shape.softcap,
        )  # fmt: skip

        def attend(
            q: torch.Tensor,
            k_cache: QuantisedPages,
            v_cache: QuantisedPages,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
        ) -> torch.Tensor:
            assert k is not None
            assert v is not None
            out = torch.empty_like(q)
            # ``plan`` owns the memory to which ``given`` points.
            given.q, given.k_new, given.v_new, given.out = (tensor.data_ptr() for tensor in (q, k, v, out))
            given.k, given.k_scales = k_cache.levels.data_ptr(), k_cache.scales.data_ptr()
            given.v, given.v_scales = v_cache.levels.data_ptr(), v_cache.scales.data_ptr()
            with torch.cuda.device(device):
                kernels.launch(function, plan.grid, 32 * _WARPS, shared, given)
            return out

        return attend


Pages = tuple[QuantisedPages, QuantisedPages]


def quantise(
    given: tuple[torch.Tensor, torch.Tensor], pages: Pages, lengths: torch.Tensor, table: torch.Tensor, tokens: int
) -> None:
    """Quantise ``tokens`` tokens behind the first ``lengths`` of each sequence, and no others. Raises NoKernelsError.

    given    keys and values, fp16 [..., kv_heads, head_dim]: pages with these tokens, as many as the cache has
    lengths  int32 [b]
    table    int32 [b, pages]
    """
    kv_heads, head_dim = given[0].shape[-2:]
    kernels = _kernels(table.device.index, head_dim, pages[0].bits(head_dim), pages[1].bits(head_dim))
    arguments = _Quantise(
        *(tensor.data_ptr() for tensor in given), *(each.levels.data_ptr() for each in pages),
        *(each.scales.data_ptr() for each in pages), table.data_ptr(), lengths.data_ptr(), tokens, table.stride(0),
        kv_heads,
    )  # fmt: skip
    with torch.cuda.device(table.device):
        grid = -(-tokens // _WARPS), kv_heads, len(lengths)
        kernels.launch(kernels.function("quantise"), grid, 32 * _WARPS, 0, arguments)


def is_quantised(package_cache: Any) -> bool:
    return bool(getattr(package_cache, "has_scales", False))


def _pages(package_cache: Any, layer: int) -> Pages:
    return (
        QuantisedPages(package_cache.key_states[layer], package_cache.key_scales[layer]),
        QuantisedPages(package_cache.value_states[layer], package_cache.value_scales[layer]),
    )


def _devices(package_cache: Any) -> list[torch.device]:
    return sorted({tensor.device for tensor in package_cache.key_states}, key=str)


def _bits(package_cache: Any) -> tuple[int, int]:
    keys, values = _pages(package_cache, 0)
    return keys.bits(package_cache.head_dim), values.bits(package_cache.head_dim)


def store_once(package_cache: Any) -> None:
    """Let a quantised cache of the package store each token once, if this can be.

    package_cache  not divided by tensor parallelism
    """
    original = package_cache.store_kv_state
    if not reads_in_place(package_cache.head_dim):
        return
    try:
        for device in _devices(package_cache):
            _kernels(device.index, package_cache.head_dim, *_bits(package_cache))
    except NoKernelsError:
        return

    def store_kv_state(
        layer_idx: int, batch_size: int, offset: int, width: int,
        page_size: int = 0, cache_seqlens: Any = None, block_table: Any = None,
    ) -> None:  # fmt: skip
        if not page_size:
            original(layer_idx, batch_size, offset, width)
        elif width:
            restored = package_cache.get_kv_state(layer_idx, batch_size, 0, 0)
            quantise(restored, _pages(package_cache, layer_idx), cache_seqlens, block_table, width)

    package_cache.store_kv_state = store_kv_state


class _InPlace:
    """Stands in the place of a quantised cache in captured steps, whose attention appends to the pages itself."""

    q_block = 1

    def __init__(self, package_cache: Any) -> None:
        self._cache = package_cache

    def get_kv_state(self, layer: int, *_: Any) -> Pages:
        return _pages(self._cache, layer)

    def store_kv_state(self, *_: Any) -> None:
        pass


@torch.inference_mode()
def in_place(package_cache: Any, heads: int, queries: int) -> tuple[Any | None, str]:
    """Return what captured steps use as the cache, and "". Or None, and why the package copies this cache.

    heads    query heads of the model
    queries  tokens of a step for each row

    Tries it on each GPU, and compares with what the package restores.
    """
    if not is_quantised(package_cache):
        return None, ""
    if not reads_in_place(package_cache.head_dim):
        return None, f"its heads have {package_cache.head_dim} numbers"
    if queries > MOST_SPLIT_QUERIES:
        return None, f"a step has {queries} tokens for each answer"
    made = _InPlace(package_cache)
    try:
        difference = max(_difference(package_cache, made, heads, device) for device in _devices(package_cache))
    except NoKernelsError as e:
        return None, str(e)
    if not difference < _MOST_DIFFERENCE:
        return None, f"attention to what the package restores differs by {difference:.1e}"
    return made, ""


def _difference(package_cache: Any, made: _InPlace, heads: int, device: torch.device) -> float:
    """Return the largest difference of attention over the restored and the quantised pages of some tokens."""
    layer = next(number for number, tensor in enumerate(package_cache.key_states) if tensor.device == device)
    slots, kv_heads = package_cache.key_states[layer].shape[1:3]
    head_dim = package_cache.head_dim
    past = min(700, slots - 1)
    options: dict[str, Any] = {"device": device, "dtype": torch.int32}
    table = torch.arange(past // PAGE_TOKENS + 1, **options).flip(0)[None]
    lengths, none = torch.tensor([past], **options), torch.tensor([0], **options)
    q = torch.randn(1, 1, heads, head_dim, dtype=torch.half, device=device)
    k, v = torch.randn(2, 1, 1, kv_heads, head_dim, dtype=torch.half, device=device)
    restored = package_cache.get_kv_state(layer, 1, 0, 0)
    for tensor in restored:
        tensor.normal_()
    pages = _pages(package_cache, layer)
    quantise(restored, pages, none, table, past)
    package_cache.get_kv_state(layer, 1, 0, past, PAGE_TOKENS, lengths, table)
    shape = slots // PAGE_TOKENS, PAGE_TOKENS, kv_heads
    found = [
        flash_attn_with_kvcache(
            q,
            keys.view(*shape, keys.shape[-1]),
            values.view(*shape, values.shape[-1]),
            k,
            v,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
        )
        for keys, values in (restored, made.get_kv_state(layer))
    ]
    for tensor in (*restored, *(tensor for each in pages for tensor in (each.levels, each.scales))):
        tensor.zero_()
    return float((found[0] - found[1]).abs().max())
