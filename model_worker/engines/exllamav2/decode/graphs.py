"""CUDA graphs of ExLlamaV2's decode step: one for each number of rows, width of block table, and GPU.

A step of the package is some 400 launches from Python. A captured step is one launch, and computes the same kernels on
static tensors: ``StepInputs`` holds what changes, and ``logits`` receives the result.

What has to hold for a capture:

* The package's own small graphs are off (``config.no_graphs``): their captures would be nested in ours.
* EXL2's tuning is finished (``tuning``), and each size has run before: kernels are loaded at first use.
* The kernel that plans attention runs inside the capture, so the plan must be made anew (``attention.forget_step``).
  The plan's tensors must live as long as the graph.
* Scratch memory that launches share keeps its address. ``capture`` begins with the largest size, so it does not grow.
* No garbage is collected meanwhile. Objects that wait for the collector may own memory or graphs of CUDA, which cannot
  be freed during a capture: PyTorch's destructors then abort the process.
"""

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from model_worker.engines.exllamav2.decode.buckets import fitting
from model_worker.engines.exllamav2.decode.embedding import HostEmbedding, scale_of
from model_worker.engines.exllamav2.decode.inputs import Row, StepInputs
from model_worker.engines.exllamav2.decode.static_params import static_params
from model_worker.engines.exllamav2.gpu_draws.batched import RowDraw
from model_worker.engines.paged import attention

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
    drawn                int64 [rows] on the first GPU: where the step before has left its tokens
    """

    def __init__(
        self, model: Any, cache: Any, loras: Sequence[Any] | None, embedding: HostEmbedding, *,
        rows: Sequence[int], widths: Sequence[int], queries: int, spare: int, head: bool = True,
        pools: dict[int, Any] | None = None,
    ) -> None:  # fmt: skip
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
        self._kernels: Any = importlib.import_module("model_worker.engines.exllamav2.decode.kernels")
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
        for module in modules:
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
    def replay(self, step: Sequence[Row], draws: Sequence[RowDraw | None] = ()) -> torch.Tensor:
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
