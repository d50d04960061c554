"""An engine without torch whose vectors a test can compute, and that dies where a text says so.

models.yaml names it by import string, and it runs in real workers. A vector depends on its text alone. So a vector of
another text, a missing one, and one that came twice can be seen.
"""

import os
import signal
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from model_worker.embedding import EmbedJob, NewVectors, texts_in_piece
from model_worker.engine import Capabilities, EngineEvent, Finished, Job, Prefilling
from protocol.errors import RequestError
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

SIZE = 8


def vector(text: str | Sequence[int], size: int = SIZE) -> tuple[float, ...]:
    """Return the vector of a text: whole numbers from 0 to 255."""
    packed = text.encode() if isinstance(text, str) else array("I", text).tobytes()
    digest = blake2b(packed, digest_size=32).digest()
    return tuple(float(byte) for byte in (digest * (size // 32 + 1))[:size])


def score(query: str, document: str | Sequence[int]) -> float:
    """Return the score of a document."""
    return vector(f"{query}\0{document}", 1)[0]


class VectorEngine(DeterministicEngine):
    """Makes vectors, or scores of documents. Each step gives each job one piece.

    Options: verb ("embed" or "rerank"), size (numbers in a vector), step_s. A text ``kill N`` kills the process in the
    step that would give piece N, unless its request goes on behind that piece.
    """

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"verb", "size"}

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.texts: dict[int, tuple[EmbedJob, int]] = {}
        self.uncounted: list[EmbedJob] = []

    @property
    def capabilities(self) -> Capabilities:
        verb = self.spec.options.get("verb", "embed")
        return replace(super().capabilities, offered=frozenset(), chat=False, verb=verb)

    @property
    def chat_template(self) -> None:
        return None

    def submit(self, job: Job | EmbedJob) -> None:
        assert isinstance(job, EmbedJob)
        for number, text in enumerate(job.texts):
            if len(text) > self.capabilities.context:
                raise RequestError(f"texts[{number}] is too long", field="texts")
        self.texts[job.id] = (job, job.sent)
        self.uncounted.append(job)

    def step(self) -> list[EngineEvent]:
        events = super().step()
        events += (Prefilling(job.id, 0, sum(map(len, job.texts))) for job in self.uncounted)
        self.uncounted.clear()
        for job_id, (job, piece) in list(self.texts.items()):
            size = 1 if job.query is not None else job.dimensions or int(self.spec.options.get("size", SIZE))
            first, count = piece * texts_in_piece(size), texts_in_piece(size)
            if f"kill {piece}" in job.texts and job.sent < piece:
                os.kill(os.getpid(), signal.SIGKILL)
            if first < len(job.texts):
                asked = job.texts[first : first + count]
                made = [vector(text, size) if job.query is None else (score(job.query, text),) for text in asked]
                data = array("f", [number for each in made for number in each])
                events.append(NewVectors(job_id, first, size, data.tobytes()))
                self.texts[job_id] = (job, piece + 1)
            else:
                del self.texts[job_id]
                events.append(Finished(job_id, (), "", "stop", sum(map(len, job.texts)), 0))
        return events

    def cancel(self, job_id: int) -> None:
        self.texts.pop(job_id, None)
        self.uncounted = [job for job in self.uncounted if job.id != job_id]


def vector_model(verb: str = "embed", *, step_s: float = 0.0, **keys: object) -> dict[str, object]:
    """Return an entry of models.yaml for ``VectorEngine``. ``size`` is an option of the engine."""
    options = {"step_s": step_s, "verb": verb} | ({"size": keys.pop("size")} if "size" in keys else {})
    return {"model_dir": ".", "engine": f"{__name__}:VectorEngine", "options": options, **keys}
