"""Engines that die of some requests, for ``benchmarks.recovery``, which names them by import strings.

``TorchFree``, ``Embedded`` and ``ExLlamaV2`` are made at their first use, so that a worker imports only what it runs.
"""

import os
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from model_worker.engine import EngineEvent, Job, NewTokens

POISON = 1 << 40
"""A request with the seed POISON + k kills its worker in the step that computes its token k. Token 0 is the first one;
its step reads the end of the prompt."""
ENGINES = {
    "TorchFree": "tests.deterministic_engine:DeterministicEngine",
    "Embedded": "model_worker.engines.embedded.engine:TransformersEngine",
    "ExLlamaV2": "model_worker.engines.exllamav2.engine:ExLlamaV2Engine",
}

if TYPE_CHECKING:
    from tests.deterministic_engine import DeterministicEngine as Engine
else:
    Engine = object


class Poisoned(Engine):
    """A mixin that kills the worker for poisonous jobs. It must stand before the engine among the base classes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._left: dict[int, int] = {}
        """Number of tokens that each poisonous job still gets before it kills its worker."""

    def submit(self, job: Job) -> None:
        super().submit(job)
        seed = job.sampling.seed
        if seed is not None and seed >= POISON:
            self._left[job.id] = seed - POISON - len(job.resumed_ids)

    def cancel(self, job_id: int) -> None:
        self._left.pop(job_id, None)
        super().cancel(job_id)

    def step(self) -> list[EngineEvent]:
        events = super().step()
        if any(left <= 0 for left in self._left.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        for event in events:
            if isinstance(event, NewTokens) and event.job in self._left:
                self._left[event.job] -= len(event.token_ids)
        return events


def __getattr__(name: str) -> type:
    """Return the poisoned kind of an engine."""
    if name not in ENGINES:
        raise AttributeError(name)
    module, engine = ENGINES[name].split(":")
    return type(name, (Poisoned, getattr(import_module(module), engine)), {})
