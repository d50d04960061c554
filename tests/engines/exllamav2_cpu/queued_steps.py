"""Steps of the decode loop around an oracle, computed as late as a GPU may compute them.

A queued step is computed when it is read, or when other work on the cache would be queued behind it. So a host that
relies on a result too early, or changes what a queued step is going to read, gets a wrong answer here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.decode.graphs import StepRow
from model_worker.engines.exllamav2.decode.loop import NOT_A_TOKEN, Array, Computed
from model_worker.engines.exllamav2.gpu_draws.batched import RowDraw, RowTables
from model_worker.engines.exllamav2.gpu_draws.rule import draw, penalised
from tests.engines.exllamav2_cpu.package import logprob_of

PAGE = 256


class _Params:
    """The tables of a step, as the oracle asks for them."""

    def __init__(self, step: Sequence[StepRow], pages: int) -> None:
        self.cache_seqlens = torch.tensor([row.length for row in step], dtype=torch.int32)
        self.block_index = torch.full((len(step), pages), -1, dtype=torch.int32)
        for number, row in enumerate(step):
            self.block_index[number, : len(row.pages)] = torch.from_numpy(row.pages)


class _Queued:
    def __init__(self, compute: Callable[[], None]) -> None:
        self.compute: Callable[[], None] | None = compute
        self.result = Computed(np.zeros(0, np.int64))


class QueuedSteps:
    """``loop.Steps`` over an oracle, which draws by the rule's reference. ``most`` is the largest step in rows."""

    def __init__(self, generator: Any, most: int, drawable: int) -> None:
        self._generator, self.most, self._drawable = generator, most, drawable
        self._line: list[_Queued] = []
        self._drawn: Array = np.zeros(0, np.int64)
        self._forward = generator.model.forward_chunk
        self.rows, self.vocab = generator.max_batch_size, drawable
        self._filled = {
            name: np.zeros((self.rows, drawable), np.float32 if name == "bias" else np.int32)
            for name in ("bias", "last_seen", "counts")
        }
        self._masks = np.zeros((self.rows, drawable), np.bool_)
        self._tables = RowTables(self)
        self.queued_ahead = 0
        """Number of steps that were queued while another had not been read."""
        self.drawn_here = 0
        """Number of tokens that the host did not draw."""
        self.drawn_under_masks = 0
        self._before(generator, "iterate_start_jobs", lambda: bool(generator.pending_jobs))
        self._before(generator, "defrag_cache", lambda: True)
        self._before(generator.model, "forward_chunk", lambda: True)

    def _before(self, owner: Any, method: str, needed: Callable[[], bool]) -> None:
        """Compute what is queued before a method that reads or changes pages: on a GPU all work is in one line."""
        original = getattr(owner, method)

        def ordered(*arguments: Any, **named: Any) -> Any:
            if needed():
                self._compute()
            return original(*arguments, **named)

        setattr(owner, method, ordered)

    def fits(self, rows: int, pages: int) -> bool:
        return rows <= self.most

    def fill(self, table: str, slot: int, values: Array) -> None:
        def compute() -> None:
            self._filled[table][slot] = values

        self._line.append(_Queued(compute))

    def fill_masks(self, bits: Array) -> None:
        def compute() -> None:
            self._masks[: len(bits)] = np.unpackbits(bits, axis=1, count=self.vocab, bitorder="little")

        self._line.append(_Queued(compute))

    def queue(
        self, rows: Sequence[StepRow], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> _Queued:
        self.queued_ahead += bool(self._line)
        tables = [np.array(row.pages) for row in rows]
        step = [StepRow(tuple(r.tokens), r.length, table, r.source) for r, table in zip(rows, tables, strict=True)]
        draws = self._tables.step(jobs, places, [row.length for row in rows])
        tops = [job.top if job is not None else None for job in jobs]
        wanted = list(logits)
        self.drawn_here += sum(draw is not None for draw in draws)
        self.drawn_under_masks += sum(draw is not None and draw.mask >= 0 for draw in draws)

        def compute() -> None:
            ids = torch.tensor([[int(self._drawn[r.source]) if r.source >= 0 else r.tokens[0]] for r in step])
            params = _Params(step, max(map(len, tables)))
            out = self._forward(ids, cache=self._generator.cache, attn_params=params)["logits"]
            # The host must not read a token that it draws itself.
            self._drawn = np.array(
                [-2 if draw is None else self._draw(row, draw) for row, draw in zip(out[:, 0], draws, strict=True)]
            )
            queued.result = Computed(self._drawn, out[wanted].float() if wanted else None)
            for number, top in enumerate(tops):
                if top is not None:
                    raw = out[number, 0, : self._drawable].float()
                    queued.result.logprobs[number] = logprob_of(raw, int(self._drawn[number]), top)

        queued = _Queued(compute)
        self._line.append(queued)
        return queued

    def _draw(self, logits: torch.Tensor, row: RowDraw) -> int:
        own = {name: None if row.slot < 0 else table[row.slot] for name, table in self._filled.items()}
        x = penalised(
            logits[: self._drawable].numpy(), row.rule, row.position, own["last_seen"], own["counts"], own["bias"]
        )
        if row.mask >= 0:
            x = x + np.where(self._masks[row.mask], np.float32(0), np.float32(-np.inf))
        try:
            token = draw(x, row.rule, row.point)
        except ValueError:
            return NOT_A_TOKEN
        if row.slot >= 0:
            self._filled["last_seen"][row.slot, token] = row.position + 1
            self._filled["counts"][row.slot, token] += 1
        return token

    def read(self, queued: _Queued) -> Computed:
        while queued.compute is not None:
            self._compute_first()
        return queued.result

    def _compute(self) -> None:
        while self._line:
            self._compute_first()

    def _compute_first(self) -> None:
        first = self._line.pop(0)
        compute, first.compute = first.compute, None
        assert compute is not None
        compute()
