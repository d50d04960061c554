"""Queue captured steps, draw greedily behind them, and read the tokens when an event says that they are there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.decode.draws import draws_on_gpu
from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import PINNED_SETS, Row
from model_worker.engines.exllamav2.decode.loop import NOT_A_TOKEN

Array = np.ndarray[Any, Any]


@dataclass
class Queued:
    """A step on the GPU: its event, and pinned memory that holds its result once the event has passed."""

    event: Any
    drawn: Array
    logits: torch.Tensor | None


class DeviceSteps:
    """``loop.Steps`` on GPUs."""

    def __init__(self, graphs: DecodeGraphs, drawable: int) -> None:
        self._graphs, self._drawable = graphs, drawable
        most = graphs.rows[-1]
        self._drawn = [torch.zeros(most, dtype=torch.long).pin_memory() for _ in range(PINNED_SETS)]
        self._logits: torch.Tensor | None = None
        self._next = 0
        self._last = graphs.devices[-1]
        graphs.behind = self._draw

    def _draw(self, logits: torch.Tensor, rows: int) -> None:
        values, ids = logits[:, 0, : self._drawable].max(-1)  # a NaN is the largest
        self._graphs.drawn[:rows].copy_(torch.where(values.isnan(), NOT_A_TOKEN, ids))

    def fits(self, rows: int, pages: int) -> bool:
        return self._graphs.fits(rows, pages)

    def can_draw(self, job: Any) -> bool:
        return draws_on_gpu(job)

    @torch.inference_mode()
    def queue(
        self, rows: Sequence[Row], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> Queued:
        graphs = self._graphs
        out = graphs.replay(rows)
        held = None
        if logits:
            # Read before the next step is queued, so one buffer is enough.
            if self._logits is None or len(self._logits) < len(logits):
                self._logits = torch.empty((len(logits), *out.shape[1:])).pin_memory()
            held = self._logits[: len(logits)]
            held.copy_(out[list(logits)].float(), non_blocking=True)
        drawn = self._drawn[self._next]
        self._next = (self._next + 1) % PINNED_SETS
        drawn[: len(rows)].copy_(graphs.drawn[: len(rows)], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(graphs.stream(self._last))
        return Queued(event, drawn.numpy()[: len(rows)], held)

    def read(self, queued: Queued) -> tuple[Array, torch.Tensor | None]:
        queued.event.synchronize()
        return queued.drawn, queued.logits
