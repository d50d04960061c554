"""Paged attention for ExLlamaV2 without flash-attn: replacements for the modules of flash-attn.

ExLlamaV2 batches only if flash-attn is there. It asks that package for a version, two signatures and one function that
computes: ``flash_attn_with_kvcache`` over pages of 256 tokens (tensor parallel: ``flash_attn_2_cuda.fwd_kvcache``).
Without flash-attn, ExLlamaV2's own fallback takes one request at a time, and does not mask the future while it reads a
prompt. ``install`` puts modules of these names in place. It must be called before exllamav2 is imported.

For each kind of call, the first entry of ``WAYS`` that can compute it is chosen. ``check`` compares the chosen ways on
a device with plain SDPA, and leaves out ways that fail or differ. ``describe`` returns which ways are used.
"""

import importlib.machinery
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from model_worker.engines.paged import launch as paged_triton
from model_worker.engines.paged.launch import Attend, AttentionShape, AttentionStep, ForeignPages

# Attention over pages with ``scaled_dot_product_attention`` alone. It works on every device and is the reference.
#
# The pages of each sequence are gathered into one tensor and attended under a mask.


class Slots:
    """The places of new keys and of all keys in the cache.

    pages      int64 [b, pages], page numbers of each sequence
    slots      int64 [b * q_len], indices of the queries' own tokens among all tokens of the cache
    positions  int64 [b, q_len], positions of the queries in their sequences
    """

    def __init__(self, step: AttentionStep, shape: AttentionShape) -> None:
        table, q_len, page_size = step.table, shape.q_len, shape.page_size
        self.positions = step.ends(shape).long()[:, None] - q_len + torch.arange(q_len, device=table.device)
        self.pages = table.long()
        page = self.pages.gather(1, self.positions.div(page_size, rounding_mode="floor"))
        self.slots = (page * page_size + self.positions % page_size).flatten()

    def append(self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k_cache.flatten(0, 1)[self.slots] = k.flatten(0, 1)
        v_cache.flatten(0, 1)[self.slots] = v.flatten(0, 1)


def plan(step: AttentionStep, shape: AttentionShape) -> Attend:
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
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, shape: AttentionShape
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


# Attention over pages with PyTorch's own flash attention: from torch 2.12 on over the pages in place, else gathered.
#
# It needs an Ampere GPU or later, 16-bit numbers, and a head_dim of up to 256 in steps of 8. It supports windows, but
# no soft-capping.


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


def _fits(shape: AttentionShape, device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and shape.dtype in (torch.float16, torch.bfloat16)
        and shape.head_dim % 8 == 0
        and shape.head_dim <= 256
        and not shape.softcap
    )


def plan_in_place(step: AttentionStep, shape: AttentionShape) -> Attend | None:
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


def plan_gathered(step: AttentionStep, shape: AttentionShape) -> Attend | None:
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


NAME = "paged attention of PyTorch and Triton, without flash-attn"
SDPA = "PyTorch SDPA over gathered pages"


@dataclass(frozen=True)
class AttentionPath:
    """One way of computing attention. ``plan`` returns None for a shape that the way cannot compute."""

    name: str
    plan: Callable[[AttentionStep, AttentionShape], Attend | None]


WAYS = (
    AttentionPath("Triton kernels that read the pages in place", paged_triton.plan),
    AttentionPath("PyTorch varlen_attn over the pages in place", plan_in_place),
    AttentionPath("PyTorch flash attention over gathered pages", plan_gathered),
    AttentionPath(SDPA, plan),  # computes every shape on every device
)

_installed = False
_steps: dict[torch.device, AttentionStep] = {}  # the latest step of each device
_left_out: dict[torch.device, dict[str, str]] = {}  # by name of a way: why it is not used
_found: dict[torch.device, tuple[str, str]] = {}  # names of the checked ways for decoding and for prompts


def choose(step: AttentionStep, shape: AttentionShape) -> tuple[str, Attend]:
    """Return the name of the way for this shape on this device, and its attention for this step."""
    left_out = _left_out.get(step.table.device, {})
    for way in WAYS:
        if way.name not in left_out and (attend := way.plan(step, shape)) is not None:
            return way.name, attend
    raise AssertionError("SDPA does every shape")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor | ForeignPages,
    v_cache: torch.Tensor | ForeignPages,
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
    """Compute flash-attn's function of this name, as far as paged generation needs it.

    Shapes are those of ``launch.Shape``. softmax_scale is head_dim ** -0.5 by default. There is no rotary embedding.
    Captured steps pass foreign pages, too. Raises NotImplementedError unless causal.
    """
    device = q.device
    step = _steps.get(device)
    if step is None or not step.is_of(cache_seqlens, block_table):
        step = _steps[device] = AttentionStep(cache_seqlens, block_table)
    key = (q.shape, type(k_cache), k_cache.shape, v_cache.shape, k is None, causal, softmax_scale, window_size, softcap)
    attend = step.calls.get(key)
    if attend is None:
        if not causal:
            raise NotImplementedError("paged attention without a causal mask")
        batch, q_len, heads, head_dim = q.shape
        window = window_size[0]
        shape = AttentionShape(
            batch=batch,
            q_len=q_len,
            heads=heads,
            kv_heads=k_cache.shape[2],
            head_dim=head_dim,
            page_size=k_cache.shape[1],
            appends=k is not None,
            window=window if window < block_table.shape[1] * k_cache.shape[1] else -1,
            scale=float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
            softcap=float(softcap),
            dtype=q.dtype,
        )
        attend = choose(step, shape)[1] if isinstance(k_cache, torch.Tensor) else k_cache.plan(step, shape, v_cache)
        step.calls[key] = attend
    if not q.is_contiguous():
        q = q.contiguous()
    if k is not None and v is not None and not (k.is_contiguous() and v.is_contiguous()):
        k, v = k.contiguous(), v.contiguous()
    return attend(q, k_cache, v_cache, k, v)


def forget_step(device: int) -> AttentionStep | None:
    """Forget the latest step of a GPU, so that the next call plans anew. Return the step, which owns its tensors.

    A step is recognised by its tensors, not by their contents. A capture has to record the plan's kernel, and its
    static tensors must not be taken for those of a step before.
    """
    return _steps.pop(torch.device("cuda", device), None)


def fwd_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    rotary_cos: None,
    rotary_sin: None,
    cache_batch_idx: None,
    cache_leftpad: None,
    block_table: torch.Tensor,
    alibi_slopes: None,
    out: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    *_: Any,
) -> None:
    """Compute ``flash_attn_2_cuda.fwd_kvcache`` as ExLlamaV2's tensor parallel attention calls it. Write the result
    into ``out``."""
    out.copy_(
        flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v,
            cache_seqlens=cache_seqlens, block_table=block_table, softmax_scale=softmax_scale, causal=causal,
            window_size=(window_left, window_right), softcap=softcap,
        )
    )  # fmt: skip


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
    """Raise NotImplementedError, since paged generation never calls this.

    ExLlamaV2 reads the names of the parameters to see what flash-attn can do.
    """
    raise NotImplementedError("attention outside of paged generation")


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Raise NotImplementedError, since paged generation never calls this. ExLlamaV2 imports it."""
    raise NotImplementedError("attention outside of paged generation")


def check(
    device: torch.device,
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    window: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float16,
) -> str:
    """Compare the ways that a model of this shape would use on ``device`` with SDPA, on random pages.

    A way that cannot be compiled, or gives another result, is not used from then on. The returned text is that of
    ``describe``, and names such a way. The first call compiles kernels for decoding and prompts, which takes seconds.
    """
    shape = AttentionShape(3, 1, heads, kv_heads, head_dim, 256, True, window, head_dim**-0.5, softcap, dtype)
    names = []
    with torch.inference_mode():
        for q_len, batch, appends in ((1, 3, True), (1, 1, False), (5, 2, True), (300, 1, False)):
            names.append(_check(device, replace(shape, q_len=q_len, batch=batch, appends=appends)))
    _found[device] = names[0], names[-1]
    return describe(device)


def _check(device: torch.device, shape: AttentionShape) -> str:
    """Return the name of the first way with the same result as SDPA."""
    generator = torch.Generator(device).manual_seed(shape.q_len)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    past = torch.tensor([700, 3, 255][: shape.batch], dtype=torch.int32, device=device)
    pages = 5
    table = torch.randperm(shape.batch * pages, generator=generator, device=device).int().view(shape.batch, pages)
    lengths = past if shape.appends else past + shape.q_len
    caches = [
        torch.randn(shape.batch * pages, 256, shape.kv_heads, shape.head_dim, **options).to(shape.dtype)
        for _ in range(2)
    ]
    q = torch.randn(shape.batch, shape.q_len, shape.heads, shape.head_dim, **options).to(shape.dtype)
    new = [
        torch.randn(shape.batch, shape.q_len, shape.kv_heads, shape.head_dim, **options).to(shape.dtype)
        if shape.appends
        else None
        for _ in range(2)
    ]
    plain = [c.clone() for c in caches]
    expected = plan(AttentionStep(lengths, table), shape)(q, plain[0], plain[1], new[0], new[1])
    left_out = _left_out.setdefault(device, {})
    while True:
        name, reason = "", ""
        mine = [c.clone() for c in caches]
        step = AttentionStep(lengths, table)
        for way in WAYS:
            if way.name in left_out:
                continue
            name = way.name
            if name == SDPA:
                return name
            try:
                attend = way.plan(step, shape)
                if attend is None:
                    continue
                for _ in range(2):  # the second call of a kernel takes another path than the first
                    out = attend(q, mine[0], mine[1], new[0], new[1])
                error = float((out.float() - expected.float()).abs().max())
                written = all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
                if written and error < 2e-2 and math.isfinite(error):
                    return name
                reason = f"differs from SDPA by {error:.1e}" if written else "writes other pages than SDPA"
            except Exception as e:  # a compiler may raise anything
                reason = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
            break
        left_out[name] = reason


def describe(device: torch.device | None = None) -> str:
    """Return, for people, which ways compute attention on a device. The default is the first device that was
    checked."""
    if device is None:
        device = next(iter(_found), None)
    if device is None or device not in _found:
        return NAME
    decoding, prompts = _found[device]
    text = f"paged: {decoding}" if decoding == prompts else f"paged: {decoding} for decoding, {prompts} for prompts"
    return text + "".join(f"; not {name}: {why}" for name, why in _left_out.get(device, {}).items())


def is_installed() -> bool:
    """Return whether ``flash_attn`` means this module's replacement in this process."""
    return _installed


def install() -> None:
    """Put replacements for ``flash_attn`` and ``flash_attn_2_cuda`` into ``sys.modules``, whatever is there."""
    global _installed
    _installed = True
    for name in [n for n in sys.modules if n == "flash_attn" or n.startswith("flash_attn.")]:
        del sys.modules[name]
    for name in ("flash_attn", "flash_attn_2_cuda"):
        module = types.ModuleType(name, "Stand-in: paged attention without flash-attn.")
        # Other libraries call importlib.util.find_spec, which raises for a module without a spec.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    stand_in: Any = sys.modules["flash_attn"]
    stand_in.__version__ = "2.5.7"  # the lowest version that ExLlamaV2 accepts for paged attention
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(stand_in, function.__name__, function)
    extension: Any = sys.modules["flash_attn_2_cuda"]
    extension.fwd_kvcache = fwd_kvcache
