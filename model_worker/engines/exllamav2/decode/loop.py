"""The decode loop: queue the next step before the last one is read.

The package's loop reads the logits of a step, draws on the host, and only then launches the next step, so that the GPU
waits for the host in between. Here tokens are drawn on the GPU and stay there as the next step's input. While the GPU
computes a step, the host accepts the tokens of the step before: text, stop strings, pages, sending.

So the host learns one step late that an answer has ended. The step that is queued then has one row too many. Its token
is dropped, and the slot that it writes belongs to no token that anybody counts: claims on a page (``kv_position``) are
made only for tokens that were accepted. The page may be handed out at once, because all work on pages is queued on one
stream: the new owner writes after the late row.

An answer whose next token has to be drawn by the host (a constraint, mirostat, guidance) cannot be queued ahead. While
there is one in the batch, each step is read before the next is queued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from model_worker.engines.exllamav2.decode.inputs import Row
from protocol.process.worker_spec import PAGE_TOKENS

Array = np.ndarray[Any, Any]


class Steps(Protocol):
    """Computes steps. One may be queued while the one before has not been read."""

    def fits(self, rows: int, pages: int) -> bool:
        """Return whether a step of this size can be queued."""
        ...

    def can_draw(self, job: Any) -> bool:
        """Return whether the next token of a job can be drawn on the GPU."""
        ...

    def queue(
        self, rows: Sequence[Row], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> Any:
        """Queue a step and return what ``read`` takes.

        jobs    the job of each row; None for a row whose token the host draws
        places  the number of the token that each row draws, counted from the answer's first as 0
        logits  rows whose logits the host needs
        """
        ...

    def read(self, queued: Any) -> tuple[Array, torch.Tensor | None]:
        """Wait for a step. Return the drawn tokens int64 [rows], and the logits, float32 [rows asked for, 1, padded
        vocabulary].

        Raises RuntimeError if a row's logits are not numbers.
        """
        ...


@dataclass
class _Flight:
    """A step that has been queued and not been read.

    spans     (job, first row, one behind its last row)
    by_host   the spans whose token the host draws, in the order of the logits that were asked for
    """

    queued: Any
    spans: list[tuple[Any, int, int]]
    by_host: list[tuple[Any, int, int]]


class DecodeLoop:
    """Takes the place of the generator's ``iterate_gen``. Jobs are AnswerJob.

    package  the generator's own ``iterate_gen``, for steps that ``steps`` cannot compute
    """

    def __init__(self, generator: Any, steps: Steps, package: Callable[[list[Any]], None]) -> None:
        self._generator, self._steps, self._package = generator, steps, package
        self._flight: _Flight | None = None

    @torch.inference_mode()
    def iterate(self, results: list[Any]) -> None:
        """Start jobs, read a chunk of each new prompt, queue a step, and accept the step before.

        While prompts are read, the step before is accepted first, as the chunks would delay it.
        """
        generator = self._generator
        generator.iterate_start_jobs(results)
        reading = [job for job in generator.active_jobs if not job.is_prefill_done()]
        if reading:
            self._accept(results)
            for job in reading:
                if job in generator.active_jobs:
                    job.prefill(results)
        spans, pages = self._spans()
        if not spans:
            self._accept(results)
            return
        rows = spans[-1][2]
        if not self._steps.fits(rows, pages):
            self._accept(results)
            self._package(results)
            return
        if self._flight is not None and any(self._draws_by_host(job) for job, _, _ in spans):
            self._accept(results)
            spans, _ = self._spans()
        before = self._flight
        self._flight = self._queue(spans, before) if spans else None
        self._accept_flight(before, results)
        if self._flight is not None and self._flight.by_host:
            self._accept(results)

    def forget(self) -> None:
        """Wait for the step that has not been read, and forget it. Its jobs have been forgotten, too."""
        if self._flight is not None:
            self._steps.read(self._flight.queued)
            self._flight = None

    def _draws_by_host(self, job: Any) -> bool:
        return len(job.sequences) > 1 or not self._steps.can_draw(job)

    def _spans(self) -> tuple[list[tuple[Any, int, int]], int]:
        """Return (job, first row, one behind its last row) of all jobs that get a token, and the pages of the longest.

        A job that gets its last token in the step that has not been read is left out.
        """
        flying = self._flying_rows()
        spans, rows, pages = [], 0, 0
        for job in self._generator.active_jobs:
            ahead = job in flying
            if not job.is_prefill_done() or job.new_tokens + ahead >= job.limit:
                continue
            count = len(job.sequences)
            spans.append((job, rows, rows + count))
            rows += count
            for sequence in job.sequences:
                pages = max(pages, (sequence.kv_position + ahead) // PAGE_TOKENS + 1)
        return spans, pages

    def _flying_rows(self) -> dict[Any, int]:
        return {job: first for job, first, _ in self._flight.spans} if self._flight is not None else {}

    def _queue(self, spans: list[tuple[Any, int, int]], before: _Flight | None) -> _Flight:
        sources = {job: first for job, first, _ in before.spans} if before is not None else {}
        step: list[Row] = []
        jobs: list[Any | None] = []
        places: list[int] = []
        by_host: list[tuple[Any, int, int]] = []
        for job, first, last in spans:
            source = sources.get(job, -1)
            ahead = source >= 0
            if self._draws_by_host(job):
                by_host.append((job, first, last))
                jobs += [None] * (last - first)
            else:
                jobs.append(job)
            places += [job.new_tokens + ahead] * (last - first)
            job.begun = True
            for sequence, token in zip(job.sequences, job.last_tokens(), strict=True):
                length = sequence.kv_position + ahead
                page = sequence.allocated_pages[length // PAGE_TOKENS]
                assert page.ref_count == 1
                page.can_revert = False  # what it held before is overwritten by this step
                pages = _page_numbers(job, sequence)[: length // PAGE_TOKENS + 1]
                step.append(Row((token,), length, pages, source))
        wanted = [row for _, first, last in by_host for row in range(first, last)]
        return _Flight(self._steps.queue(step, jobs, places, wanted), spans, by_host)

    def _accept(self, results: list[Any]) -> None:
        """Read and accept the step that has not been read, if there is one."""
        flight, self._flight = self._flight, None
        self._accept_flight(flight, results)

    def _accept_flight(self, flight: _Flight | None, results: list[Any]) -> None:
        if flight is None:
            return
        generator = self._generator
        active = set(generator.active_jobs)
        # Read it even if nobody wants its tokens: memory that it uses is written again a few steps later.
        drawn, logits = self._steps.read(flight.queued)
        tokens = drawn.tolist()
        if logits is not None:
            self._draw_by_host(flight, logits, active)
        by_host = {job for job, _, _ in flight.by_host}
        ended = []
        for job, first, _ in flight.spans:
            if job not in active:
                continue  # cancelled, ended or gone back since the step was queued
            job.claim_last()
            if job not in by_host:
                job.set_drawn(tokens[first])
            if job.receive_sample(None, job.drawn_tensor, None, None, None, None, results)[0]:
                ended.append(job)
        waiting = generator.num_remaining_jobs()
        for job in ended:
            job.deallocate_pages()
            generator.active_jobs.remove(job)
        if waiting and not generator.num_remaining_jobs():
            generator.defrag_cache()

    def _draw_by_host(self, flight: _Flight, logits: torch.Tensor, active: set[Any]) -> None:
        generator, at = self._generator, 0
        draws = []
        for job, first, last in flight.by_host:
            if job in active:
                draws.append((job, logits[at : at + last - first]))
            at += last - first
        if len(draws) >= generator.min_sampling_threads:
            for _ in generator.sampling_pool.map(lambda draw: draw[0].receive_logits(draw[1]), draws):
                pass
        else:
            for job, own in draws:
                job.receive_logits(own)


def _page_numbers(job: Any, sequence: Any) -> Array:
    """Return the numbers of a sequence's pages, int32. The package forgets them whenever a page is exchanged."""
    tensor = sequence.block_index_tensor
    if tensor is None:
        tensor = job.get_block_index(sequence, len(sequence.allocated_pages) * PAGE_TOKENS)
    numbers: Array = tensor.numpy()
    return numbers
