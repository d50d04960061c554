"""Make the generator's job of a request, and the job that takes its place when the answer goes back."""

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engine import Job
from model_worker.engines.admission import Draws
from model_worker.engines.banned import Healing
from model_worker.engines.constraints import AnyConstraint
from model_worker.engines.exllamav2.answer import PromptScorer, Redraw
from model_worker.engines.exllamav2.load import Loaded
from model_worker.engines.exllamav2.sampling import NEVER, PieceSearch, TokenBias, settings_of, xtc_is_on
from model_worker.engines.exllamav2.victims import VictimRule
from model_worker.engines.prompt_scores import PromptPieces
from protocol.errors import RequestError
from protocol.request import SamplingParams

# Choose the jobs that ExLlamaV2's generator computes: a queue of our own before the generator's queue.
#
# The package starts every job that fits, computes a chunk of every new prompt in each step, and lets four small jobs
# pass a large one before all wait. This module changes four things:
#
# * A new prompt begins only if all prompts that are being read take at most one chunk per step together. A single
#   prompt always begins. So many long prompts slow running answers down by one chunk per step, and not by one chunk
#   each.
# * Pages are moved together only when no job waits. The package does this whenever no job is active.
# * While the package walks over the pages, Python's recursion limit is raised. Otherwise a cached text of a thousand
#   pages would exceed the limit, and the process would end.
# * Jobs begin in the order in which they came. Later jobs may pass a job that lacks pages, but at most PASSES of them.
#   After that, all jobs wait for it.


PASSES = 8
"""The number of later jobs that may start before a job that lacks pages."""


class Batch:
    """The generator's jobs, waiting and active. Jobs are AnswerJob.

    chunk         prompt tokens computed per step and job
    defragmented  called when the generator has put its pages in order
    """

    def __init__(self, generator: Any, chunk: int, defragmented: Callable[[], None] = lambda: None) -> None:
        self._generator, self._chunk = generator, chunk
        generator.victim_rule = VictimRule(generator.max_pages)
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
        self._generator.victim_rule = VictimRule(self._generator.max_pages)

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


class AnswerJobs:
    """Makes the AnswerJobs of one loaded model.

    padded    size of the generator's padded vocabulary
    drawable  ids below this can be drawn
    eos_ids   ids that end an answer
    """

    def __init__(self, loaded: Loaded, batch: Batch, padded: int, drawable: int, eos_ids: Collection[int]) -> None:
        # Not imported above: this module imports exllamav2, which ``exllamav2.load`` must have done before.
        self._answer_job = importlib.import_module("model_worker.engines.exllamav2.job").AnswerJob
        self._batch, self._padded, self._drawable, self._eos_ids = batch, padded, drawable, eos_ids
        self._draft_tokens, self._ngram, self._by_rule = loaded.draft_tokens, loaded.ngram, loaded.graphs
        self._pieces = PieceSearch(loaded.tokenizer.get_id_to_piece_list(True))
        sampler = loaded.generator.ExLlamaV2Sampler
        self._protected = sampler.get_default_xtc_mask_tokens(loaded.tokenizer)
        punctuation = sampler.get_dry_default_sequence_breaker_tokens(loaded.tokenizer)
        self._breakers = np.zeros(drawable, bool)
        self._breakers[[token for token in punctuation if token < drawable]] = True

    def first(
        self, job: Job, prompts: list[tuple[int, ...]], healing: Healing | None, constraint: AnyConstraint | None
    ) -> Any:
        """Return the AnswerJob with which a request begins.

        prompts  ids of the prompt (healed, if there is ``healing``), and of the negative prompt if there is guidance

        Raises RequestError if the first draw has no token left.
        """
        bias = TokenBias.of(job.sampling, self._padded, self._eos_ids)
        if bias is not None:
            bias.count_only(job.resumed_ids)
        handle = self._make(
            job,
            [(*prompt, *job.resumed_ids) for prompt in prompts],
            settings_of(job.sampling),
            drawn=-1 if healing else len(job.resumed_ids),
            draws=Draws(job.sampling.seed),
            bias=bias,
            first_bias=self._first_bias(healing.allowed if healing else None, ()),
            constraint=constraint,
            scorer=self._scorer(job),
        )
        handle.limit_draw()
        if constraint and not handle.can_draw():
            raise RequestError("resumed_ids are a whole answer", field="resumed_ids")
        if healing and not handle.can_draw():
            raise RequestError("no token is left that may heal the prompt", field="token_healing")
        return handle

    def redraw_of(self, job: Job, prompts: list[tuple[int, ...]], healing: Healing | None) -> Redraw:
        """Return the function by which an answer of ``job`` goes back.

        The function cancels the AnswerJob and makes another one. The new prompt includes the tokens that were kept.
        Their pages are still in the cache.
        """

        def redraw(old: Any, kept: Sequence[int], blocked: Iterable[int]) -> Any | None:
            if old.constraint is not None:
                old.constraint.back_to(len(kept))
            self._batch.cancel(old)
            new = self._make(
                job,
                [(*prompt, *kept) for prompt in prompts],
                settings_of(job.sampling) | {"mirostat_mu": old.gen_settings.mirostat_mu},
                drawn=len(kept) - (healing is not None),
                draws=old.draws,
                returns=old.returns + 1,
                bias=old.bias,
                first_bias=self._first_bias(healing.allowed if healing and not kept else None, blocked),
                constraint=old.constraint,
            )
            new.limit_draw()
            if not new.can_draw():
                return None
            self._batch.add(new, first=True)
            return new

        return redraw

    def _make(self, job: Job, prompts: list[tuple[int, ...]], settings: dict[str, Any], **varying: Any) -> Any:
        """Return an AnswerJob. ``varying`` are the arguments that change when an answer goes back."""
        sampling = job.sampling
        xtc = (sampling.xtc_probability, sampling.xtc_threshold, self._protected)
        return self._answer_job(
            prompts,
            settings,
            limit=job.max_new_tokens,
            minimum=job.min_new_tokens,
            end_ids=[i for i in {*self._eos_ids, *job.stop_token_ids} if i < self._drawable],
            vocab=self._drawable,
            draft=self._draft_tokens,
            ngrams=self._ngram,
            top=job.top_logprobs,
            sampling=sampling,
            breakers=self._breakers_of(sampling),
            by_rule=self._by_rule,
            xtc=xtc if xtc_is_on(sampling) else None,
            identifier=job.id,
            **varying,
        )

    def _scorer(self, job: Job) -> PromptScorer | None:
        scoring = job.prompt_logprobs
        return None if scoring is None else PromptScorer(PromptPieces(job.id, job.prompt_ids, scoring), self._drawable)

    def _first_bias(self, allowed: Iterable[int] | None, blocked: Iterable[int]) -> torch.Tensor | None:
        """Return the bias that limits only the next draw, or None if nothing limits it."""
        blocked = list(blocked)
        if allowed is None and not blocked:
            return None
        bias = torch.full((self._padded,), 0.0 if allowed is None else NEVER)
        if allowed is not None:
            bias[[token for token in allowed if token < self._drawable]] = 0.0
        bias[blocked] = NEVER
        return bias

    def _breakers_of(self, sampling: SamplingParams) -> Any | None:
        """Return, as bool [vocabulary], which ids end a repeated sequence. Return None without DRY."""
        if not sampling.dry_multiplier:
            return None
        if not sampling.dry_sequence_breakers:
            return self._breakers
        breakers = np.zeros(self._drawable, bool)
        for text in sampling.dry_sequence_breakers:
            breakers[[token for token in self._pieces.holding(text) if token < self._drawable]] = True
        return breakers
