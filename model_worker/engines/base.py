"""What the engines of this package share: the tokenizer, the constraints, and the checks of a job. Does not import
torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from model_worker.engine import Capabilities, ChatTemplate, EngineEvent, Failed, Job
from model_worker.engines.admission import check_job
from model_worker.engines.banned import Healer
from model_worker.engines.constraints import WAIT_S, AnyConstraint, Constraints
from model_worker.engines.tokenizer import Tokenizer
from protocol.errors import WireError


class TokenizingEngine:
    """What every engine here does with its tokenizer. ``load`` sets ``_tokenizer`` and ``_capabilities``."""

    _tokenizer: Tokenizer
    _capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "load() first"
        return self._capabilities

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_rendered(self, text: str) -> list[int]:
        return self._tokenizer.encode_rendered(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode_given(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


class BaseEngine(TokenizingEngine, ABC):
    """The part of an engine that does not depend on how answers are computed.

    ``load`` of an engine calls ``_set_vocabulary``, and sets ``_capabilities``.
    """

    def __init__(self) -> None:
        self._answers: dict[int, Any] = {}
        """The queued and running answers by job. A job that waits for its constraint is not among them."""

    def _set_vocabulary(self, tokenizer: Tokenizer, vocab_size: int, library_size: int) -> None:
        """Set the tokenizer and what follows from it.

        vocab_size    rows of the model's embedding
        library_size  ids of the tokenizer of the engine's library
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._drawable = min(vocab_size, library_size)
        pieces = tokenizer.pieces
        self._healer = Healer(pieces) if pieces else None
        self._constraints = Constraints(pieces, self._drawable, tokenizer.eos_ids, tokenizer) if pieces else None

    @property
    def constraints(self) -> Constraints | None:
        return self._constraints

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._tokenizer.chat_template

    def submit(self, job: Job) -> None:
        """Queue a job, first come, first served. Raises RequestError for a job that cannot be computed."""
        if job.id in self._answers or (self._constraints and job.id in self._constraints):
            raise ValueError(f"job id {job.id} is in use")
        self._check(job)
        if job.constraint is not None and self._constraints is not None:  # check_job has refused it if there are none
            self._constraints.add(job)
        else:
            self._queue(job, self._constraints.of_reasoning(job) if self._constraints is not None else None)

    def _check(self, job: Job) -> None:
        """Raise RequestError for a job that this engine cannot compute."""
        check_job(job, self.capabilities, self._vocab_size, self._drawable, self._tokenizer.eos_ids)

    @abstractmethod
    def _queue(self, job: Job, constraint: AnyConstraint | None) -> None:
        """Make the answer of a checked job, and queue it. Raises RequestError."""

    def _queue_constrained(self) -> list[EngineEvent]:
        """Queue the jobs whose constraints are compiled."""
        failed: list[EngineEvent] = []
        if self._constraints is None or not self._constraints:
            return failed
        for job, constraint in self._constraints.ready(0.0 if self._answers else WAIT_S):
            try:
                self._queue(job, constraint())
            except WireError as e:
                failed.append(Failed(job.id, e))
        return failed

    def close(self) -> None:
        """End the process that tries constraints. The worker's process ends directly afterwards, which frees the GPU's
        memory."""
        if self._constraints is not None:
            self._constraints.close()
