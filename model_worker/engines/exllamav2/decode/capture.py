"""Make the captured decode steps of a loaded model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_worker.engine import DrawnToken, ProgressCallback
from model_worker.engines.exllamav2.check import MIXTURE, most_rows, obstacle
from model_worker.engines.exllamav2.decode.buckets import (
    FEWEST_KERNEL_ROWS,
    KERNEL_ROWS,
    PASSES,
    WIDE,
    page_sizes,
    row_sizes,
)
from model_worker.engines.exllamav2.decode.graphs import (
    PINNED_SETS,
    DecodeGraphs,
    HostEmbedding,
    NotReadableError,
    StepRow,
)
from model_worker.engines.exllamav2.decode.loop import ChunkSizer, Computed, DecodeLoop
from model_worker.engines.exllamav2.gpu_draws.batched import BatchedDraws, RowTables
from model_worker.engines.exllamav2.load import Loaded
from model_worker.engines.exllamav2.products.modules import OwnModules
from model_worker.engines.exllamav2.quantised_cache import in_place, is_quantised
from protocol.process.worker_spec import PAGE_TOKENS

# Queue captured steps, draw behind them, and read the tokens when an event says that they are there.


@dataclass
class _Queued:
    """A step on the GPU: its event, and pinned memory that holds its result once the event has passed.

    shown  for each row with log-probabilities: (row, number of likeliest tokens to report)
    """

    event: Any
    drawn: torch.Tensor
    logits: torch.Tensor | None
    shown: list[tuple[int, int]]
    logprobs: tuple[torch.Tensor, ...] = ()


class DeviceSteps:
    """``loop.Steps`` on GPUs."""

    def __init__(self, graphs: DecodeGraphs, drawable: int) -> None:
        self._graphs, self._drawable = graphs, drawable
        most, padded = graphs.rows[-1], graphs.logits.shape[-1]
        self._first, self._last = graphs.devices[0], graphs.devices[-1]
        same = self._first == self._last
        self._draws = BatchedDraws(
            most,
            padded,
            drawable,
            graphs.logits.device,
            words=graphs.inputs.words(self._last),
            drawn=graphs.drawn if same else None,
        )
        self._tables = RowTables(self._draws)
        self._drawn = [torch.zeros(most, dtype=torch.long).pin_memory() for _ in range(PINNED_SETS)]
        self._next = 0
        graphs.behind = lambda logits, rows: self._draws.launch(logits, rows)

    def fits(self, rows: int, pages: int) -> bool:
        return self._graphs.fits(rows, pages)

    @torch.inference_mode()
    def queue(
        self, rows: Sequence[StepRow], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> _Queued:
        graphs = self._graphs
        graphs.set_streams()
        out = graphs.replay(rows, self._tables.step(jobs, places, [row.length for row in rows]))
        if self._first != self._last:
            # PyTorch has both GPUs' streams wait for each other.
            graphs.drawn[: len(rows)].copy_(self._draws.drawn[: len(rows)], non_blocking=True)
        shown = [(number, job.top) for number, job in enumerate(jobs) if job is not None and job.top is not None]
        queued = _Queued(
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
            self._drawn[self._next][: len(rows)],
            _to_host(out[list(logits)].float()) if logits else None,
            shown,
        )
        self._next = (self._next + 1) % PINNED_SETS
        if shown:
            queued.logprobs = self._logprobs(out, [number for number, _ in shown], max(top for _, top in shown))
        queued.drawn.copy_(self._draws.drawn[: len(rows)], non_blocking=True)
        queued.event.record(graphs.stream(self._last))
        return queued

    def _logprobs(self, out: torch.Tensor, numbers: list[int], top: int) -> tuple[torch.Tensor, ...]:
        """Queue the log-probabilities of the drawn tokens, and the likeliest tokens, of some rows."""
        raw = out[numbers, 0, : self._drawable].float()
        totals = raw.logsumexp(-1, keepdim=True)
        drawn = self._draws.drawn[numbers].clamp(min=0)
        values, ids = (raw - totals).topk(min(max(top, 1), self._drawable), -1)
        return _to_host(raw.gather(1, drawn[:, None]) - totals), _to_host(values), _to_host(ids)

    def read(self, queued: _Queued) -> Computed:
        queued.event.synchronize()
        computed = Computed(queued.drawn.numpy(), queued.logits)
        if queued.shown:
            own, values, ids = (tensor.tolist() for tensor in queued.logprobs)
            for at, (number, top) in enumerate(queued.shown):
                likeliest = tuple(zip(ids[at][:top], values[at][:top], strict=True))
                computed.logprobs[number] = DrawnToken(int(queued.drawn[number]), own[at][0], likeliest)
        return computed


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy into pinned memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


# Read prompts by captured passes.
#
# A pass over 256 tokens of an 8B model is 400 launches, which take the host about as long as the GPU takes to compute
# them. Besides, the package copies the block table and the embedded tokens so that the host waits for all steps queued
# before. A captured pass is one launch and waits for nothing, so it goes behind a step while running answers go on.
#
# A pass has a fixed number of tokens. A shorter piece of a prompt is filled up with tokens whose keys and values land
# behind the prompt's own, in the prompt's last page or in the spare page. No token attends to them: they are
# overwritten before the sequence reaches their places.


MOST_PIECES = 2
"""A prompt's tokens are read by captured passes alone if they are no more than so many of the largest. More tokens are
computed faster in one pass of single launches, which take the host less time than the GPU."""


class PromptPasses:
    """The captured passes of one model.

    passes     by tokens, ascending; without heads, for one row
    positions  the model's positions: the rotary embedding of a pass must not reach beyond
    """

    def __init__(self, passes: Sequence[DecodeGraphs], positions: int) -> None:
        self._passes, self._positions = list(passes), positions
        self._largest = self._passes[-1].queries

    def launched(self, tokens: int) -> int:
        """Return how many of a prompt's next tokens are left to a pass of single launches, from the first."""
        return tokens // self._largest * self._largest if tokens > MOST_PIECES * self._largest else 0

    def read(self, tokens: list[int], start: int, table: Any) -> int:
        """Queue passes over ``tokens``. Return how many tokens they cover: fewer than all near the last position.

        start  tokens of the sequence in the cache
        table  int32: the numbers of the sequence's pages, in order
        """
        done = 0
        while done < len(tokens):
            piece = tokens[done : done + self._largest]
            graphs = self._fitting(len(piece), start + done)
            if graphs is None:
                break
            graphs.replay([_row(piece, start + done, table, graphs)])
            done += len(piece)
        return done

    def _fitting(self, tokens: int, start: int) -> DecodeGraphs | None:
        for graphs in self._passes:
            end = start + graphs.queries
            if tokens <= graphs.queries and end <= self._positions and graphs.fits(1, -(-end // PAGE_TOKENS)):
                return graphs
        return None


def _row(piece: list[int], start: int, table: Any, graphs: DecodeGraphs) -> StepRow:
    own = -(-(start + len(piece)) // PAGE_TOKENS)
    # The sequence's next page may hold tokens of others that are in use again: it must not be written.
    spare = -(-(start + graphs.queries) // PAGE_TOKENS) - own
    pages = np.concatenate((table[:own], np.full(spare, graphs.spare, dtype=np.int32)))
    return StepRow(piece + [0] * (graphs.queries - len(piece)), start, pages)


# Let the package's generator use captured steps and passes, unchanged.


def use_graphs(model: Any, cache: Any, graphs: DecodeGraphs, prompts: PromptPasses | None) -> None:
    """Replace ``model.forward_chunk`` for decode steps and prompts that were captured. All other calls go to the
    package's own.

    model, cache  the package's; ``cache`` is the one for which the graphs were captured
    """
    original = model.forward_chunk

    def forward_chunk(
        input_ids: torch.Tensor, cache_: Any = None, attn_params: Any = None, preprocess_only: bool = False, **rest: Any
    ) -> dict[str, Any]:
        given = rest.pop("cache", cache_)

        def launched(ids: torch.Tensor, params: Any) -> dict[str, Any]:
            result: dict[str, Any] = original(
                ids, cache=given, attn_params=params, preprocess_only=preprocess_only, **rest
            )
            return result

        if given is not cache or attn_params is None or rest.get("return_last_state"):
            return launched(input_ids, attn_params)
        # A draft model's last pass of a step draws nothing either, and is as large as the others.
        if input_ids.shape[1] == graphs.queries and (not preprocess_only or graphs.behind is None):
            step = _rows(input_ids, attn_params)
            if graphs.fits(len(step), max(len(row.pages) for row in step)):
                logits = graphs.replay(step)
                return {} if preprocess_only else {"logits": logits}
        elif preprocess_only and prompts is not None and input_ids.shape[0] == 1:
            count = input_ids.shape[1]
            done = prompts.launched(count)
            if done:
                launched(input_ids[:, :done], _part(attn_params, 0, done))
            start, table = int(attn_params.cache_seqlens[0]), attn_params.block_index[0].cpu().numpy()
            done += prompts.read(input_ids[0, done:].tolist(), start + done, table)
            if done < count:
                launched(input_ids[:, done:], _part(attn_params, done, count - done))
            return {}
        return launched(input_ids, attn_params)

    model.forward_chunk = forward_chunk


def _part(params: Any, begin: int, tokens: int) -> Any:
    """Return the parameters of a pass over some of the tokens that ``params`` is made for.

    A draft model's pass over the same tokens may have moved the tensors of ``params`` to a GPU.
    """
    lengths = params.cache_seqlens.cpu() + begin
    return type(params)(1, params.block_index.cpu(), lengths, int(lengths[0]), params.page_size, q_len=tokens)


def _rows(input_ids: torch.Tensor, params: Any) -> list[StepRow]:
    lengths, tables = params.cache_seqlens.tolist(), params.block_index.numpy()
    queries = input_ids.shape[1]
    return [
        StepRow(tokens, length, table[: -(-(length + queries) // PAGE_TOKENS)])
        for tokens, length, table in zip(input_ids.tolist(), lengths, tables, strict=True)
    ]


# Choose the kernels of quantised matrices before a step is captured.
#
# For each shape of an EXL2 matrix, and for 1 to 4 rows, the package measures two block sizes over its first 200 calls
# (cuda/q_gemm.cu, q_gemm_autotune.cuh). Measuring waits for the GPU, which a capture does not allow, and a captured
# step keeps whatever size was in use. More than 4 rows use the size of the largest number of rows that has been
# measured.
#
# Up to 32 rows the package multiplies with the quantised matrix as it is, in time that grows with the rows. For more
# rows it makes an fp16 matrix first, and multiplies with that, which takes the same time for 33 rows as for 64. On an
# H200 the second way is the quicker one from about 17 rows on.


CALLS = 201
"""The package decides at the call after its 200 measured ones."""
MOST_ROWS = 4
TIMED = 20
"""Calls that are timed together."""


def finish_tuning(core: Any, model: Any) -> int:
    """Call each kind of EXL2 matrix of ``model`` until its block size is decided. Return the number of kinds.

    core  the package's module exllamav2
    """
    call = core.ext.exllamav2_ext.gemm_half_q_half
    kinds: dict[tuple[int, int, int], Any] = {}
    for linear in _quantised(model):
        kinds.setdefault((linear.device_idx, linear.in_features, linear.out_features), linear)
    for (device, inputs, outputs), linear in kinds.items():
        with torch.cuda.device(device), torch.cuda.stream(model.get_device_context(device, scratch=False).stream):
            for rows in range(1, MOST_ROWS + 1):
                x = torch.zeros(rows, inputs, dtype=torch.half, device=device)
                out = torch.empty(rows, outputs, dtype=torch.half, device=device)
                for _ in range(CALLS):
                    call(x, linear.q_handle, out, False)
            torch.cuda.synchronize(device)
    return len(kinds)


@torch.inference_mode()
def rows_of_kernels(core: Any, model: Any) -> int:
    """Return the most rows, from FEWEST_KERNEL_ROWS to KERNEL_ROWS, that all quantised matrices of ``model`` together
    multiply quicker as they are than by way of fp16. Call this when tuning is finished."""
    call = core.ext.exllamav2_ext.gemm_half_q_half
    kinds: dict[tuple[int, int, int], list[Any]] = {}
    for linear in _with_handle(model):
        kinds.setdefault((linear.device_idx, linear.in_features, linear.out_features), []).append(linear)

    def seconds(rows: int) -> float:
        return sum(
            len(linears) * _time(call, linears[0], rows, model.get_device_context(kind[0], scratch=False).stream)
            for kind, linears in kinds.items()
        )

    most, by_fp16 = FEWEST_KERNEL_ROWS, seconds(WIDE)
    while most < KERNEL_ROWS and seconds(most + 4) <= by_fp16:
        most += 4
    return most if kinds else KERNEL_ROWS


def _time(call: Callable[..., None], linear: Any, rows: int, stream: Any) -> float:
    """Return the milliseconds of a multiplication with as many rows, as part of a captured step."""
    with torch.cuda.device(linear.device_idx), torch.cuda.stream(stream):
        x = torch.zeros(rows, linear.in_features, dtype=torch.half, device=stream.device)
        out = torch.empty(rows, linear.out_features, dtype=torch.half, device=stream.device)
        call(x, linear.q_handle, out, False)  # kernels are loaded at their first use
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(TIMED):
                call(x, linear.q_handle, out, False)
        finally:
            graph.capture_end()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record(stream)
        graph.replay()
        end.record(stream)
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / TIMED


def _with_handle(model: Any) -> Iterator[Any]:
    for module in model.modules:
        for part in (module, *module.submodules):
            if isinstance(getattr(part, "q_handle", None), int) and hasattr(part, "in_features"):
                yield part


def _quantised(model: Any) -> Iterator[Any]:
    for module in model.modules:
        for part in (module, *module.submodules):
            if isinstance(getattr(part, "q_tensors", None), dict) and "q_weight" in part.q_tensors:
                yield part


def make_loop(
    loaded: Loaded, generator: Any, drawable: int, progress: ProgressCallback
) -> tuple[DecodeLoop | None, str]:
    """Capture the decode steps of a loaded model, and have the generator use them.

    Return the loop that takes the place of the generator's (None where tokens are speculated, and where nothing is
    captured), and how steps are launched, for people. ``progress`` gets the phases "capturing" and
    "capturing draft".
    """
    if not loaded.graphs:
        return None, _one_by_one(loaded.uncaptured)
    queries = loaded.draft_tokens + 1
    rows = most_rows(loaded.model, generator.max_batch_size, queries)
    why = obstacle(loaded.model, loaded.loras)
    if why is None and not rows:
        why = "its mixture of experts computes fewer rows at once than a step with speculated tokens has"
    if why is not None:
        return None, _one_by_one(why)
    try:
        graphs, copied = _graphs(loaded, loaded.model, loaded.cache, loaded.loras, rows, queries)
    except NotReadableError as e:
        return None, _one_by_one(str(e))
    steps = None if loaded.draft_tokens else DeviceSteps(graphs, drawable)
    _capture(loaded, loaded.model, loaded.cache, loaded.loras, graphs, lambda *counts: progress("capturing", *counts))
    if loaded.draft_model is not None and obstacle(loaded.draft_model, None) is None:
        most = most_rows(loaded.draft_model, generator.max_batch_size, 1)
        draft, _ = _graphs(loaded, loaded.draft_model, loaded.draft_cache, None, most, 1)
        _capture(
            loaded, loaded.draft_model, loaded.draft_cache, None, draft,
            lambda *counts: progress("capturing draft", *counts),
        )  # fmt: skip
    loop = None
    if steps is not None:
        loop = DecodeLoop(generator, steps, generator.iterate_gen, ChunkSizer(loaded.chunk_size, loaded.max_gap_s))
    text = "each step is one captured CUDA graph"
    if graphs.own is not None and graphs.own.why:
        text += f"; the package multiplies its quantised matrices: {graphs.own.why}"
    if copied:
        text += f"; the package copies its quantised cache: {copied}"
    if loop is not None:
        text += ", queued before the last one is read"
    if rows < generator.max_batch_size:
        text += f"; steps of more than {rows} rows are launched one kernel at a time: {MIXTURE}"
    return loop, text


def _one_by_one(why: str) -> str:
    return f"one kernel at a time: {why}" if why else "one kernel at a time"


def _graphs(loaded: Loaded, model: Any, cache: Any, loras: Any, rows: int, queries: int) -> tuple[DecodeGraphs, str]:
    """Return the steps to capture, and why they do not read a quantised cache in place ("" if they do)."""
    own = None if loras else OwnModules(model)
    if own is not None and own.complete:
        kernel_rows = KERNEL_ROWS
    else:
        finish_tuning(loaded.core, model)
        kernel_rows = rows_of_kernels(loaded.core, model) if queries == 1 else KERNEL_ROWS
    pages, copied = in_place(cache, model.config.num_attention_heads, queries)
    graphs = DecodeGraphs(
        model,
        pages or cache,
        loras,
        HostEmbedding(model.modules[0].embedding.weight.data),
        rows=row_sizes(rows, kernel_rows),
        widths=_widths(loaded, copied=bool(copied)),
        queries=queries,
        spare=loaded.cache_size // PAGE_TOKENS,
        own=own,
    )
    return graphs, copied


def _capture(
    loaded: Loaded, model: Any, cache: Any, loras: Any, graphs: DecodeGraphs, progress: Callable[[int, int], None]
) -> None:
    """Capture steps and passes over prompts, and have the generator use them. ``progress``: see DecodeGraphs.capture.

    A mixture of experts is routed by the host for as many tokens as a pass has, so it has none.
    """
    passes = [
        DecodeGraphs(
            model, cache, loras, graphs.embedding, rows=[1], queries=tokens,
            widths=_widths(loaded, 1, copied=is_quantised(cache)),
            spare=graphs.spare, head=False, pools=graphs.pools, own=graphs.own,
        )
        for tokens in PASSES
        if most_rows(model, 1, tokens)
    ]  # fmt: skip
    captured, total = 0, sum(len(each.sizes) for each in (graphs, *passes))

    def tell(done: int, _: int) -> None:
        progress(captured + done, total)

    for each in (graphs, *passes):
        each.capture(tell)
        captured += len(each.sizes)
    use_graphs(model, cache, graphs, PromptPasses(passes, int(model.config.max_seq_len)) if passes else None)


def _widths(loaded: Loaded, more: int = 0, *, copied: bool) -> list[int]:
    """Return the widths of block tables in pages, the last of them ``more`` than a sequence may have.

    copied  whether a step copies the pages of its table, so that its cost depends on the width, not on the lengths
    """
    context = min(loaded.context + loaded.draft_tokens, loaded.cache_size)
    return page_sizes(-(-context // PAGE_TOKENS) + more, copied)
