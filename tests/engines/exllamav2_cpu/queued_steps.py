"""Steps of the decode loop around an oracle, computed as late as a GPU may compute them.

A queued step is computed when it is read, or when other work on the cache would be queued behind it. So a host that
relies on a result too early, or changes what a queued step is going to read, gets a wrong answer here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.decode.draws import draws_on_gpu
from model_worker.engines.exllamav2.decode.inputs import Row
from model_worker.engines.exllamav2.decode.loop import NOT_A_TOKEN, Array

PAGE = 256


class _Params:
    """The tables of a step, as the oracle asks for them."""

    def __init__(self, step: Sequence[Row], pages: int) -> None:
        self.cache_seqlens = torch.tensor([row.length for row in step], dtype=torch.int32)
        self.block_index = torch.full((len(step), pages), -1, dtype=torch.int32)
        for number, row in enumerate(step):
            self.block_index[number, : len(row.pages)] = torch.from_numpy(row.pages)


class _Queued:
    def __init__(self, compute: Callable[[], None]) -> None:
        self.compute: Callable[[], None] | None = compute
        self.drawn: Array = np.zeros(0, np.int64)
        self.logits: torch.Tensor | None = None


class QueuedSteps:
    """``loop.Steps`` over an oracle. ``most`` is the largest step that it takes, in rows."""

    def __init__(self, generator: Any, most: int, drawable: int) -> None:
        self._generator, self.most, self._drawable = generator, most, drawable
        self._line: list[_Queued] = []
        self._drawn: Array = np.zeros(0, np.int64)
        self._forward = generator.model.forward_chunk
        self.queued_ahead = 0
        """Number of steps that were queued while another had not been read."""
        self._before("iterate_start_jobs", lambda: bool(generator.pending_jobs))
        self._before("defrag_cache", lambda: True)

    def _before(self, method: str, needed: Callable[[], bool]) -> None:
        """Compute what is queued before a method of the generator that changes pages: on a GPU all is in one line."""
        original = getattr(self._generator, method)

        def ordered(*arguments: Any) -> Any:
            if needed():
                self._compute()
            return original(*arguments)

        setattr(self._generator, method, ordered)

    def fits(self, rows: int, pages: int) -> bool:
        return rows <= self.most

    def can_draw(self, job: Any) -> bool:
        return draws_on_gpu(job)

    def queue(
        self, rows: Sequence[Row], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> _Queued:
        self.queued_ahead += bool(self._line)
        tables = [np.array(row.pages) for row in rows]
        step = [Row(tuple(r.tokens), r.length, table, r.source) for r, table in zip(rows, tables, strict=True)]
        wanted, drawing = list(logits), [job is not None for job in jobs]

        def compute() -> None:
            ids = torch.tensor([[int(self._drawn[r.source]) if r.source >= 0 else r.tokens[0]] for r in step])
            params = _Params(step, max(map(len, tables)))
            out = self._forward(ids, cache=self._generator.cache, attn_params=params)["logits"]
            values, ids = out[:, 0, : self._drawable].max(-1)
            self._drawn = torch.where(values.isnan(), NOT_A_TOKEN, ids).numpy()
            # The host must not read a token that it draws itself.
            queued.drawn = np.where(drawing, self._drawn, -2)
            queued.logits = out[wanted].float() if wanted else None

        queued = _Queued(compute)
        self._line.append(queued)
        return queued

    def read(self, queued: _Queued) -> tuple[Array, torch.Tensor | None]:
        while queued.compute is not None:
            self._compute_first()
        return queued.drawn, queued.logits

    def _compute(self) -> None:
        while self._line:
            self._compute_first()

    def _compute_first(self) -> None:
        first = self._line.pop(0)
        compute, first.compute = first.compute, None
        assert compute is not None
        compute()
