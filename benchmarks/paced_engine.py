"""An engine without torch that makes tokens at a given rate for any number of jobs. Named by an import string.

Every step gives one job a token, the jobs in turn, at evenly spaced times. That holds for one stream in one worker and
for thousands of streams in sixteen workers, because the workers take turns by the clock, too. (Otherwise their tokens
would come in bunches, and wait for the machine's cores.) So the frames and their times are always alike, and the
processing behind them can be compared. A token's text is the time when it was made, in nanoseconds of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

import time
from collections import deque

from model_worker.engine import EngineEvent, Finished, NewTokens
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

MOST_AT_ONCE = 1000
"""Jobs that may have their first token in one step."""


class PacedEngine(DeterministicEngine):
    """An engine with a given rate of tokens. Each job's first token comes at once, in addition. Every token has id 0.

    Options: ``rate``, the tokens per second of all jobs of all workers together, and ``turn`` and ``of``, which mean
    that this is worker number ``turn`` of ``of`` workers.
    """

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"rate", "turn", "of"}

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        workers = int(spec.options.get("of", 1))
        self._period = workers / float(spec.options.get("rate", 1000.0))
        self._phase = self._period * int(spec.options.get("turn", 0)) / workers
        self._turns: deque[int] = deque()

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        began = [self.pending.pop(0) for _ in range(min(len(self.pending), MOST_AT_ONCE))]
        if began:
            for job in began:
                self.jobs[job.id] = (job, len(job.resumed_ids))
                self._turns.append(job.id)
            return [self._token(job.id) for job in began]
        now = time.monotonic()
        time.sleep(self._period - (now - self._phase) % self._period)
        while self._turns[0] not in self.jobs:
            self._turns.popleft()
        self._turns.rotate(-1)
        return [self._token(self._turns[-1])]

    def _token(self, number: int) -> EngineEvent:
        job, k = self.jobs[number]
        text = str(time.monotonic_ns())
        if k + 1 == job.max_new_tokens:
            del self.jobs[number]
            return Finished(number, [0], text, "length", len(job.prompt_ids), k + 1)
        self.jobs[number] = (job, k + 1)
        return NewTokens(number, [0], text)


class SteppedEngine(DeterministicEngine):
    """An engine whose every step gives each job a token, as real engines do, at a given rate of steps.

    Options: ``rate``, the steps per second. A token's text is the time when it was made, and a space.
    """

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"rate"}

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._period = 1 / float(spec.options.get("rate", 20.0))
        self._due = 0.0

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        now = time.monotonic()
        if self._due < now - self._period:
            self._due = now
        self._due += self._period
        time.sleep(max(0.0, self._due - now))
        for job in self.pending:
            self.jobs[job.id] = (job, len(job.resumed_ids))
        self.pending.clear()
        text = f"{time.monotonic_ns()} "
        events: list[EngineEvent] = []
        for number, (job, k) in list(self.jobs.items()):
            if k + 1 == job.max_new_tokens:
                del self.jobs[number]
                events.append(Finished(number, [0], text, "length", len(job.prompt_ids), k + 1))
            else:
                self.jobs[number] = (job, k + 1)
                events.append(NewTokens(number, [0], text))
        return events
