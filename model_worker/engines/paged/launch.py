"""Attention over pages with the Triton kernels of ``kernels``: the decisions of the host, and the launches.

Nothing here waits for the device: a kernel plans, once per step, how keys are distributed over programs. A launch skips
Triton's look-ups for arguments, which take tens of microseconds per call, and calls the kernel compiled for this shape.
The compiled kernel expects tensors aligned to 16 bytes. Triton itself launches the kernel for other tensors.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import torch

# The data that all layers of a step share: the shape of its attention calls, its tables, and its attention.


# (q, k_cache, v_cache, k, v) -> out, with the shapes of Shape. The caches may be ForeignPages.
Attend = Callable[[torch.Tensor, Any, Any, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


class ForeignPages(Protocol):
    """Pages of a cache that are no tensors of numbers, and know how they are attended to."""

    @property
    def shape(self) -> torch.Size:
        """[pages, page_size, kv_heads, ...]"""

    def plan(self, step: "AttentionStep", shape: "AttentionShape", values: Any) -> Attend:
        """Return the attention of this shape for this step. ``values``: the pages of the values."""


@dataclass(frozen=True)
class AttentionShape:
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


class AttentionStep:
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

    def ends(self, shape: AttentionShape) -> torch.Tensor:
        """Return int32 [b]: the tokens in the pages after the step has appended."""
        return self.lengths + shape.q_len if shape.appends else self.lengths


MOST_SPLIT_QUERIES = 16
_LOG2_ITEMS = 13  # work items times sequences that one program of the planning kernel handles


@cache
def kernels() -> ModuleType | None:
    """Return the kernels; None without Triton, or with a Triton before 3.3 (of PyTorch 2.7), which launches
    differently."""
    try:
        triton = importlib.import_module("triton")
        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
            return None
        return importlib.import_module("model_worker.engines.paged.kernels")
    except ImportError:
        return None


@cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "y", "yes")


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of a kernel in rows (m) and keys (n); warps and pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _fitting(blocks: Blocks, shape: AttentionShape, device: torch.device) -> Blocks:
    """Reduce the stages, then the keys, until keys and values of all stages fit together with the queries."""
    dim, size = _power(shape.head_dim), shape.dtype.itemsize
    m, n, stages = blocks.m, min(blocks.n, shape.page_size), blocks.stages
    # Every second stage holds keys and values: pages are looked up in one stage and read in the next.
    while (2 * ((stages - 1) // 2 + 1) * n + m) * dim * size > _shared_memory(device) - 4096:
        if stages > 3:
            stages -= 2
        elif n > 16:
            n //= 2
        elif m > 16:
            m //= 2
        else:
            break
    return Blocks(m, n, blocks.warps, stages)


def split_blocks(shape: AttentionShape, device: torch.device) -> Blocks:
    rows = min(_power(shape.q_len * shape.group), 64)
    return _fitting(Blocks(rows, 64, 4, 5), shape, device)


def prompt_blocks(shape: AttentionShape, device: torch.device) -> Blocks:
    return _fitting(Blocks(64, 64 if shape.head_dim > 64 else 128, 4, 5), shape, device)


def most_parts(shape: AttentionShape, device: torch.device, tiles: int) -> int:
    """Return the most parts of a sequence for each key head: so many that one sequence gives each multiprocessor up to
    two programs. No other sequence changes that number, nor their count."""
    wanted = max(1, 2 * _multiprocessors(device) // (shape.kv_heads * tiles))
    return 1 << (wanted.bit_length() - 1)


class _Scratch:
    """Memory that all launches of one device share, because they run one after another on its stream."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, str], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def get(self, device: torch.device, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        found = self._kept.get((device, name))
        if found is None or found.numel() < count:
            if found is not None:
                self._outgrown.append(found)  # a captured graph may hold its address
            # Only the counters depend on the initial zeros, and every use leaves them at zero.
            found = self._kept[device, name] = torch.zeros(count, dtype=dtype, device=device)
        return found


_scratch = _Scratch()
_compiled: dict[tuple[object, ...], Any] = {}


class _Launch:
    """A kernel with all its arguments except the tensors that differ between layers, which come first.

    shared   tensors of the whole step, which are kept alive here
    scalars  numbers
    meta     the kernel's constants in their order, num_warps, num_stages
    """

    def __init__(
        self,
        kernel: Any,
        shape: AttentionShape,
        grid: tuple[int, int, int],
        shared: tuple[torch.Tensor, ...],
        scalars: tuple[float, ...],
        **meta: int,
    ) -> None:
        options = {name: meta.pop(name) for name in ("num_warps", "num_stages") if name in meta}
        self._kernel, self._grid, self._options = kernel, grid, options
        self._rest = (*shared, *scalars, *meta.values())
        addresses = [t.data_ptr() for t in shared]
        self._fast_rest = (*addresses, *scalars, *meta.values())
        self._key = (kernel.__name__, shared[0].device, shape.dtype, tuple(meta.values()), tuple(options.values()))
        self._aligned = not any(address & 15 for address in addresses) and not _interpreted()
        found = _compiled.get(self._key) if self._aligned else None
        self._fast = found[grid] if found is not None else None

    def __call__(self, *own: torch.Tensor) -> None:
        if self._fast is not None:
            addresses = [t.data_ptr() for t in own]
            together = 0
            for address in addresses:
                together |= address
            if not together & 15:
                self._fast(*addresses, *self._fast_rest)
                return
        compiled = self._kernel[self._grid](*own, *self._rest, **self._options)
        if self._aligned and not any(t.data_ptr() & 15 for t in own):
            _compiled[self._key] = compiled
            self._fast = compiled[self._grid]


def plan(step: AttentionStep, shape: AttentionShape) -> Attend | None:
    """Return the attention of this shape for this step; None if the kernels cannot compute it."""
    found, device = kernels(), step.table.device
    if found is None or shape.head_dim > 256 or shape.page_size % 16 or shape.page_size & (shape.page_size - 1):
        return None
    if step.lengths.dtype != torch.int32 or step.table.dtype != torch.int32 or step.table.stride(1) != 1:
        return None
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0) or shape.dtype not in (torch.float16, torch.bfloat16):
            return None
    elif not _interpreted():
        return None
    make = _plan_split if shape.q_len <= MOST_SPLIT_QUERIES else _plan_prompt
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return make(found, step, shape)
    with torch.cuda.device(device):  # kernels run on the current device, and ExLlamaV2 leaves that at the first
        attend = make(found, step, shape)

    def on_its_device(*tensors: Any) -> torch.Tensor:
        with torch.cuda.device(device):
            return attend(*tensors)

    return on_its_device


class SplitPlan:
    """How the keys of a step's sequences are divided for few queries, and memory for parts of results.

    tile  rows (query heads times queries) of a tile
    keys  keys that a kernel reads at once: parts begin at multiples

    tables       the lengths and the block table of the step
    work         int32 [items, 8], see ``kernels``, filled by a kernel that is queued here
    items        the most items that there may be
    parts_rows   rows of a tile that parts have
    sums         fp32 [items, kv_heads, tiles, parts_rows, power of two >= head_dim]; tops, totals without the last
    done         int32 [batch, kv_heads, tiles], zero before and after each layer
    """

    def __init__(self, step: AttentionStep, shape: AttentionShape, tile: int, keys: int) -> None:
        found: Any = kernels()
        device, batch = step.table.device, shape.batch
        self.tables = step.lengths, step.table
        self.tiles = -(-shape.q_len * shape.group // tile)
        parts = most_parts(shape, device, self.tiles)
        # A sequence has no more parts than its pages can fill.
        width = step.table.shape[1] * shape.page_size
        self.items = batch * max(1, min(parts, -(-width // int(found.LEAST_KEYS.value))))
        self.work = torch.empty(self.items * 8, dtype=torch.int32, device=device)
        rows = _power(batch)
        at_once = max(1, min(_power(self.items), (1 << _LOG2_ITEMS) // rows))
        _Launch(
            found.schedule, shape, (-(-self.items // at_once), 1, 1),
            (step.lengths, self.work), (batch, shape.q_len, shape.window, parts, self.items),
            APPENDS=shape.appends, WINDOWED=shape.window >= 0, BLOCK_B=rows, BLOCK_N=keys, ITEMS=at_once, num_warps=4,
        )()  # fmt: skip
        self.parts_rows = min(tile, _power(shape.q_len * shape.group, 1))
        cells = self.items * shape.kv_heads * self.tiles * self.parts_rows
        self.sums = _scratch.get(device, "acc", cells * _power(shape.head_dim), torch.float32)
        self.tops = _scratch.get(device, "top", cells, torch.float32)
        self.totals = _scratch.get(device, "total", cells, torch.float32)
        self.done = _scratch.get(device, "done", batch * shape.kv_heads * self.tiles, torch.int32)
        # Four programs for each multiprocessor share the items.
        together = -(-4 * _multiprocessors(device) // (shape.kv_heads * self.tiles))
        self.grid = max(1, min(self.items, together)), shape.kv_heads, self.tiles


def _plan_split(found: Any, step: AttentionStep, shape: AttentionShape) -> Attend:
    blocks = split_blocks(shape, step.table.device)
    plan, dim = SplitPlan(step, shape, blocks.m, blocks.n), _power(shape.head_dim)
    launch = _Launch(
        found.split, shape, plan.grid,
        (step.table, step.lengths, plan.work, plan.sums, plan.tops, plan.totals, plan.done),
        (shape.q_len, step.table.stride(0), shape.window, shape.scale, shape.softcap),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, DIM=shape.head_dim, PAGE=shape.page_size,
        APPENDS=shape.appends, WINDOWED=shape.window >= 0, CAPPED=shape.softcap != 0,
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_D=dim, BLOCK_NEW=_power(shape.q_len),
        MERGE_ROWS=plan.parts_rows, MERGE_PARTS=max(1, 8192 // (plan.parts_rows * dim)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        launch(q, k_cache, v_cache, q if k is None else k, q if v is None else v, out)
        return out

    return attend


def _plan_prompt(found: Any, step: AttentionStep, shape: AttentionShape) -> Attend:
    device = step.table.device
    blocks = prompt_blocks(shape, device)
    tiles = -(-shape.q_len * shape.group // blocks.m)
    launch = _Launch(
        found.prompt, shape, (shape.kv_heads * shape.batch, tiles, 1), (step.table, step.lengths),
        (shape.q_len, step.table.stride(0), shape.window, shape.scale, shape.softcap),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, DIM=shape.head_dim, PAGE=shape.page_size,
        APPENDS=shape.appends, WINDOWED=shape.window >= 0, CAPPED=shape.softcap != 0,
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_D=_power(shape.head_dim),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    numbers = shape.kv_heads * shape.head_dim
    append = _Launch(
        found.append, shape, (shape.q_len, shape.batch, 1), (step.table, step.lengths),
        (shape.q_len, step.table.stride(0)),
        WIDTH=numbers, PAGE=shape.page_size, BLOCK_W=_power(numbers), num_warps=4,
    )  # fmt: skip

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        if k is not None and v is not None:
            append(k_cache, v_cache, k, v)
        out = torch.empty_like(q)
        launch(q, k_cache, v_cache, out)
        return out

    return attend
