"""Drive an engine through its interface, and check its contract at every event."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model_worker.engine import (
    PIECE,
    DrawnToken,
    Engine,
    Failed,
    Finished,
    Job,
    NewTokens,
    Prefilling,
    PromptLogprobs,
)
from protocol.errors import RequestError
from protocol.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
_MAX_STEPS = 20_000

_job_ids = itertools.count(1)


@dataclass
class Outcome:
    """The events of one job. ``text`` and ``ids`` contain everything in order, the final event included.

    sizes     the number of ids that had come by the end of each of ``deltas``
    progress  the number of computed prompt tokens in each report
    pieces    log-probabilities of the prompt
    """

    job: Job
    text: str = ""
    ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    logprobs: list[DrawnToken] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    pieces: list[PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    failed: RequestError | None = None
    cancelled: bool = False

    @property
    def prompt_logprobs(self) -> list[DrawnToken]:
        """The log-probabilities of the prompt's tokens."""
        found: list[DrawnToken] = []
        for piece in self.pieces:
            pairs = list(zip(memoryview(piece.ids).cast("I"), memoryview(piece.logprobs).cast("f"), strict=True))
            width = 1 + piece.top
            starts = range(0, len(pairs), width)
            found += [DrawnToken(*pairs[at], tuple(pairs[at + 1 : at + width])) for at in starts]
        return found

    def take_piece(self, piece: PromptLogprobs) -> None:
        """Check that a piece follows the one before, and add it."""
        scoring, prompt = self.job.prompt_logprobs, self.job.prompt_ids
        assert scoring is not None
        assert not self.ids, "log-probabilities of the prompt behind the first token"
        before = self.pieces[-1] if self.pieces else None
        first = scoring.first if before is None else (before.first - 1) // PIECE * PIECE + PIECE + 1
        last = min(-(-first // PIECE) * PIECE, len(prompt) - 1)
        assert (piece.first, piece.before) == (first, prompt[first - 1])
        own = memoryview(piece.ids).cast("I")[:: 1 + piece.top]
        assert tuple(own) == prompt[first : last + 1]
        self.pieces.append(piece)

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return self.finished.finish_reason


class Driver:
    """A driver of an engine. It asserts that each job ends once, that nothing follows the end, and that no event names
    an unknown job."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
        **fields: Any,
    ) -> Outcome:
        """Submit a job. ``fields``: its other fields."""
        ids = self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
        job = Job(next(_job_ids), tuple(ids), max_new_tokens, sampling, tuple(stop), **fields)
        self.engine.submit(job)
        outcome = self.outcomes[job.id] = Outcome(job)
        return outcome

    def cancel(self, outcome: Outcome) -> None:
        self.engine.cancel(outcome.job.id)
        outcome.cancelled = True

    def step(self) -> None:
        for event in self.engine.step():
            outcome = self.outcomes[event.job]
            assert not outcome.cancelled, "event of a cancelled job"
            assert outcome.finished is None, "event after the last one"
            assert outcome.failed is None, "event after the last one"
            if isinstance(event, Prefilling):
                assert not outcome.ids, "progress of a prompt behind the first token"
                job = outcome.job
                assert event.total == len(job.prompt_ids) + len(job.negative_ids or ()) + len(job.resumed_ids)
                assert 0 < event.done < event.total
                assert not outcome.progress or outcome.progress[-1] < event.done
                outcome.progress.append(event.done)
                continue
            if isinstance(event, Failed):
                outcome.failed = event.error
                continue
            if isinstance(event, PromptLogprobs):
                outcome.take_piece(event)
                continue
            reported = outcome.pieces[-1].first - 1 if outcome.pieces else 0
            if outcome.job.prompt_logprobs is not None:
                assert outcome.pieces, "a token before the log-probabilities of the prompt"
                assert reported // PIECE == max(0, len(outcome.job.prompt_ids) - 2) // PIECE
            outcome.text += event.text
            outcome.ids += event.token_ids
            outcome.logprobs += event.logprobs
            if outcome.job.top_logprobs is None:
                assert not event.logprobs
            else:
                assert [logprob.token_id for logprob in event.logprobs] == list(event.token_ids)
            if isinstance(event, NewTokens):
                assert event.token_ids or event.text
                outcome.deltas.append(event.text)
                outcome.sizes.append(len(outcome.ids))
            else:
                outcome.finished = event
                assert event.completion_tokens == len(outcome.job.resumed_ids) + len(outcome.ids)
                assert event.cached_tokens <= event.prompt_tokens
                assert event.prompt_tokens == len(outcome.job.prompt_ids)
                assert event.prefill_s >= 0
                assert event.decode_s >= 0

    @property
    def unfinished(self) -> list[Outcome]:
        return [o for o in self.outcomes.values() if not (o.finished or o.failed or o.cancelled)]

    def run(self) -> None:
        """Step until every job has ended."""
        for _ in range(_MAX_STEPS):
            if not self.unfinished:
                return
            self.step()
        raise AssertionError(f"{len(self.unfinished)} jobs did not end in {_MAX_STEPS} steps")

    def assert_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.pending, stats.active) == (0, 0)
        assert stats.extra.get("slots_used", 0) == 0
        assert stats.extra.get("pages_used", 0) == 0
        assert self.engine.step() == []


def answer(
    engine: Engine,
    prompt: str | Sequence[int],
    max_new_tokens: int = 64,
    sampling: SamplingParams = GREEDY,
    **fields: Any,
) -> Outcome:
    """Run one job alone to its end."""
    driver = Driver(engine)
    outcome = driver.submit(prompt, max_new_tokens, sampling, **fields)
    driver.run()
    return outcome
