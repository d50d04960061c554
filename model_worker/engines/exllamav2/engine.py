"""ExLlamaV2's dynamic generator, driven on the calling thread and kept from what it does not survive.

Its checks are assertions and its limits partly unchecked, so everything that a request can get wrong is refused in
``submit``. An exception from ``iterate`` leaves its page table wrong (keys that were never written count as cached), so
none is caught: the process ends.

Text, stop strings, token healing and banned strings are made here, from ids, not by the package: it drops text held at
an end token, finds one of two stop strings by Python's hash seed, and reports ids that it took back.
"""

import importlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engine import (
    Capabilities,
    ChatTemplate,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Job,
    Prefilling,
    ProgressCallback,
)
from model_worker.engines.admission import check_job
from model_worker.engines.constraint import OFFERED as CONSTRAINTS
from model_worker.engines.constraint import WAIT_S, Constraint, Constraints
from model_worker.engines.draws import Draws
from model_worker.engines.exllamav2.answer import Answer, GuardedAnswer, Redraw
from model_worker.engines.exllamav2.batch import Batch
from model_worker.engines.exllamav2.check import check
from model_worker.engines.exllamav2.load import Loaded, load, make_generator
from model_worker.engines.exllamav2.meter import Meter
from model_worker.engines.exllamav2.ngram import propose_for_all
from model_worker.engines.exllamav2.options import PAGE, offered, read_options
from model_worker.engines.exllamav2.sampling import (
    NEVER,
    PieceSearch,
    TokenBias,
    check_sampling,
    settings_of,
    xtc_is_on,
)
from model_worker.engines.healing import Healer, Healing
from model_worker.engines.vetting import understood
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams

THREADED = 3
"""Draws of a step that are worth the generator's threads."""
LARGE_VOCABULARY = 8192


class ExLlamaV2Engine:
    """See the module; options in ``exllamav2.options``."""

    def __init__(self, spec: EngineSpec) -> None:
        read_options(spec)  # the constructor refuses wrong options
        self._spec = spec
        self._answers: dict[int, Answer] = {}
        self._meter = Meter()
        self._capabilities: Capabilities | None = None

    def load(self, progress: ProgressCallback) -> None:
        """Load onto the visible GPUs and warm up. Raises LoadError."""
        checked = check(self._spec)
        assert checked.tokenizer is not None, "build_engine has seen that its packages are there"
        self._tokenizer = checked.tokenizer
        with understood(self._spec.model_dir):
            pieces = self._tokenizer.pieces
        loaded = self._loaded = load(checked, progress)
        self._generator = make_generator(loaded, self._spec.max_batch_size)
        if loaded.ngram:
            self._generator.iterate_ngram_gen = lambda results: propose_for_all(self._generator)
        self._batch = Batch(self._generator, loaded.chunk_size, self._meter.defragmented)
        self._new_job = importlib.import_module("model_worker.engines.exllamav2.job").AnswerJob
        config = loaded.model.config
        self._vocab_size = int(config.vocab_size)  # rows of the embedding
        self._drawable = min(self._vocab_size, int(loaded.tokenizer.get_vocab_size()))
        eos_ids = self._tokenizer.eos_ids
        self._healer = Healer(pieces) if pieces else None
        self._constraints = Constraints(pieces, self._drawable, eos_ids) if pieces else None
        self._pieces = PieceSearch(loaded.tokenizer.get_id_to_piece_list(True))
        sampler = loaded.generator.ExLlamaV2Sampler
        self._protected = sampler.get_default_xtc_mask_tokens(loaded.tokenizer)
        punctuation = sampler.get_dry_default_sequence_breaker_tokens(loaded.tokenizer)
        self._breakers = np.zeros(self._drawable, bool)
        self._breakers[[token for token in punctuation if token < self._drawable]] = True
        self._capabilities = Capabilities(
            context=min(loaded.context, int(config.max_seq_len) - max(loaded.draft_tokens - 1, 0)),
            max_batch_size=self._spec.max_batch_size,
            offered=offered(loaded.draft_tokens > 0) - (frozenset() if self._healer else {"token_healing"})
            | (CONSTRAINTS if pieces else frozenset()),
            chat=self._tokenizer.has_chat_template,
            device=", ".join(dict.fromkeys(torch.cuda.get_device_name(index) for index in loaded.devices)),
            attention=loaded.attention,
        )
        self._warm_up(loaded, progress)

    def _warm_up(self, loaded: Loaded, progress: ProgressCallback) -> None:
        """Run a full chunk and a few steps of a full batch: kernels load, and scratch memory grows, at first use."""
        context = self.capabilities.context
        new = min(4, context - 1)
        room = min(context, self._generator.max_pages * PAGE - loaded.draft_tokens) - new
        for number in range(self._spec.max_batch_size):
            prompt = (0,) * min(room, 2 if number else loaded.chunk_size + 1)
            self.submit(Job(-1 - number, prompt, new, SamplingParams(temperature=0), min_new_tokens=new))
        steps = 0
        progress("warmup", 0, new)
        while self._answers:
            self.step()
            steps += 1
            progress("warmup", min(steps, new), new)
        progress("warmup", new, new)
        for index in loaded.devices:
            torch.cuda.synchronize(index)
        self.reset()
        self._meter.reset()

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "load() first"
        return self._capabilities

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    @property
    def constraints(self) -> Constraints | None:
        return self._constraints

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._tokenizer.chat_template

    def encode_rendered(self, text: str) -> list[int]:
        return self._tokenizer.encode_rendered(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode_given(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def pages_needed(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Pages of 256 tokens, all of them reserved when the job starts; shared prefixes may save some."""
        return -(-(prompt_tokens + max_new_tokens + self._loaded.draft_tokens) // PAGE)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError for everything that the package would assert, or read beyond a table for."""
        if job.id in self._answers or (self._constraints and job.id in self._constraints):
            raise ValueError(f"job id {job.id} is in use")
        check_job(job, self.capabilities, self._vocab_size, self._drawable, self._tokenizer.eos_ids)
        check_sampling(job.sampling)
        prompts = self._prompts(job)
        self._check_pages(job, prompts)
        if job.constraint is not None and self._constraints is not None:  # offered only if it is not
            self._constraints.add(job)
        else:
            self._queue(job, prompts)

    def _queue(self, job: Job, prompts: list[tuple[int, ...]], constraint: Constraint | None = None) -> None:
        sampling, healing = job.sampling, self._healing(job)
        if healing:
            prompts = [healing.prompt_ids]
        bias = TokenBias.of(sampling, self._generator.padded_vocab_size, self._tokenizer.eos_ids)
        if bias is not None:
            bias.count_only(job.resumed_ids)
        handle = self._job(
            job,
            [(*prompt, *job.resumed_ids) for prompt in prompts],
            settings_of(sampling),
            drawn=-1 if healing else len(job.resumed_ids),
            draws=Draws(sampling.seed),
            bias=bias,
            first_bias=self._first_bias(healing.allowed if healing else None, ()),
            constraint=constraint,
        )
        handle.limit_draw(self._generator.padded_vocab_size)
        if constraint and not handle.can_draw():
            raise RequestError("resumed_ids are a whole answer", field="resumed_ids")
        if healing and not handle.can_draw():
            raise RequestError("no token is left that may heal the prompt", field="token_healing")
        stream = self._tokenizer.stream
        answer = (
            GuardedAnswer(job, handle, stream, self._redraw_of(job, prompts, healing), healing)
            if job.banned_strings or healing  # stop strings are looked for in what a healed token brings
            else Answer(job, handle, stream(prompts[0]), healing)
        )
        self._batch.add(handle)
        self._answers[job.id] = answer

    def _job(self, job: Job, prompts: list[tuple[int, ...]], settings: dict[str, Any], **kwargs: Any) -> Any:
        """An AnswerJob with what does not change when it is drawn anew from some token on."""
        sampling = job.sampling
        xtc = (sampling.xtc_probability, sampling.xtc_threshold, self._protected, sampling.skew)
        return self._new_job(
            prompts,
            settings,
            limit=job.max_new_tokens,
            minimum=job.min_new_tokens,
            end_ids=[i for i in {*self._tokenizer.eos_ids, *job.stop_token_ids} if i < self._drawable],
            vocab=self._drawable,
            draft=self._loaded.draft_tokens,
            ngrams=self._loaded.ngram,
            top=job.top_logprobs,
            sampling=sampling,
            breakers=self._breakers_of(sampling),
            xtc=xtc if xtc_is_on(sampling) else None,
            identifier=job.id,
            **kwargs,
        )

    def _healing(self, job: Job) -> Healing | None:
        if not job.token_healing:
            return None
        if job.sampling.cfg_scale != 1.0:
            raise RequestError(
                "token_healing and cfg_scale are not offered together", field="token_healing",
                code=ErrorCode.UNSUPPORTED,
            )  # fmt: skip
        if self._healer is None:
            raise RequestError(
                "token_healing is not offered by this model", field="token_healing", code=ErrorCode.UNSUPPORTED
            )
        return self._healer.heal(job.prompt_ids)

    def _first_bias(self, allowed: Iterable[int] | None, blocked: Iterable[int]) -> torch.Tensor | None:
        """What the next draw is limited to; None for nothing."""
        blocked = list(blocked)
        if allowed is None and not blocked:
            return None
        bias = torch.full((self._generator.padded_vocab_size,), 0.0 if allowed is None else NEVER)
        if allowed is not None:
            bias[[token for token in allowed if token < self._drawable]] = 0.0
        bias[blocked] = NEVER
        return bias

    def _redraw_of(self, job: Job, prompts: list[tuple[int, ...]], healing: Healing | None) -> Redraw:
        """How an answer of ``job`` goes back: the package's job is cancelled, and one whose prompt is what was kept
        takes its place. The pages are still there."""

        def redraw(old: Any, kept: Sequence[int], blocked: Iterable[int]) -> Any | None:
            if old.constraint is not None:
                old.constraint.back_to(len(kept))
            self._batch.cancel(old)
            new = self._job(
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
            new.limit_draw(self._generator.padded_vocab_size)
            if not new.can_draw():
                return None
            self._batch.add(new, first=True)
            return new

        return redraw

    def _prompts(self, job: Job) -> list[tuple[int, ...]]:
        """The sequences of a job. Raises RequestError for guidance that cannot be computed."""
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
        """Raise RequestError for a job that would wait for ever. The package forgets the first of two sequences."""
        pages = sum(self.pages_needed(len(prompt), job.max_new_tokens) for prompt in prompts)
        if len(prompts) == 2:
            shorter = (min(map(len, prompts)) - 1) // PAGE
            pages -= next((n for n in range(shorter) if _page(prompts[0], n) != _page(prompts[1], n)), shorter)
        if pages > self._generator.max_pages:
            raise RequestError(
                f"the request needs {pages} pages of {PAGE} tokens, the cache has {self._generator.max_pages}",
                field="max_tokens",
                code=ErrorCode.CONTEXT_OVERFLOW,
            )

    def _breakers_of(self, sampling: SamplingParams) -> Any | None:
        """Which ids end a repeated sequence, bool [vocabulary]; None without DRY."""
        if not sampling.dry_multiplier:
            return None
        if not sampling.dry_sequence_breakers:
            return self._breakers
        breakers = np.zeros(self._drawable, bool)
        for text in sampling.dry_sequence_breakers:
            breakers[[token for token in self._pieces.holding(text) if token < self._drawable]] = True
        return breakers

    def cancel(self, job_id: int) -> None:
        if self._constraints is not None and self._constraints.cancel(job_id):
            return
        answer = self._answers.pop(job_id, None)
        if answer is not None:
            self._batch.cancel(answer.handle)

    def reset(self) -> None:
        """Forget all jobs and every cached page."""
        if self._constraints is not None:
            self._constraints.clear()
        self._batch.clear()
        self._answers.clear()

    def step(self) -> list[EngineEvent]:
        """One round of the generator: a chunk of every prompt that is being read, then a token of every answer (none
        yet where answers are about to begin: see ``Batch.open``)."""
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
            return events + [said for result in results if (said := self._progress(result)) is not None]
        self._generator.min_sampling_threads = THREADED if self._is_worth_threads() else 1 << 30
        results += self._generator.iterate()
        now = time.monotonic()
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
            except RequestError as e:  # a constraint has become too costly where the answer went back
                event = Failed(answer.job.id, e)
            if event is None:
                continue
            if type(event) is Finished or type(event) is Failed:
                self._finish(answer, event)
            events.append(event)
        self._meter.step(now - before, jobs, tokens, read)
        return events

    def _progress(self, result: dict[str, Any]) -> Prefilling | None:
        """How far a prompt is; None where it has been read, and for an answer that goes back."""
        if result["stage"] != "prefill" or result["curr_progress"] == result["max_progress"]:
            return None
        if result["job"].begun:
            return None
        # the last token of each sequence is computed with the first draw
        total = result["max_progress"] + len(result["job"].sequences)
        return Prefilling(result["identifier"], result["curr_progress"], total)

    def _is_worth_threads(self) -> bool:
        """Whether the step's draws take longer than handing them to the generator's threads, and getting the
        interpreter's lock back from them: those that look at a large vocabulary more than once."""
        if self._drawable < LARGE_VOCABULARY:
            return False
        return sum(not answer.handle.shortcut for answer in self._answers.values()) >= THREADED

    def _queue_constrained(self) -> list[EngineEvent]:
        """Queue the jobs whose constraints are compiled."""
        failed: list[EngineEvent] = []
        if self._constraints is None or not self._constraints:
            return failed
        for job, constraint in self._constraints.ready(0.0 if self._answers else WAIT_S):
            try:
                self._queue(job, self._prompts(job), constraint())
            except WireError as e:
                failed.append(Failed(job.id, e))
        return failed

    def _finish(self, answer: Answer, event: Finished | Failed) -> None:
        del self._answers[event.job]
        handle = answer.handle
        if handle.ended is None:
            self._batch.cancel(handle)
        if isinstance(event, Failed):
            return
        self._meter.draft_accepted += event.draft_accepted
        self._meter.draft_rejected += event.draft_rejected

    def stats(self) -> EngineStats:
        """``extra``, flat: pages in use, cached (reusable by a prompt that begins alike) and in all; prefilling jobs;
        bytes of VRAM that PyTorch holds; what ``Meter.figures`` says."""
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
                "vram_used": sum(torch.cuda.memory_reserved(index) for index in self._loaded.devices),
                **self._meter.figures(),
            },
        )

    def close(self) -> None:
        """End the process that tries constraints. The VRAM is free when the process ends, right after."""
        if self._constraints is not None:
            self._constraints.close()


def _page(ids: Sequence[int], number: int) -> Sequence[int]:
    return ids[number * PAGE : (number + 1) * PAGE]
