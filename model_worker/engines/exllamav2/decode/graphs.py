"""CUDA graphs of ExLlamaV2's decode step: one for each number of rows, width of block table, and GPU.

A step of the package is some 400 launches from Python. A captured step is one launch, and computes the same kernels on
static tensors: ``StepInputs`` holds what changes, and ``logits`` receives the result.

What has to hold for a capture:

* The package's own small graphs are off (``config.no_graphs``): their captures would be nested in ours.
* EXL2's tuning is finished (``capture``), and each size has run before: kernels are loaded at first use.
* The kernel that plans attention runs inside the capture, so the plan must be made anew (``attention.forget_step``).
  The plan's tensors must live as long as the graph.
* Scratch memory that launches share keeps its address. ``capture`` begins with the largest size, so it does not grow.
* No garbage is collected meanwhile. Objects that wait for the collector may own memory or graphs of CUDA, which cannot
  be freed during a capture: PyTorch's destructors then abort the process.
"""

import contextlib
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from model_worker.engines.exllamav2.decode.buckets import fitting
from model_worker.engines.exllamav2.gpu_draws.batched import RowDraw, write_words
from model_worker.engines.exllamav2.gpu_draws.sizes import WORDS
from model_worker.engines.exllamav2.products.modules import OwnModules
from model_worker.engines.paged import attention

# What the host writes for a step: tokens, lengths and block tables, in pinned memory and on each GPU.


Array = np.ndarray[Any, Any]

PINNED_SETS = 3
"""Sets of pinned memory. A set is written again once the copy that reads it has run. At most two steps are queued, so
that never takes long."""
_ALIGNED = 4
"""int32 numbers to which parts are aligned: Triton launches fast with addresses that are multiples of 16 bytes."""


@dataclass
class StepRow:
    """One sequence of a step.

    tokens  the tokens whose logits are computed, in order; not read where ``source`` is not -1
    length  tokens of the sequence in the cache, before the step appends
    pages   int32: the numbers of its pages, in order, up to the last one that the step writes
    source  the row of the step before that draws the token; -1: the host knows it
    """

    tokens: Sequence[int]
    length: int
    pages: Array
    source: int = -1


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class StepInputs:
    """The inputs of a step with ``queries`` tokens for each of at most ``rows`` rows, on one or more GPUs.

    All of it is one block of int32 for each GPU: given tokens [rows * queries], sources [rows], lengths [rows], what
    the rows draw [rows, WORDS], and the block table [rows, width] of the step's own width. So a step is one copy.

    width  pages of the widest block table
    spare  a page that no sequence owns. Rows that fill up a step write there, and unused entries of tables hold it
    """

    def __init__(self, devices: Sequence[int], rows: int, queries: int, width: int, spare: int) -> None:
        self.rows, self.queries, self._spare = rows, queries, spare
        self._sources = _aligned(rows * queries)
        self._lengths = self._sources + _aligned(rows)
        self._words = self._lengths + _aligned(rows)
        self._table = self._words + rows * WORDS
        size = self._table + rows * width
        self._pinned = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(PINNED_SETS)]
        self._arrays = [tensor.numpy() for tensor in self._pinned]
        self._next = 0
        self._copied: list[list[Any]] = [[] for _ in range(PINNED_SETS)]  # events behind the copies of each set
        self.device = {index: torch.zeros(size, dtype=torch.int32, device=f"cuda:{index}") for index in devices}

    def given(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][: rows * self.queries]

    def sources(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][self._sources : self._sources + rows]

    def lengths(self, device: int, rows: int) -> torch.Tensor:
        return self.device[device][self._lengths : self._lengths + rows]

    def words(self, device: int) -> torch.Tensor:
        """Return what the rows draw, int32 [rows, WORDS] (``gpu_draws.kernels``)."""
        return self.device[device][self._words : self._table].view(self.rows, WORDS)

    def table(self, device: int, rows: int, width: int) -> torch.Tensor:
        return self.device[device][self._table : self._table + rows * width].view(rows, width)

    def write(self, step: Sequence[StepRow], draws: Sequence[RowDraw | None], rows: int, width: int) -> None:
        """Queue the copies of a step's inputs on the current streams. ``rows`` and ``width`` are those of the graph.

        draws  what each row draws; None, and rows without an element: nothing
        """
        block, pinned, copied = self._arrays[self._next], self._pinned[self._next], self._copied[self._next]
        self._next = (self._next + 1) % PINNED_SETS
        while copied:
            copied.pop().synchronize()
        queries, used = self.queries, len(step)
        end = self._table + rows * width
        table = block[self._table : end].reshape(rows, width)
        table.fill(self._spare)
        for number, row in enumerate(step):
            if row.source < 0:
                block[number * queries : (number + 1) * queries] = row.tokens
            table[number, : len(row.pages)] = row.pages
        block[self._sources : self._sources + rows] = -1
        block[self._sources : self._sources + used] = [row.source for row in step]
        block[self._lengths : self._lengths + rows] = 0
        block[self._lengths : self._lengths + used] = [row.length for row in step]
        block[used * queries : rows * queries] = 0
        write_words(block[self._words : self._words + rows * WORDS].reshape(rows, WORDS), draws)
        for index, tensor in self.device.items():
            tensor[:end].copy_(pinned[:end], non_blocking=True)
            copied.append(torch.cuda.current_stream(index).record_event())


# The package's parameters object of a step whose tables are static tensors on the GPU.


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


# The embedding in host memory, where the GPU can read it.


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


WARM_UPS = 3
"""Runs of a size before it is captured: Triton compiles at the first, launches another way from the second on."""
_BLOCK = 1024

Behind = Callable[[torch.Tensor, int], None]
"""Queues what belongs to a step behind its forward pass, from logits fp16 [rows, queries, padded vocabulary]. It is
captured, too. Arguments: (logits, rows)."""


class DecodeGraphs:
    """The captured steps of one model. All tensors live as long as this object.

    model, cache, loras  the package's; the cache has one page more than sequences use, which is ``spare``
    rows                 sizes to capture, ascending
    widths               widths of block tables to capture, in pages, ascending
    queries              tokens for each row
    head                 False: for prompts. The pass ends with the last keys and values, and there are no ``logits``
    pools                memory that the graphs share with other graphs, by GPU
    own                  the modules that are computed by products of ours; None: none
    drawn                int64 [rows] on the first GPU: where the step before has left its tokens
    """

    def __init__(
        self, model: Any, cache: Any, loras: Sequence[Any] | None, embedding: HostEmbedding, *,
        rows: Sequence[int], widths: Sequence[int], queries: int, spare: int, head: bool = True,
        pools: dict[int, Any] | None = None, own: OwnModules | None = None,
    ) -> None:  # fmt: skip
        self.own = own
        self._model, self._cache, self._loras, self.embedding = model, cache, loras or None, embedding
        self.rows, self.widths, self.queries, self.spare, self._head = list(rows), list(widths), queries, spare, head
        self._segments = _segments(model.modules[1:] if head else model.modules[1 : model.last_kv_layer_idx + 1])
        self.devices = [device for device, _ in self._segments]
        most, config = rows[-1], model.config
        first, last = self.devices[0], self.devices[-1]
        self.inputs = StepInputs(self.devices, most, queries, widths[-1], spare)
        archparams = model.modules[0].archparams
        self._hidden_type = torch.float if archparams.residual_stream_fp32 else torch.half
        self._scale = scale_of(model)
        shape = most, queries, config.hidden_size
        self._embedded = torch.zeros(shape, dtype=torch.half, device=f"cuda:{first}")
        self._hidden = {d: torch.zeros(shape, dtype=self._hidden_type, device=f"cuda:{d}") for d in self.devices[1:]}
        # What a GPU hands on to the next one: the copy is queued behind its graph, from a tensor with a fixed address.
        self._handed_on = {
            d: torch.zeros(shape, dtype=self._hidden_type, device=f"cuda:{d}") for d in self.devices[:-1]
        }
        self.drawn = torch.zeros(most, dtype=torch.long, device=f"cuda:{first}")
        padded = model.modules[-1].out_features if head else 0
        self.logits = torch.zeros((most, queries, padded), dtype=torch.half, device=f"cuda:{last}")
        # Not imported above: it needs Triton.
        self._kernels: Any = importlib.import_module("model_worker.engines.exllamav2.decode.graphs")
        self.pools = pools or {device: torch.cuda.graph_pool_handle() for device in self.devices}
        self._captured: dict[tuple[int, int], list[Any]] = {}
        self._alive: list[Any] = []
        self.behind: Behind | None = None

    def stream(self, device: int) -> Any:
        """Return the package's stream on a GPU. All work on the cache is queued there."""
        return self._model.get_device_context(device, scratch=False).stream

    def set_streams(self) -> None:
        """Make the package's streams the current ones of this thread. The last GPU is the current one afterwards."""
        for device in self.devices:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(self.stream(device))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return (rows, width) of all graphs, the largest first."""
        return [(rows, width) for rows in reversed(self.rows) for width in reversed(self.widths)]

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all sizes. ``progress`` gets (sizes done, sizes).

        All rows are padding: they write to the spare page.
        """
        for done, (rows, width) in enumerate(self.sizes):
            progress(done, len(self.sizes))
            self.inputs.write([], [], rows, width)
            self._captured[rows, width] = [
                self._capture_segment(number, rows, width) for number in range(len(self._segments))
            ]
        for device in self.devices:
            torch.cuda.synchronize(device)
        progress(len(self.sizes), len(self.sizes))

    def _capture_segment(self, number: int, rows: int, width: int) -> Any:
        device = self._segments[number][0]
        stream = self.stream(device)
        params = static_params(self.inputs, rows, width, device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            attention.forget_step(device)
            for _ in range(WARM_UPS):
                self._run(number, rows, params)
            torch.cuda.synchronize(device)
            attention.forget_step(device)
            graph = torch.cuda.CUDAGraph()
            with _garbage_waits():
                graph.capture_begin(pool=self.pools[device], capture_error_mode="thread_local")
                try:
                    self._run(number, rows, params)
                finally:
                    graph.capture_end()
            self._alive += [params, attention.forget_step(device)]
        return graph

    def _run(self, number: int, rows: int, params: Any) -> None:
        """Compute one GPU's layers on the static tensors."""
        device, modules = self._segments[number]
        hidden = self._embed(device, rows) if number == 0 else self._hidden[device][:rows]
        for module in self.own.of(modules, rows * self.queries) if self.own is not None else modules:
            hidden = module.forward(hidden, cache=self._cache, attn_params=params, past_len=0, loras=self._loras)
        if device in self._handed_on:
            self._handed_on[device][:rows].copy_(hidden)
            return
        if not self._head:
            return
        finish(self._model, hidden)
        self.logits[:rows].copy_(hidden)
        if self.behind is not None:
            self.behind(self.logits[:rows], rows)

    def _embed(self, device: int, rows: int) -> torch.Tensor:
        queries, size = self.queries, self._embedded.shape[2]
        self._kernels.embed[(rows * queries, -(-size // _BLOCK))](
            self.embedding.table, self.inputs.given(device, rows), self.inputs.sources(device, rows), self.drawn,
            self._embedded, QUERIES=queries, HIDDEN=size, BLOCK=_BLOCK,
        )  # fmt: skip
        hidden = self._embedded[:rows]
        # The layers add to their input in place.
        hidden = hidden.float() if self._hidden_type == torch.float else hidden.clone()
        if self._scale != 1.0:
            hidden *= self._scale
        return hidden

    def fits(self, rows: int, pages: int) -> bool:
        return fitting(self.rows, rows) is not None and fitting(self.widths, pages) is not None

    @torch.inference_mode()
    def replay(self, step: Sequence[StepRow], draws: Sequence[RowDraw | None] = ()) -> torch.Tensor:
        """Queue a step that ``fits``, and what its rows draw.

        Return its logits fp16 [rows, queries, padded vocabulary], on the last GPU. The next step overwrites them.
        """
        rows = fitting(self.rows, len(step))
        width = fitting(self.widths, max(len(row.pages) for row in step))
        assert rows is not None
        assert width is not None
        self.set_streams()
        self.inputs.write(step, draws, rows, width)
        for number, graph in enumerate(self._captured[rows, width]):
            device = self.devices[number]
            torch.cuda.set_device(device)
            if number:
                before = self.devices[number - 1]
                # PyTorch has both GPUs' current streams wait for each other.
                self._hidden[device][:rows].copy_(self._handed_on[before][:rows], non_blocking=True)
            graph.replay()
        return self.logits[: len(step)]


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """Keep the garbage collector off in all threads."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _segments(modules: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """Return (GPU, modules in order) for each GPU. ``modules`` begin behind the embedding, which is in host memory."""
    found: list[tuple[int, list[Any]]] = []
    for module in modules:
        if not found or module.device_idx not in (None, found[-1][0]):
            found.append((module.device_idx, []))
        found[-1][1].append(module)
    return found


def finish(model: Any, logits: torch.Tensor) -> None:
    """Do to the head's output what the package does behind its last module (model.py, forward_chunk)."""
    if model.config.final_logit_softcapping:
        _softcap(logits, model.config.final_logit_softcapping)
    padding = model.modules[-1].padding
    if padding > 0:
        logits[:, :, -padding:] = -65504.0


def _softcap(logits: torch.Tensor, cap: float) -> None:
    importlib.import_module("exllamav2.ext").ext_c.softcap_(logits, cap)


# The Triton kernel with which a captured step begins: it finds each row's token, and fetches its embedding.


# mypy: ignore-errors


@triton.jit
def embed(table, given, sources, drawn, out, QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the embedding of each row's token.

    table    fp16 [vocabulary, HIDDEN], in host memory that the GPU can read
    given    int32 [rows, QUERIES]: the tokens, if the host knows them
    sources  int32 [rows]: the row of the step before that drew the row's only token, or -1 for ``given``
    drawn    int64 [rows]: tokens that the step before has drawn
    out      fp16 [rows, QUERIES, HIDDEN]
    """
    row = tl.program_id(0)
    source = tl.load(sources + row // QUERIES)
    token = tl.load(given + row).to(tl.int64)
    if source >= 0:
        token = tl.maximum(tl.load(drawn + source), 0)  # below 0 where logits were not numbers; the host raises then
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HIDDEN
    tl.store(out + row * HIDDEN + at, tl.load(table + token * HIDDEN + at, mask=mask), mask=mask)
