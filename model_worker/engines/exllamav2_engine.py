"""ExLlamaV2's dynamic generator, driven on the calling thread and kept from what it does not survive.

Its checks are assertions and its limits partly unchecked, so everything that a request can get wrong is refused in
``submit``. An exception from ``iterate`` leaves its page table wrong (keys that were never written count as cached), so
none is caught: the process ends.

Stop strings are looked for here, not by the package: it keeps them in a set, so which of two that overlap is found
depends on Python's hash seed; it does not look for them at the last token allowed; and an empty one holds the answer
back for ever. Its text is not used either: held pieces of characters are joined wrongly at an end token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_worker.engine import (
    Capabilities,
    Delta,
    EngineEvent,
    EngineStats,
    Finished,
    Job,
    ProgressCallback,
)
from model_worker.engines.admission import check_job, is_greedy
from model_worker.engines.exllamav2_load import load, make_generator
from model_worker.engines.exllamav2_options import PAGE, read_options
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from model_worker.text import TextStream
from protocol.errors import ErrorCode, RequestError
from protocol.request import ChatMessage, SamplingParams
from protocol.worker_spec import EngineSpec

OFFERED = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
    }
)


class AnswerPenalty:
    """Frequency and presence penalty over the answer alone, as a bias on the logits.

    The package's own penalties of these names count the prompt too.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self.bias = torch.zeros(vocab_size, dtype=torch.float32)  # read by address: never replaced
        self._seen: set[int] = set()

    def count(self, token: int) -> None:
        """One more token of the answer."""
        self.bias[token] -= self._frequency if token in self._seen else self._frequency + self._presence
        self._seen.add(token)


@dataclass(slots=True)
class _Running:
    job: Job
    handle: Any
    text: TextStream
    penalty: AnswerPenalty | None
    counted: int  # tokens of the sequence that the penalty has seen
    generated: int = 0
    started: float | None = None
    first_token: float | None = None


class ExLlamaV2Engine:
    """See the module. Options are ``exllamav2_options.ExLlamaV2Options``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._options = read_options(spec)
        self._spec = spec
        self._running: dict[int, _Running] = {}
        self._penalized: dict[int, _Running] = {}
        self._steps = 0
        self._capabilities: Capabilities | None = None

    def load(self, progress: ProgressCallback) -> None:
        """Load onto the first visible GPU and warm up. Raises LoadError."""
        directory = ModelDir(self._spec.model_dir)
        self._tokenizer = Tokenizer(directory)
        loaded = load(self._spec, self._options, directory, progress)
        self._package = loaded.generator
        self._vocab_size = int(loaded.model.config.vocab_size)
        self._generator = make_generator(loaded, self._spec.max_batch_size)
        self._capabilities = Capabilities(
            context=loaded.context,
            max_batch_size=self._spec.max_batch_size,
            offered=OFFERED,
            chat=self._tokenizer.has_chat_template,
            device=torch.cuda.get_device_name(0),
            attention=loaded.attention,
        )
        self._warm_up(loaded.chunk_size, progress)

    def _warm_up(self, chunk_size: int, progress: ProgressCallback) -> None:
        """Run a full chunk and a few steps of a full batch: kernels load, and scratch memory grows, at first use."""
        batch = self._spec.max_batch_size
        new = min(4, self.capabilities.context - 1)
        room = self.capabilities.context - new
        for number in range(batch):
            prompt = (0,) * min(room, 2 if number else chunk_size + 1)
            self.submit(Job(-1 - number, prompt, new, SamplingParams(temperature=0)))
        steps = 0
        progress("warmup", 0, new)
        while self._running:
            self.step()
            steps += 1
            progress("warmup", min(steps, new), new)
        torch.cuda.synchronize()
        self.reset()
        self._steps = 0

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "load() first"
        return self._capabilities

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self._tokenizer.encode_chat(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def pages_needed(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Pages of 256 tokens, all of them reserved when the job starts; shared prefixes may save some."""
        return -(-(prompt_tokens + max_new_tokens) // PAGE)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError for everything that the package would assert, or read beyond a table for."""
        if job.id in self._running:
            raise ValueError(f"job id {job.id} is in use")
        check_job(job, self.capabilities, self._vocab_size)
        pages = self.pages_needed(len(job.prompt_ids), job.max_new_tokens)
        if pages > self._generator.max_pages:
            raise RequestError(
                f"the request needs {pages} pages of {PAGE} tokens, the cache has {self._generator.max_pages}",
                field="max_tokens",
                code=ErrorCode.CONTEXT_OVERFLOW,
            )
        sampling, penalty = job.sampling, None
        if sampling.frequency_penalty or sampling.presence_penalty:
            penalty = AnswerPenalty(sampling, self._generator.padded_vocab_size)
        handle = self._package.ExLlamaV2DynamicJob(
            input_ids=torch.tensor([job.prompt_ids], dtype=torch.long),
            max_new_tokens=job.max_new_tokens,
            gen_settings=self._settings(sampling, penalty),
            seed=sampling.seed,
            stop_conditions=list(self._tokenizer.eos_ids),  # none is implied
            identifier=job.id,
        )
        self._generator.enqueue(handle)
        text = self._tokenizer.stream(job.prompt_ids, job.stop)
        running = _Running(job, handle, text, penalty, counted=len(job.prompt_ids))
        self._running[job.id] = running
        if penalty:
            self._penalized[job.id] = running

    def _settings(self, sampling: SamplingParams, penalty: AnswerPenalty | None) -> Any:
        """The package's settings for one job. Its defaults are not neutral, so each that draws is given."""
        greedy = is_greedy(sampling)
        return self._package.ExLlamaV2Sampler.Settings(
            token_repetition_penalty=sampling.repetition_penalty,
            token_repetition_range=-1,
            token_repetition_decay=0,
            token_frequency_penalty=0.0,
            token_presence_penalty=0.0,
            temperature=1.0 if greedy else sampling.temperature,
            top_k=1 if greedy else sampling.top_k,
            top_p=0.0 if greedy else sampling.top_p,
            min_p=0.0 if greedy else sampling.min_p,
            smoothing_factor=0.0,
            min_temp=0.0,
            max_temp=0.0,
            top_a=0.0,
            tfs=0.0,
            typical=0.0,
            skew=0.0,
            temperature_last=False,
            mirostat=False,
            cfg_scale=None,
            dry_multiplier=0.0,
            xtc_probability=0.0,
            token_bias=penalty.bias if penalty else None,
        )

    def cancel(self, job_id: int) -> None:
        running = self._running.pop(job_id, None)
        self._penalized.pop(job_id, None)
        if running is not None:
            self._generator.cancel(running.handle)

    def reset(self) -> None:
        """Forget all jobs and every cached page."""
        self._generator.clear_queue()
        self._generator.reset_page_table()
        self._running.clear()
        self._penalized.clear()

    def step(self) -> list[EngineEvent]:
        """One round of the generator: a chunk of every prompt that is being read, then a token of every answer."""
        if not self._running:
            return []
        self._steps += 1
        for running in self._penalized.values():
            self._count(running)
        before = time.monotonic()
        results = self._generator.iterate()
        now = time.monotonic()
        events: list[EngineEvent] = []
        for result in results:
            running = self._running[result["identifier"]]
            if result["stage"] == "started":
                running.started = before
            elif result["stage"] == "streaming":
                if running.first_token is None:
                    running.first_token = now
                events += self._streamed(running, result, now)
        return events

    def _count(self, running: _Running) -> None:
        """Tell a job's penalty the tokens drawn since; held ones are in no event yet."""
        sequence = running.handle.sequences[0].sequence_ids
        if len(sequence) > running.counted and running.penalty is not None:
            for token in sequence.torch()[0, running.counted :].tolist():
                running.penalty.count(token)
            running.counted = len(sequence)

    def _streamed(self, running: _Running, result: dict[str, Any], now: float) -> list[EngineEvent]:
        """What one round brought for a job. Text is made here, from ids: see the module."""
        ids = _ids(result)
        if result["eos"]:
            # what the package held (half a character) when the end token came is in no other place
            ids += _ids(result.get("held", {}))
        running.generated += len(ids)
        at_end_token = result["eos"] and result["eos_reason"] == "stop_token"
        text, found = "", False
        for token in ids[:-1] if at_end_token else ids:
            new, found = running.text.push(token)
            text += new
            if found:
                break
        if not found and not result["eos"]:
            return [Delta(running.job.id, ids, text)] if ids else []
        reason = "stop" if found or at_end_token else "length"
        if not found:
            text += running.text.finish()
        elif not result["eos"]:
            self._generator.cancel(running.handle)
        return [self._finished(running, ids, text, reason, now)]

    def _finished(self, running: _Running, ids: list[int], text: str, reason: str, now: float) -> Finished:
        job, handle = running.job, running.handle
        del self._running[job.id]
        self._penalized.pop(job.id, None)
        started, first = running.started or now, running.first_token or now
        return Finished(
            job.id,
            ids,
            text,
            reason,
            prompt_tokens=len(job.prompt_ids),
            completion_tokens=running.generated,
            cached_tokens=int(handle.cached_pages * PAGE + handle.cached_tokens),
            prefill_s=first - started,
            decode_s=now - first,
        )

    def stats(self) -> EngineStats:
        """``extra``: pages in use, cached (reusable by a prompt that begins alike) and in all."""
        generator = self._generator
        return EngineStats(
            pending=len(generator.pending_jobs),
            active=len(generator.active_jobs),
            steps=self._steps,
            extra={
                "pages_used": len(generator.referenced_pages),
                "pages_cached": sum(1 for page in generator.unreferenced_pages.values() if page.kv_position),
                "pages_total": generator.max_pages,
                "prefilling": sum(not job.is_prefill_done() for job in generator.active_jobs),
            },
        )

    def close(self) -> None:
        """Nothing to do: the process ends right after, and its VRAM is free."""


def _ids(result: dict[str, Any]) -> list[int]:
    """Token ids of an event or of what it holds: a tensor [1, n], absent for none."""
    ids = result.get("token_ids")
    return [] if ids is None else list(map(int, ids[0].tolist()))
