"""An engine without torch that says how much of a prompt it has read before. Named by an import string."""

from hashlib import blake2b

from model_worker.engine import EngineEvent, Finished, Job
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

PAGE = 64
"""Tokens of a page. The engine finds whole pages of a prompt, as paged caches do."""


class CachingEngine(DeterministicEngine):
    """A deterministic engine that counts the first pages of a prompt as cached if an earlier prompt began with them."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._pages: set[bytes] = set()
        self._cached: dict[int, int] = {}

    def submit(self, job: Job) -> None:
        super().submit(job)
        prompt, cached = bytes(job.prompt_ids), 0
        for end in range(PAGE, len(prompt), PAGE):
            page = blake2b(prompt[:end], digest_size=16).digest()
            if page in self._pages:
                cached = end
            self._pages.add(page)
        self._cached[job.id] = cached

    def step(self) -> list[EngineEvent]:
        events = super().step()
        for event in events:
            if isinstance(event, Finished):
                event.cached_tokens = self._cached.pop(event.job)
        return events

    def cancel(self, job_id: int) -> None:
        super().cancel(job_id)
        self._cached.pop(job_id, None)
