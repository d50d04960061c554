"""Queue captured steps, draw behind them, and read the tokens when an event says that they are there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_worker.engine import DrawnToken
from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import PINNED_SETS, Row
from model_worker.engines.exllamav2.decode.loop import Computed
from model_worker.engines.exllamav2.gpu_draws.batched import BatchedDraws
from model_worker.engines.exllamav2.gpu_draws.tables import RowTables


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
        self, rows: Sequence[Row], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
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
