"""The decode loop: queue the next step before the last one is read.

The package's loop reads the logits of a step, draws on the host, and only then launches the next step, so that the GPU
waits for the host in between. Here tokens are drawn on the GPU and stay there as the next step's input. While the GPU
computes a step, the host accepts the tokens of the step before: text, stop strings, pages, sending.

So the host learns one step late that an answer has ended. The step that is queued then has one row too many. Its token
is dropped, and the slot that it writes belongs to no token that anybody counts: claims on a page (``kv_position``) are
made only for tokens that were accepted. The page may be handed out at once, because all work on pages is queued on one
stream: the new owner writes after the late row.

An answer with a constraint cannot be queued ahead: the host makes the mask of its next token from the one before. The
same holds for an answer whose tokens the host draws (mirostat, guidance). While there is one in the batch, each step is
read before the next is queued. A constraint that waits (engines/gated) lets the GPU draw ahead meanwhile. When the host
learns that it waits no more, the GPU has drawn one token too many. That token is dropped, too, and drawn again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from model_worker.engine import DrawnToken
from model_worker.engines.exllamav2.decode.graphs import StepRow
from model_worker.engines.exllamav2.gpu_draws.batched import draws_ahead, draws_on_gpu
from protocol.process.worker_spec import PAGE_TOKENS

# How much of a prompt is read between two steps of running answers. Pure.


_AIM = 0.85
"""Share of the limit at which a gap is aimed, as chunks of one size differ by some milliseconds."""
_SLOWER, _FASTER = 0.5, 0.1
"""Weight of a new measurement that is slower, or faster, than the estimate. One slow chunk is a gap that users see; the
next must be smaller."""


class ChunkSizer:
    """Chooses the size of a chunk so that the gap between two steps stays below a limit.

    A gap is taken as the duration of a step without prompts, plus a duration for each prompt token. Both are measured
    while the model serves. The duration of a token grows with the prompt, and so follows the latest chunk. Tokens of
    prompts whose log-probabilities are wanted take longer: they have a duration of their own.

    most     tokens of a chunk while no answer is running, a multiple of 256
    limit_s  the longest gap that is wanted, in seconds. The least chunk is a page of 256 tokens, whatever it takes
    """

    def __init__(self, most: int, limit_s: float) -> None:
        self._most, self._limit = most, limit_s
        self._step: float | None = None
        self._tokens: dict[bool, float] = {}

    def tokens(self, running: bool, scored: bool = False) -> int:
        """Return how many prompt tokens may be read before the next step, a multiple of 256.

        running  whether an answer waits for that step
        scored   whether log-probabilities of some of these tokens are computed
        """
        if not running:
            return self._most
        token = self._tokens.get(scored)
        if token is None or self._step is None:
            return PAGE_TOKENS
        fits = (_AIM * self._limit - self._step) / max(token, 1e-9)
        return max(PAGE_TOKENS, min(self._most, int(fits) // PAGE_TOKENS * PAGE_TOKENS))

    def measured(self, gap_s: float, tokens: int, scored: bool = False) -> None:
        """Note the time between two steps of running answers, and the prompt tokens that were read in it. ``scored``:
        whether some of them had their log-probabilities computed."""
        if not tokens:
            self._step = _towards(self._step, gap_s)
        elif self._step is not None:
            self._tokens[scored] = _towards(self._tokens.get(scored), max(gap_s - self._step, 0.0) / tokens)


def _towards(estimate: float | None, value: float) -> float:
    if estimate is None:
        return value
    return estimate + (value - estimate) * (_SLOWER if value > estimate else _FASTER)


Array = np.ndarray[Any, Any]

NOT_A_TOKEN = -1


class Steps(Protocol):
    """Computes steps. One may be queued while the one before has not been read."""

    def fits(self, rows: int, pages: int) -> bool:
        """Return whether a step of this size can be queued."""
        ...

    def queue(
        self, rows: Sequence[StepRow], jobs: Sequence[Any | None], places: Sequence[int], logits: Sequence[int]
    ) -> Any:
        """Queue a step and return what ``read`` takes.

        jobs    the job of each row; None for a row whose token the host draws
        places  the number of the token that each row draws, counted from the answer's first as 0
        logits  rows whose logits the host needs
        """
        ...

    def read(self, queued: Any) -> "Computed":
        """Wait for a step and return its result."""
        ...


@dataclass
class Computed:
    """A step that has been computed.

    drawn     int64 [rows]; NOT_A_TOKEN for a row whose logits are not numbers
    logits    float32 [rows asked for, 1, padded vocabulary]; None if none were
    logprobs  by row, for jobs that ask for them and whose token the GPU drew
    """

    drawn: Array
    logits: torch.Tensor | None = None
    logprobs: dict[int, DrawnToken] = field(default_factory=dict)


_Span = tuple[Any, int, int]
"""(job, its first row in a step, one behind its last row)"""


@dataclass
class _Flight:
    """A step that has been queued and not been read.

    spans     jobs that get a token
    by_host   the spans whose token the host draws, in the order of the logits that were asked for
    masked    the jobs that drew under their constraint
    read      prompt tokens that were queued before the step, behind the step before it
    scored    whether some of them had their log-probabilities computed
    """

    queued: Any
    spans: list[_Span]
    by_host: list[_Span]
    masked: set[Any]
    read: int
    scored: bool


class DecodeLoop:
    """Takes the place of the generator's ``iterate``. Jobs are AnswerJob.

    package  the generator's own ``iterate_gen``, for steps that ``steps`` cannot compute
    pace     says how much of the prompts is read between two steps
    clock    seconds, monotonic
    """

    def __init__(
        self,
        generator: Any,
        steps: Steps,
        package: Callable[[list[Any]], None],
        pace: ChunkSizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator, self._steps, self._package, self._pace, self._clock = generator, steps, package, pace, clock
        self._flight: _Flight | None = None
        self._accepted_at: float | None = None  # None: no answer has waited since
        self._read_since, self._scored_since = 0, False  # prompt tokens, since a step was queued

    @torch.inference_mode()
    def iterate(self, results: list[Any]) -> None:
        """Start jobs, queue a chunk of the prompts, queue a step, and accept the step before."""
        generator = self._generator
        generator.iterate_start_jobs(results)
        reading = [job for job in generator.active_jobs if not job.is_prefill_done()]
        self._read(reading, results)
        alone = not all(job.is_prefill_done() for job in reading)
        spans, pages = self._spans()
        if not spans:
            self._accept(results)
            self._accepted_at, self._read_since, self._scored_since = None, 0, False
            return
        if not self._steps.fits(spans[-1][2], pages):
            self._accept(results)
            self._package(results)
            self._accepted_at, self._read_since, self._scored_since = None, 0, False
            return
        if self._flight is not None and not all(draws_ahead(job) for job, _, _ in spans):
            self._accept(results)
            spans, _ = self._spans()
        if spans:
            self._queue_and_accept(spans, results, alone)

    def _queue_and_accept(self, spans: list[_Span], results: list[Any], alone: bool) -> None:
        """Queue a step and accept the one before.

        If there is none before, a second step is queued behind the first, so that this accepts tokens, too. It stays
        ``alone`` if the next chunk of a prompt goes behind it.
        """
        before, self._flight = self._flight, self._queue(spans, self._flight)
        if self._flight.by_host:
            self._accept_flight(before, results)
            self._accept(results)
            return
        if before is None and not alone and not self._flight.masked:
            before, self._flight = self._flight, None
            following, pages = self._spans(before)
            if following and self._steps.fits(following[-1][2], pages):
                self._flight = self._queue(following, before)
        self._accept_flight(before, results)

    def _read(self, reading: list[Any], results: list[Any]) -> None:
        """Read the next tokens of the prompts, in the order of their jobs, as many as the pace allows."""
        if not reading:
            return
        generator = self._generator
        chunk = generator.max_chunk_size
        scored = any(job.scorer is not None for job in reading)
        left = self._pace.tokens(any(job.is_prefill_done() for job in generator.active_jobs), scored)
        try:
            for job in reading:
                generator.max_chunk_size = left
                before = sum(sequence.kv_position for sequence in job.sequences)
                job.prefill(results)
                read = sum(sequence.kv_position for sequence in job.sequences) - before
                self._read_since += read
                self._scored_since = self._scored_since or (read > 0 and job.scorer is not None)
                left -= -(-read // PAGE_TOKENS) * PAGE_TOKENS
                if left <= 0:
                    break
        finally:
            generator.max_chunk_size = chunk

    def forget(self) -> None:
        """Wait for the step that has not been read, and forget it. Its jobs have been forgotten, too."""
        if self._flight is not None:
            self._steps.read(self._flight.queued)
            self._flight = None

    def _spans(self, before: _Flight | None = None) -> tuple[list[_Span], int]:
        """Return the spans of all jobs that get a token, and the pages of the longest.

        A job that gets its last token in the step that has not been read is left out.

        before  that step; None: the one that has been queued last
        """
        before = before or self._flight
        flying = {job for job, _, _ in before.spans} if before is not None else set()
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

    def _queue(self, spans: list[_Span], before: _Flight | None) -> _Flight:
        sources = {job: first for job, first, _ in before.spans} if before is not None else {}
        step: list[StepRow] = []
        jobs: list[Any | None] = []
        places: list[int] = []
        by_host: list[_Span] = []
        for job, first, last in spans:
            source = sources.get(job, -1)
            ahead = source >= 0
            if not draws_on_gpu(job):
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
                step.append(StepRow((token,), length, pages, source))
        wanted = [row for _, first, last in by_host for row in range(first, last)]
        read, scored = self._read_since, self._scored_since
        self._read_since, self._scored_since = 0, False
        masked = {job for job in jobs if job is not None and not draws_ahead(job)}
        return _Flight(self._steps.queue(step, jobs, places, wanted), spans, by_host, masked, read, scored)

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
        computed = self._steps.read(flight.queued)
        tokens = computed.drawn.tolist()
        if computed.logits is not None:
            self._draw_by_host(flight, computed.logits, active)
        by_host = {job for job, _, _ in flight.by_host}
        ended = []
        for job, first, _ in flight.spans:
            if job not in active:
                continue  # cancelled, ended or gone back since the step was queued
            if job not in by_host and job not in flight.masked and not job.takes(tokens[first]):
                continue  # this token is drawn again
            job.claim_last()
            if job not in by_host:
                if tokens[first] == NOT_A_TOKEN:
                    raise RuntimeError("the model's logits are not numbers")
                job.set_drawn(tokens[first])
                if first in computed.logprobs:
                    job.note_logprob(computed.logprobs[first])
            if job.receive_sample(None, job.drawn_tensor, None, None, None, None, results)[0]:
                ended.append(job)
        self._note_gap(flight.read, scored=flight.scored)
        waiting = generator.num_remaining_jobs()
        for job in ended:
            job.deallocate_pages()
            generator.active_jobs.remove(job)
        if waiting and not generator.num_remaining_jobs():
            generator.defrag_cache()

    def _note_gap(self, read: int, *, scored: bool) -> None:
        """Note the time since the step before was accepted, in which ``read`` prompt tokens were read, some of them
        ``scored``.

        A gap without prompts is no measure of a step if a chunk has been queued behind that step: the launches of a
        chunk that is not captured take the host's time.
        """
        now = self._clock()
        behind = self._flight.read if self._flight is not None else 0
        if self._accepted_at is not None and (read or not behind):
            self._pace.measured(now - self._accepted_at, read, scored)
        self._accepted_at = now

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
