"""The exllamav2 engine with an oracle as its model, and the answers that it must give."""

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

from model_worker.engine import DrawnToken, EngineEvent, Job
from model_worker.engines.exllamav2 import engine as exllamav2_engine
from model_worker.engines.exllamav2.decode.loop import ChunkSizer, DecodeLoop
from model_worker.engines.exllamav2.engine import ExLlamaV2Engine
from model_worker.engines.exllamav2.load import Loaded
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams
from tests.engines.driver import GREEDY, Driver, Outcome
from tests.engines.exllamav2_cpu.oracle import OracleLogits
from tests.engines.exllamav2_cpu.package import import_package, oracle, read_tokenizer
from tests.engines.exllamav2_cpu.queued_steps import QueuedSteps
from tools.demo_models import directory

PAGE = 256
_job_ids = itertools.count(1_000_000)
VOCAB = 448
"""Size of the vocabulary of the demo model ``letters``."""


class Recording:
    """A wrapper of an engine that records all its events."""

    def __init__(self, engine: ExLlamaV2Engine) -> None:
        self._engine = engine
        self.events: list[EngineEvent] = []

    def step(self) -> list[EngineEvent]:
        events = self._engine.step()
        self.events += events
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Harness:
    """An exllamav2 engine whose answers can be checked.

    queues_ahead  whether engines decode with the loop that queues the next step before it reads the last

    pages       number of pages of the cache
    context     in tokens; by default all pages
    speculate   "draft", "ngram" or None
    """

    queues_ahead = False
    steps: QueuedSteps | None

    def __init__(
        self,
        logits: OracleLogits | None = None,
        *,
        pages: int = 8,
        context: int | None = None,
        batch: int = 4,
        chunk: int = PAGE,
        speculate: str | None = None,
        draft: OracleLogits | None = None,
        draft_tokens: int = 3,
        queues_ahead: bool | None = None,
    ) -> None:
        if queues_ahead is not None:
            self.queues_ahead = queues_ahead
        import_package()
        self.logits = logits or OracleLogits(VOCAB)
        size = pages * PAGE
        shape: dict[str, Any] = {"context": context or size, "chunk": chunk, "cache_size": size}
        self.model, self.cache = oracle("letters", self.logits, **shape)
        draft_model, draft_cache = (
            oracle("letters", draft or self.logits, **shape) if speculate == "draft" else (None, None)
        )
        loaded = Loaded(
            core=import_package(),
            generator=import_package().generator,
            attention="oracle",
            model=self.model,
            cache=self.cache,
            tokenizer=read_tokenizer(self.model.config),
            context=context or size,
            chunk_size=chunk,
            cache_size=size,
            draft_model=draft_model,
            draft_cache=draft_cache,
            draft_tokens=draft_tokens if speculate else 0,
            ngram=speculate == "ngram",
            devices=[],
            graphs=self.queues_ahead,
        )
        spec = EngineSpec("m", "exllamav2", str(directory("letters")), device="cuda", max_batch_size=batch)
        self.engine = ExLlamaV2Engine(spec)
        with (
            mock.patch.object(exllamav2_engine, "load", return_value=loaded),
            mock.patch.object(exllamav2_engine, "make_loop", self._make_loop),
        ):
            self.engine.load(lambda *_: None)
        self.generator = self.engine._generator
        self.eos_ids = tuple(self.engine._tokenizer.eos_ids)
        self.recording = Recording(self.engine)
        self.driver = Driver(self.recording)

    def _make_loop(self, loaded: Loaded, generator: Any, drawable: int, _: object) -> tuple[DecodeLoop | None, str]:
        self.steps = None
        if not self.queues_ahead or loaded.draft_tokens:
            return None, "package"
        self.steps = QueuedSteps(generator, generator.max_batch_size, drawable)
        self.pace = ChunkSizer(loaded.chunk_size, limit_s=1e9)
        return DecodeLoop(generator, self.steps, generator.iterate_gen, self.pace), "queued ahead"

    def submit(self, ids: Sequence[int], size: int = 30, sampling: SamplingParams = GREEDY, **fields: Any) -> Outcome:
        """Submit a job. ``fields``: its other fields."""
        job = Job(next(_job_ids), tuple(ids), size, sampling, **fields)
        self.engine.submit(job)
        outcome = self.driver.outcomes[job.id] = Outcome(job)
        return outcome

    def answer(self, ids: Sequence[int], size: int = 30, sampling: SamplingParams = GREEDY, **fields: Any) -> Outcome:
        """Submit a job and run until every job has ended."""
        outcome = self.submit(ids, size, sampling, **fields)
        self.driver.run()
        return outcome

    def logprobs(self, outcome: Outcome) -> list[DrawnToken]:
        return outcome.logprobs

    def expected(self, outcome: Outcome) -> list[int]:
        """Return the greedy answer of a job with its end token, without the tokens that a former worker drew."""
        job = outcome.job
        whole = self.logits.expected(job.prompt_ids, job.max_new_tokens, ends=(*self.eos_ids, *job.stop_token_ids))
        return whole[len(job.resumed_ids) :]

    def check(self) -> None:
        """Check that the ids of every finished job are the greedy answer."""
        for outcome in self.driver.outcomes.values():
            if outcome.finished is not None:
                assert outcome.ids == self.expected(outcome), f"job {outcome.job.id}: another sequence's keys"

    def random_ids(self, rng: random.Random, size: int) -> list[int]:
        """Return random ids for a prompt, without end tokens."""
        return [rng.randrange(3, VOCAB) for _ in range(size)]
