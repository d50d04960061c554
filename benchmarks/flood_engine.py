"""An engine that computes nothing. It gives tokens to its jobs as fast as it is called, or at a pace.

``benchmarks.router`` names it by an import string. A prompt says how tokens come: ``all`` (each step gives every job a
token), ``one`` (each step gives one job a token, in turn), both as fast as possible, or ``paced RATE SEED``.
"""

import mmap
import random
import time
from collections.abc import Iterator
from itertools import cycle, islice

from model_worker.engine import Capabilities, EngineEvent, EngineStats, Finished, Job, NewTokens
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

TEXT = "0123456789abcdef"
"""The text of every token of a flood. It is as long as a time."""
TOKEN = (1000,)
WAIT_S = 1e-4
"""Seconds that a flood which is ahead waits until it looks again."""


class FloodEngine(DeterministicEngine):
    """An engine whose texts have 16 characters.

    The text of a paced job is the time at which it was made, CLOCK_MONOTONIC in nanoseconds, in hexadecimal. Paced
    tokens come at random times, RATE per second on average. A step then waits for the next token, and serves one job
    only.

    Options: ``taken``, the path of a ``Taken``, and ``window``, the number of steps that a flood may be ahead of it.
    Without this limit the engine would outrun every reader. Then the benchmark would measure how the supervisor holds
    events back.
    """

    KNOWN_OPTIONS = frozenset({"taken", "window"})

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._taken = Taken(spec.options["taken"])
        self._window = int(spec.options["window"])
        self._given: dict[int, Job] = {}
        self._made: dict[int, int] = {}
        """Number of tokens of each job before the present plan."""
        self._order: list[int] = []
        """Jobs in the order of their next turns, if they get tokens in turn."""
        self._plan: Iterator[list[EngineEvent]] = iter(())
        """The events of the next steps: no job ends in them, and the window allows all of them. So a step costs almost
        nothing, and the benchmark does not measure this engine."""
        self._turns: list[list[int]] = []
        """The jobs of each step of one round of the plan."""
        self._begun = 0
        """The value of ``steps`` when the plan began."""
        self._waits = False
        """True if every job is as far ahead as it may be. The engine goes on when half of the window is free, as libzmq
        does with a full pipe, so that the reader is not woken for single tokens."""
        self._kind = ""
        self._pace = Pace(1.0, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(1 << 30, self.spec.max_batch_size, frozenset(), False, "none", "none")

    def submit(self, job: Job) -> None:
        self._end_plan()
        self._kind, *numbers = bytes(job.prompt_ids).decode().split()
        if self._kind == "paced":
            self._pace = Pace(float(numbers[0]), int(numbers[1]))
        self._given[job.id], self._made[job.id], self._waits = job, 0, False
        self._order.append(job.id)

    def step(self) -> list[EngineEvent]:
        if (events := next(self._plan, None)) is not None:
            self.steps += 1
            return events
        return self._next_plan()

    def _next_plan(self) -> list[EngineEvent]:
        """Make a step without a plan, and plan the next steps if possible."""
        self._end_plan()
        if not self._given:
            return []
        if self._kind == "paced":
            self._pace.wait()
            return self._unplanned(self._order[:1], stamp())
        taken = self._taken.steps
        bound = taken + self._window
        # Each job has its own limit: the first job may have run ahead before there were others, and is read no faster.
        due = [number for number in self._order if self._made[number] < bound]
        if not due or (self._waits and max(self._made.values()) > taken + self._window // 2):
            self._waits = True
            time.sleep(WAIT_S)
            return []
        self._waits = False
        turns = [[number] for number in due] if self._kind == "one" else [due]
        rounds = min(min(bound, self._given[number].max_new_tokens - 1) - self._made[number] for number in due)
        if not rounds:
            return self._unplanned(turns[0], TEXT)
        events: list[list[EngineEvent]] = [[NewTokens(number, TOKEN, TEXT) for number in turn] for turn in turns]
        self._plan, self._turns = islice(cycle(events), rounds * len(events)), turns
        self.steps += 1
        return next(self._plan)

    def _end_plan(self) -> None:
        """Note the tokens that the plan has brought so far, and end the plan."""
        if self._turns:
            rounds, more = divmod(self.steps - self._begun, len(self._turns))
            for i, turn in enumerate(self._turns):
                for number in turn:
                    self._made[number] += rounds + (i < more)
                    if i < more:
                        self._order.remove(number)
                        self._order.append(number)
        self._plan, self._turns, self._begun = iter(()), [], self.steps

    def _unplanned(self, numbers: list[int], text: str) -> list[EngineEvent]:
        """Return a token for each of these jobs, perhaps the last token of some of them."""
        events: list[EngineEvent] = []
        self._order = [number for number in self._order if number not in numbers]
        for number in numbers:
            self._made[number] = made = self._made[number] + 1
            if made < (most := self._given[number].max_new_tokens):
                events.append(NewTokens(number, TOKEN, text))
                self._order.append(number)
            else:
                del self._given[number], self._made[number]
                events.append(Finished(number, TOKEN, text, "length", 1, most))
        self.steps += 1
        self._begun = self.steps
        return events

    def cancel(self, job_id: int) -> None:
        self._end_plan()
        if self._given.pop(job_id, None):
            del self._made[job_id]
            self._order.remove(job_id)

    def reset(self) -> None:
        for number in list(self._given):
            self.cancel(number)

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self._given), self.steps)


class Taken:
    """The number of events of each stream that have been read, in memory that reader and engine share.

    path  path of a file, which is made if it does not exist
    """

    def __init__(self, path: str) -> None:
        with open(path, "a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    @property
    def steps(self) -> int:
        return self._words[0]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._words[0] = steps


class Pace:
    """The times of a Poisson process with ``rate`` events per second. A time that has passed costs no wait."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._draw = rate, random.Random(seed)
        self._due = time.monotonic()

    def wait(self) -> None:
        """Wait until the next time."""
        self._due += self._draw.expovariate(self._rate)
        if (left := self._due - time.monotonic()) > 0:
            time.sleep(left)


def stamp() -> str:
    """Return the time as 16 characters."""
    return f"{time.monotonic_ns():016x}"
