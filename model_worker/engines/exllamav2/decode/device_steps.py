"""Queue captured steps, draw behind them, and read the tokens when an event says that they are there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model_worker.engine import DrawnToken
from model_worker.engines.exllamav2.decode.graphs import WARM_UPS, DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import PINNED_SETS, Row
from model_worker.engines.exllamav2.decode.loop import Array, Computed
from model_worker.engines.exllamav2.gpu_draws.batched import BatchedDraws, RowDraw, write_masked
from model_worker.engines.exllamav2.gpu_draws.tables import RowTables


@dataclass
class _Queued:
    """A step on the GPU: its event, and pinned memory that holds its result once the event has passed.

    shown    for each row with log-probabilities: (row, number of likeliest tokens to report)
    waiting  what the rows draw that wait for a mask
    """

    event: Any
    drawn: torch.Tensor
    logits: torch.Tensor | None
    shown: list[tuple[int, int]]
    waiting: dict[int, RowDraw] = field(default_factory=dict)
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
        size = self._draws.masked.shape[0]
        self._masked = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(PINNED_SETS)]
        self._draw_masked: Any = None
        self._next = 0
        graphs.behind = lambda logits, rows: self._draws.launch(logits, rows)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the draws of rows with masks, of all rows at once. They are a graph of their own."""
        graphs = self._graphs
        with torch.cuda.device(self._last), torch.cuda.stream(graphs.stream(self._last)):
            logits, rows = graphs.logits, graphs.rows[-1]
            for _ in range(WARM_UPS):
                self._draws.launch(logits, rows, masked=True)
            torch.cuda.synchronize(self._last)
            self._draw_masked = torch.cuda.CUDAGraph()
            self._draw_masked.capture_begin(capture_error_mode="thread_local")
            try:
                self._draws.launch(logits, rows, masked=True)
            finally:
                self._draw_masked.capture_end()

    def fits(self, rows: int, pages: int) -> bool:
        return self._graphs.fits(rows, pages)

    @torch.inference_mode()
    def queue(
        self,
        rows: Sequence[Row],
        jobs: Sequence[Any | None],
        places: Sequence[int],
        logits: Sequence[int],
        waiting: Sequence[int],
    ) -> _Queued:
        graphs = self._graphs
        graphs.set_streams()
        draws = self._tables.step(jobs, places, [row.length for row in rows])
        later: dict[int, RowDraw] = {}
        for row in waiting:
            draw, draws[row] = draws[row], None
            assert draw is not None
            later[row] = draw
        out = graphs.replay(rows, draws)
        shown = [(number, job.top) for number, job in enumerate(jobs) if job is not None and job.top is not None]
        queued = _Queued(
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
            self._drawn[self._next][: len(rows)],
            _to_host(out[list(logits)].float()) if logits else None,
            shown,
            later,
        )
        if not later:
            self._finish(queued)
        return queued

    @torch.inference_mode()
    def draw_waiting(self, queued: _Queued, masks: Mapping[int, Array]) -> None:
        graphs, pinned = self._graphs, self._masked[self._next]
        graphs.set_streams()
        draws = {row: (queued.waiting[row], mask) for row, mask in masks.items()}
        if draws:
            used = write_masked(pinned.numpy(), graphs.rows[-1], self._drawable, draws)
            self._draws.masked[:used].copy_(pinned[:used], non_blocking=True)
            self._draw_masked.replay()
        self._finish(queued)

    def _finish(self, queued: _Queued) -> None:
        """Queue what follows the draws of a step: the copies of its result."""
        graphs, shown, rows = self._graphs, queued.shown, len(queued.drawn)
        self._next = (self._next + 1) % PINNED_SETS
        if self._first != self._last:
            # PyTorch has both GPUs' streams wait for each other.
            graphs.drawn[:rows].copy_(self._draws.drawn[:rows], non_blocking=True)
        if shown:
            numbers = [number for number, _ in shown]
            queued.logprobs = self._logprobs(graphs.logits[:rows], numbers, max(top for _, top in shown))
        queued.drawn.copy_(self._draws.drawn[:rows], non_blocking=True)
        queued.event.record(graphs.stream(self._last))

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
