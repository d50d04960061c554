"""An engine that computes nothing: a token for every job at each step, as fast as it is called, or at a pace.

Named by import string in ``benchmarks.router``. Its prompts say what is wanted: ``all`` (each step gives every job a
token), ``one`` (each step gives one job a token, in turns), both as fast as it is called, or ``paced RATE SEED``.
"""

import mmap
import random
import time

from model_worker.engine import Capabilities, Delta, EngineEvent, EngineStats, Finished, Job
from protocol.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

TEXT = "0123456789abcdef"
"""Of every token of a flood: as long as a time."""
WAIT_S = 2e-5
"""Of a flood that is ahead, until it looks again."""


class FloodEngine(DeterministicEngine):
    """Every text has 16 characters; those of a paced job are the time at which it was made, CLOCK_MONOTONIC in
    nanoseconds, hexadecimal. Paced tokens come at random times, RATE a second on average; a step then waits for the
    next, and serves one job only.

    Options: ``taken``, path of a ``Taken``; ``window``, steps that a flood may be ahead of it. Without that bound it
    would outrun every reader, and what is measured would be how the supervisor holds events back.
    """

    KNOWN_OPTIONS = frozenset({"taken", "window"})

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._taken = Taken(spec.options["taken"])
        self._window = int(spec.options["window"])
        self._given: dict[int, Job] = {}
        self._made: dict[int, int] = {}
        self._kind = ""
        self._pace = Pace(1.0, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(1 << 30, self.spec.max_batch_size, frozenset(), False, "none", "none")

    def submit(self, job: Job) -> None:
        self._kind, *numbers = bytes(job.prompt_ids).decode().split()
        if self._kind == "paced":
            self._pace = Pace(float(numbers[0]), int(numbers[1]))
        self._given[job.id], self._made[job.id] = job, 0

    def step(self) -> list[EngineEvent]:
        if not self._given:
            return []
        first = next(iter(self._given))
        text = TEXT
        if self._kind == "paced":
            self._pace.wait()
            text = stamp()
        elif self._made[next(reversed(self._made))] >= self._taken.steps + self._window:
            # of the last that came: the first may have run ahead before there were others, and is read no faster
            time.sleep(WAIT_S)
            return []
        self.steps += 1
        if self._kind != "one":
            return [self._token(number, text) for number in list(self._given)]
        self._given[first] = self._given.pop(first)
        return [self._token(first, text)]

    def _token(self, number: int, text: str) -> EngineEvent:
        self._made[number] = made = self._made[number] + 1
        most = self._given[number].max_new_tokens
        if made < most:
            return Delta(number, (self.steps,), text)
        self.cancel(number)
        return Finished(number, (self.steps,), text, "length", 1, most)

    def cancel(self, job_id: int) -> None:
        self._given.pop(job_id, None)
        self._made.pop(job_id, None)

    def reset(self) -> None:
        self._given.clear()

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self._given), self.steps)


class Taken:
    """How many events of each stream have been read so far, in memory that reader and engine share. ``path``: of a
    file, which is made if it does not exist."""

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
    """Times that a Poisson process has, ``rate`` a second. One that is behind does not wait."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._draw = rate, random.Random(seed)
        self._due = time.monotonic()

    def wait(self) -> None:
        """Until the next of them."""
        self._due += self._draw.expovariate(self._rate)
        if (left := self._due - time.monotonic()) > 0:
            time.sleep(left)


def stamp() -> str:
    """The time, as 16 characters."""
    return f"{time.monotonic_ns():016x}"
