"""Choose the jobs that ExLlamaV2's generator computes: a queue of our own before the generator's queue.

The package starts every job that fits, computes a chunk of every new prompt in each step, and lets four small jobs pass
a large one before all wait. This module changes four things:

* A new prompt begins only if all prompts that are being read take at most one chunk per step together. A single prompt
  always begins. So many long prompts slow running answers down by one chunk per step, and not by one chunk each.
* Pages are moved together only when no job waits. The package does this whenever no job is active.
* While the package walks over the pages, Python's recursion limit is raised. Otherwise a cached text of a thousand
  pages would exceed the limit, and the process would end.
* Jobs begin in the order in which they came. Later jobs may pass a job that lacks pages, but at most PASSES of them.
  After that, all jobs wait for it.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

PASSES = 8
"""The number of later jobs that may start before a job that lacks pages."""


class Batch:
    """The generator's jobs, waiting and active. Jobs are AnswerJob.

    chunk         prompt tokens computed per step and job
    defragmented  called when the generator has put its pages in order
    """

    def __init__(self, generator: Any, chunk: int, defragmented: Callable[[], None] = lambda: None) -> None:
        self._generator, self._chunk = generator, chunk
        self._defragment, self._defragmented = generator.defrag_cache, defragmented
        generator.defrag_cache = self._defragment_when_idle
        self._line: list[Any] = []
        self._passed: dict[Any, int] = {}
        self._opened = 0  # prompt tokens read since the last time that an answer had begun

    def add(self, job: Any, *, first: bool = False) -> None:
        """Put a job at the end of the queue, or at its front."""
        generator = self._generator
        job.prepare_for_queue(generator, generator.job_serial)  # the first half of enqueue()
        generator.job_serial += 1
        self._line.insert(0 if first else len(self._line), job)

    def start(self) -> list[Any]:
        """Give the generator the jobs that it can start now. It starts them at its next step."""
        if not self._line:
            return []
        generator, started = self._generator, []
        active = generator.active_jobs
        places = generator.max_batch_size - sum(len(job.sequences) for job in active)
        pages = len(generator.unreferenced_pages)
        reading = sum(min(job.unread(), self._chunk) for job in active if not job.is_prefill_done())
        while (job := self._next(places, pages)) is not None:
            unread = min(job.unread(), self._chunk)
            if reading and unread and reading + unread > self._chunk:
                break
            places -= len(job.sequences)
            pages -= job.current_new_pages_required()
            reading += unread
            self._leave(job)
            generator.pending_jobs.append(job)  # the second half of enqueue()
            started.append(job)
        return started

    @torch.inference_mode()
    def open(self, results: list[Any]) -> bool:
        """Read the prompts of the jobs that ``start`` has given to the generator, and draw nothing yet. Return False if
        drawing is due.

        Requests that are sent together arrive one by one. While no answer has begun, the first draw waits for jobs that
        came while prompts were read. Otherwise each of these jobs would wait for a whole step. The first draw waits for
        one chunk of tokens at most, so that the first of many answers is not delayed for long. A single job loses
        nothing, because its draw comes next.

        results  receives the generator's reports
        """
        generator = self._generator
        active = generator.active_jobs
        if not active or any(job.begun for job in active):
            self._opened = 0
            if active:
                return False
        if not generator.pending_jobs or self._opened >= self._chunk:
            return False
        generator.iterate_start_jobs(results)
        for job in active:
            before = sum(sequence.kv_position for sequence in job.sequences)
            job.prefill(results)
            self._opened += sum(sequence.kv_position for sequence in job.sequences) - before
        return True

    def _next(self, places: int, pages: int) -> Any | None:
        """Return the first job in the queue that fits, unless it may not pass the jobs before it."""
        for job in self._line:
            if len(job.sequences) > places:
                return None  # every answer that ends frees places
            if job.current_new_pages_required() <= pages:
                return job
            if self._passed.get(job, 0) >= PASSES:
                return None
        return None

    def _leave(self, job: Any) -> None:
        at = self._line.index(job)
        for passed in self._line[:at]:
            self._passed[passed] = self._passed.get(passed, 0) + 1
        del self._line[at]
        self._passed.pop(job, None)

    def cancel(self, job: Any) -> None:
        """Forget a job wherever it is. Its pages are free at once."""
        if job in self._line:
            self._line.remove(job)
            self._passed.pop(job, None)
        else:
            self._generator.cancel(job)

    def _defragment_when_idle(self) -> None:
        if self._line:
            return
        generator, limit = self._generator, sys.getrecursionlimit()
        before = generator.last_defrag_serial
        sys.setrecursionlimit(max(limit, 1000 + 2 * generator.max_pages))
        try:
            self._defragment()
        finally:
            sys.setrecursionlimit(limit)
        if generator.last_defrag_serial != before:
            self._defragmented()

    def clear(self) -> None:
        """Forget all jobs, and every cached page."""
        self._line.clear()
        self._passed.clear()
        self._generator.clear_queue()
        self._generator.reset_page_table()

    @property
    def waiting(self) -> int:
        return len(self._line) + len(self._generator.pending_jobs)

    @property
    def active(self) -> int:
        return len(self._generator.active_jobs)

    @property
    def reading(self) -> int:
        """Return the number of jobs whose prompt is being computed."""
        return sum(not job.is_prefill_done() for job in self._generator.active_jobs)
