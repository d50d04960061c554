"""The engine exllamav2: ExLlamaV2's dynamic generator, driven on the calling thread and protected from bad requests.

The generator's checks are assertions, and some of its limits are unchecked. So ``submit`` refuses everything that a
request can get wrong. After an exception from ``iterate`` the generator's page table is wrong: it counts keys as cached
that were never written. So no such exception is caught, and the process ends.

The engine itself makes text from the drawn ids, finds stop strings and banned strings, and heals tokens. The package's
own code for this has three faults. It drops the text that it holds back when an end token comes. Python's hash seed
decides which of two stop strings it finds. It reports ids that it took back.
"""

import importlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from model_worker.engine import (
    Capabilities,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Job,
    Prefilling,
    ProgressCallback,
    PromptScoring,
)
from model_worker.engines.base import BaseEngine
from model_worker.engines.constraints import OFFERED as CONSTRAINTS
from model_worker.engines.constraints import AnyConstraint
from model_worker.engines.exllamav2.answer import ExLlamaV2Answer, GuardedAnswer
from model_worker.engines.exllamav2.answer_jobs import AnswerJobs, Batch
from model_worker.engines.exllamav2.check import check
from model_worker.engines.exllamav2.decode.capture import make_loop
from model_worker.engines.exllamav2.load import Loaded, load, make_generator
from model_worker.engines.exllamav2.ngram import propose_for_all
from model_worker.engines.exllamav2.options import offered, read_options
from model_worker.engines.exllamav2.sampling import check_sampling
from model_worker.engines.exllamav2.sleep import KeptPages
from model_worker.engines.vetting import understood
from protocol.errors import ErrorCode, RequestError
from protocol.process.worker_spec import PAGE_TOKENS, EngineSpec
from protocol.request import SamplingParams

# Figures about the generator's last steps, for `status`.


RECENT = 128
"""The number of steps that the figures cover."""


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent: deque[tuple[float, int, int, bool]] = deque(maxlen=RECENT)
        self._defragmented: float | None = None

    def step(self, seconds: float, jobs: int, tokens: int, read: bool) -> None:
        """Note one step.

        seconds  how long the step took
        jobs     number of jobs that got tokens
        tokens   number of tokens that they got
        read     whether a part of a prompt was computed
        """
        self.steps += 1
        self._recent.append((seconds, jobs, tokens, read))

    def defragmented(self) -> None:
        """Note that the generator has looked at its pages. It moves them together if more than a tenth are out of
        order."""
        self._defragmented = time.monotonic()

    def reset(self) -> None:
        """Forget the steps, but not when pages were last moved."""
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent.clear()

    def figures(self) -> dict[str, Any]:
        """Return the figures.

        step_ms             median
        jobs_per_step       mean over steps that made any tokens
        tokens_per_step     mean over steps that made any tokens
        prefill_share       share of steps that computed prompts, 0 to 1
        draft_accepted      share of speculated tokens that were accepted
        defragmented_s_ago  seconds since the generator looked at its pages
        """
        figures: dict[str, Any] = {}
        if self._recent:
            seconds, jobs, tokens, read = zip(*self._recent, strict=True)
            decoding = sum(n > 0 for n in jobs) or 1
            figures["step_ms"] = round(statistics.median(seconds) * 1000, 3)
            figures["jobs_per_step"] = round(sum(jobs) / decoding, 2)
            figures["tokens_per_step"] = round(sum(tokens) / decoding, 2)
            figures["prefill_share"] = round(sum(read) / len(read), 3)
        if speculated := self.draft_accepted + self.draft_rejected:
            figures["draft_accepted"] = round(self.draft_accepted / speculated, 3)
        if self._defragmented is not None:
            figures["defragmented_s_ago"] = round(time.monotonic() - self._defragmented, 1)
        return figures


# The jobs that a new engine computes before it is ready. Pure.
#
# At their first use kernels are loaded and scratch memory grows. That must not delay the first request of any kind.


GREEDY = SamplingParams(temperature=0)
STEPS = 4
"""Tokens of each answer of a full batch."""


def groups(context: int, room: int, chunk_size: int, batch: int, drawable: int, *, scores: bool) -> list[list[Job]]:
    """Return groups of jobs. The jobs of a group are computed together.

    context     tokens of prompt and answer together
    room        tokens of the cache for one sequence
    chunk_size  prompt tokens computed at a time
    batch       answers of a full batch
    drawable    ids below this are in the vocabulary
    scores      whether log-probabilities of prompts are offered
    """
    new = min(STEPS, context - 1)
    longest = min(context, room) - new
    # Chunks are multiples of pages. No two prompts begin alike, so that none is in the cache. The largest comes first,
    # so that PyTorch's allocator reuses its blocks for the others.
    sizes = reversed(range(PAGE_TOKENS, min(longest, chunk_size + 1), PAGE_TOKENS))
    chunks = [[Job(-1, (size // PAGE_TOKENS % drawable,) * (size + 1), 1, GREEDY)] for size in sizes]
    prompts = [(0,) * min(longest, 2 if number else chunk_size + 1) for number in range(batch)]
    full = [Job(-1 - number, prompt, new, GREEDY, min_new_tokens=new) for number, prompt in enumerate(prompts)]
    short = (0,) * min(longest, 2)
    log_probabilities = [Job(-1, short, 1, GREEDY, top_logprobs=1)]
    whole = (0,) * min(longest, chunk_size + 1)
    of_prompts = [Job(-1, whole, 1, GREEDY, prompt_logprobs=PromptScoring(1))] if len(whole) > 1 and scores else []
    return [*chunks, full, log_probabilities, *([of_prompts] if of_prompts else [])]


# Put a loaded model to sleep, and wake it.


class Sleeper:
    """The sleep of one model. All but ``prepare`` and ``absent`` need ``loaded.memory``."""

    def __init__(self, generator: Any, loaded: Loaded, spec: EngineSpec) -> None:
        self._generator, self._loaded, self._prepares = generator, loaded, spec.prepare_sleep
        self._kept = KeptPages(loaded.caches, spec.options.get("sleep_cache", 0)) if loaded.memory is not None else None

    @property
    def absent(self) -> int:
        """Bytes that PyTorch counts as allocated, but that are not on the GPU now."""
        return 0 if self._loaded.memory is None else self._loaded.memory.absent

    @property
    def host_bytes(self) -> int | None:
        """The most host memory that the model takes while it sleeps. None if it cannot sleep."""
        if self._loaded.memory is None or self._kept is None:
            return None
        return self._loaded.memory.host_bytes + self._kept.most_bytes

    def prepare(self) -> bool:
        """See SleepingEngine.prepare_sleep."""
        memory = self._loaded.memory
        return self._prepares and memory is not None and memory.prepare()

    def sleep(self, progress: Callable[[], None]) -> None:
        """Give the GPU memory back. There is no job."""
        assert self._loaded.memory is not None
        assert self._kept is not None
        self._kept.save(self._generator.all_pages)
        torch.cuda.empty_cache()
        self._loaded.memory.sleep(progress)

    def wake(self, progress: Callable[[], None]) -> None:
        """Take the GPU memory again."""
        assert self._loaded.memory is not None
        assert self._kept is not None
        self._loaded.memory.wake(progress)
        self._kept.restore()
        with torch.inference_mode():
            for cache in self._loaded.caches:
                for pair in getattr(cache, "temp_tensors", {}).values():  # quantized caches compute with these
                    for tensor in pair:
                        tensor.zero_()
        torch.cuda.synchronize()


AHEAD = "torch.nn.attention.bias", "setuptools", "triton", "model_worker.engines.exllamav2.gpu_draws.kernels"
"""Modules that loading a model imports, and that do not use the GPU. The first brings PyTorch's compiler, which the
package never uses but imports: 2.6 seconds. The second is part of torch.utils.cpp_extension, which the package imports
and which itself opens the driver."""
THREADED = 3
"""The number of draws in a step from which the generator's threads are worth their cost."""
LARGE_VOCABULARY = 8192
"""The number of ids from which a draw takes longer than handing the draw to a thread."""


def prepare_ahead() -> None:
    """Do what is the same for every model and needs no GPU: Triton's hash over its own files, for which the first
    kernel would wait 0.4 seconds."""
    cache: Any = importlib.import_module("triton.runtime.cache")
    if key := getattr(cache, "triton_key", None):  # Triton remembers it
        key()


class ExLlamaV2Engine(BaseEngine):
    """The engine that serves one model with ExLlamaV2. ``exllamav2.options`` describes its options."""

    _answers: dict[int, ExLlamaV2Answer]

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        read_options(spec)  # raises LoadError for wrong options
        self._spec = spec
        self._scored: dict[int, Any] = {}
        """The AnswerJobs by job, whose prompts have log-probabilities that are not reported yet."""
        self._meter = Meter()

    def load(self, progress: ProgressCallback) -> None:
        """Load the model onto the visible GPUs and warm up. Raises LoadError."""
        checked = check(self._spec)
        assert checked.tokenizer is not None, "build_engine has seen that its packages are there"
        with understood(self._spec.model_dir):
            pieces = checked.tokenizer.pieces
        loaded = self._loaded = load(checked, progress, sleep=self._spec.sleep)
        self._generator = make_generator(loaded, self._spec.max_batch_size)
        if loaded.ngram:
            self._generator.iterate_ngram_gen = lambda results: propose_for_all(self._generator)
        self._batch = Batch(self._generator, loaded.chunk_size, self._meter.defragmented)
        config = loaded.model.config
        self._set_vocabulary(checked.tokenizer, int(config.vocab_size), int(loaded.tokenizer.get_vocab_size()))
        eos_ids = self._tokenizer.eos_ids
        self._jobs = AnswerJobs(loaded, self._batch, self._generator.padded_vocab_size, self._drawable, eos_ids)
        self._sleeper = Sleeper(self._generator, loaded, self._spec)
        self._loop, decoding = make_loop(loaded, self._generator, self._drawable, progress)
        self._capabilities = Capabilities(
            context=min(loaded.context, int(config.max_seq_len) - max(loaded.draft_tokens - 1, 0)),
            max_batch_size=self._spec.max_batch_size,
            offered=offered(speculates=loaded.draft_tokens > 0, tensor_parallel=loaded.model.tp_context is not None)
            - (frozenset() if pieces else {"token_healing"})
            | (CONSTRAINTS if pieces else frozenset()),
            chat=self._tokenizer.has_chat_template,
            device=", ".join(dict.fromkeys(torch.cuda.get_device_name(index) for index in loaded.devices)),
            attention=loaded.attention,
            decoding=decoding,
            sleep_bytes=self._sleeper.host_bytes,
            no_sleep=loaded.no_sleep,
            end_ids=frozenset(eos_ids),
        )
        self._warm_up(loaded, progress)

    def _warm_up(self, loaded: Loaded, progress: ProgressCallback) -> None:
        """Compute jobs of all kinds, so that the first requests wait for nothing that is loaded at first use."""
        room = self._generator.max_pages * PAGE_TOKENS - loaded.draft_tokens
        together = groups(
            self.capabilities.context, room, loaded.chunk_size, self._spec.max_batch_size, self._drawable,
            scores="prompt_logprobs" in self.capabilities.offered,
        )  # fmt: skip
        for done, group in enumerate(together):
            progress("warmup", done, len(together))
            for job in group:
                self.submit(job)
            while self._answers:
                self.step()
        progress("warmup", len(together), len(together))
        for index in loaded.devices:
            torch.cuda.synchronize(index)
        self.reset()
        self._meter.reset()

    def pages_needed(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return how many pages of 256 tokens a job of this size reserves when it starts. A cached prefix may save
        some of them."""
        return -(-(prompt_tokens + max_new_tokens + self._loaded.draft_tokens) // PAGE_TOKENS)

    def _check(self, job: Job) -> None:
        """Raise RequestError for a job that would make the package fail an assertion, or read beyond the end of a
        table."""
        super()._check(job)
        check_sampling(job.sampling)
        self._check_pages(job, self._prompts(job))
        if job.token_healing and job.sampling.cfg_scale != 1.0:
            raise RequestError(
                "token_healing and cfg_scale are not offered together", field="token_healing",
                code=ErrorCode.UNSUPPORTED,
            )  # fmt: skip

    def _queue(self, job: Job, constraint: AnyConstraint | None) -> None:
        healing = self._healer.heal(job.prompt_ids) if job.token_healing and self._healer else None
        prompts = [healing.prompt_ids] if healing else self._prompts(job)
        handle = self._jobs.first(job, prompts, healing, constraint)
        stream = partial(self._tokenizer.stream, layout=job.layout)
        answer = (
            GuardedAnswer(job, handle, stream, self._jobs.redraw_of(job, prompts, healing), healing)
            if job.banned_strings or healing  # a GuardedAnswer finds stop strings in a healed token
            else ExLlamaV2Answer(job, handle, stream(prompts[0]), healing)
        )
        self._batch.add(handle)
        self._answers[job.id] = answer
        if handle.scorer is not None:
            self._scored[job.id] = handle

    def _prompts(self, job: Job) -> list[tuple[int, ...]]:
        """Return the prompt, and the negative prompt if there is guidance. Raises RequestError if the guidance cannot
        be computed."""
        if job.sampling.cfg_scale == 1.0:
            return [job.prompt_ids]
        if self._spec.max_batch_size < 2:
            raise RequestError(
                "cfg_scale computes two sequences, and this model's max_batch_size is 1", field="cfg_scale",
                code=ErrorCode.UNSUPPORTED,
            )  # fmt: skip
        if not job.negative_ids:
            raise RequestError("negative_prompt has no tokens", field="negative_prompt")
        return [job.prompt_ids, job.negative_ids]

    def _check_pages(self, job: Job, prompts: list[tuple[int, ...]]) -> None:
        """Raise RequestError for a job that needs more pages than the cache has. Such a job would wait for ever.

        The package checks this, too, but it does not count the first of two sequences.
        """
        pages = sum(self.pages_needed(len(prompt), job.max_new_tokens) for prompt in prompts)
        if len(prompts) == 2:
            shorter = (min(map(len, prompts)) - 1) // PAGE_TOKENS
            pages -= next((n for n in range(shorter) if _page(prompts[0], n) != _page(prompts[1], n)), shorter)
        if pages > self._generator.max_pages:
            raise RequestError(
                f"the request needs {pages} pages of {PAGE_TOKENS} tokens, the cache has {self._generator.max_pages}",
                field="max_tokens",
                code=ErrorCode.CONTEXT_OVERFLOW,
            )

    def cancel(self, job_id: int) -> None:
        if self._constraints is not None and self._constraints.cancel(job_id):
            return
        answer = self._answers.pop(job_id, None)
        self._scored.pop(job_id, None)
        if answer is not None:
            self._batch.cancel(answer.handle)

    def reset(self) -> None:
        """Forget all jobs and every cached page."""
        if self._constraints is not None:
            self._constraints.clear()
        if self._loop is not None:
            self._loop.forget()
        self._batch.clear()
        self._answers.clear()
        self._scored.clear()

    def step(self) -> list[EngineEvent]:
        """Run one round of the generator: a chunk of every prompt that is being read, then a token of every answer.

        No token is drawn while answers are about to begin: see ``Batch.open``.
        """
        answers = self._answers
        events = self._queue_constrained()
        if not answers:
            return events
        before = time.monotonic()
        for handle in self._batch.start():
            answers[handle.identifier].begin(before)
        results: list[Any] = []
        if self._batch.open(results):
            self._meter.step(time.monotonic() - before, 0, 0, True)
            events += self._prompt_logprobs()
            return events + [said for result in results if (said := self._progress(result)) is not None]
        self._generator.min_sampling_threads = THREADED if self._is_worth_threads() else 1 << 30
        if self._loop is not None:
            self._loop.iterate(results)
        else:
            results += self._generator.iterate()
        now = time.monotonic()
        if self._scored:
            events += self._prompt_logprobs()
        jobs = tokens = 0
        read = False
        for result in results:
            if type(result) is dict:
                read = read or result["stage"] == "prefill"
                if (progress := self._progress(result)) is not None:
                    events.append(progress)
                continue
            jobs += 1
            tokens += len(result.fresh)
            answer = answers[result.identifier]
            try:
                event = answer.take(now)
            except RequestError as e:  # a constraint has become too costly after the answer went back
                event = Failed(answer.job.id, e)
            if event is None:
                continue
            if type(event) is Finished or type(event) is Failed:
                self._finish(answer, event)
            events.append(event)
        self._meter.step(now - before, jobs, tokens, read)
        return events

    def _prompt_logprobs(self) -> list[EngineEvent]:
        """Return the log-probabilities of prompts that have come from the GPU: all of them before the first token."""
        events: list[EngineEvent] = []
        for job_id, handle in list(self._scored.items()):
            events += handle.scorer.take(wait=bool(handle.fresh))
            if handle.scorer.done:
                del self._scored[job_id]
        return events

    def _progress(self, result: dict[str, Any]) -> Prefilling | None:
        """Return how far a prompt has been read. Return None if the prompt is complete, or if the answer has begun and
        its prompt is read again because the answer went back."""
        if result["stage"] != "prefill" or result["curr_progress"] == result["max_progress"]:
            return None
        if result["job"].begun:
            return None
        # The last token of each sequence is computed together with the first draw.
        total = result["max_progress"] + len(result["job"].sequences)
        return Prefilling(result["identifier"], result["curr_progress"], total)

    def _is_worth_threads(self) -> bool:
        """Return whether the step's draws should run on the generator's threads.

        Handing a draw to a thread, and getting the interpreter's lock back, takes time. It is worth that time for draws
        that read a large vocabulary more than once.
        """
        if self._drawable < LARGE_VOCABULARY:
            return False
        return sum(not answer.handle.shortcut for answer in self._answers.values()) >= THREADED

    def _finish(self, answer: ExLlamaV2Answer, event: Finished | Failed) -> None:
        del self._answers[event.job]
        self._scored.pop(event.job, None)
        handle = answer.handle
        if handle.ended is None:
            self._batch.cancel(handle)
        if isinstance(event, Failed):
            return
        self._meter.draft_accepted += event.draft_accepted
        self._meter.draft_rejected += event.draft_rejected

    def stats(self) -> EngineStats:
        """Return the current figures. ``extra`` is flat:

        prefilling    jobs whose prompt is being read
        pages_used    pages that jobs hold
        pages_cached  free pages that a prompt with the same beginning can use again
        pages_total   all pages
        vram_used     bytes of VRAM that PyTorch holds

        and the figures of ``Meter.figures``.
        """
        generator, batch = self._generator, self._batch
        return EngineStats(
            pending=batch.waiting + len(self._constraints or ()),
            active=batch.active,
            steps=self._meter.steps,
            extra={
                "prefilling": batch.reading,
                "pages_used": len(generator.referenced_pages),
                "pages_cached": sum(page.kv_position > 0 for page in generator.unreferenced_pages.values()),
                "pages_total": generator.max_pages,
                "vram_used": sum(torch.cuda.memory_reserved(index) for index in self._loaded.devices)
                - self._sleeper.absent,
                **self._meter.figures(),
            },
        )

    def prepare_sleep(self) -> bool:
        return self._sleeper.prepare()

    def sleep(self, progress: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.forget()
        self._sleeper.sleep(progress)

    def wake(self, progress: Callable[[], None]) -> None:
        self._sleeper.wake(progress)


def _page(ids: Sequence[int], number: int) -> Sequence[int]:
    return ids[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
