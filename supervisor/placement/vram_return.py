"""The dead processes that still hold GPU memory. Pure: readings and times are arguments.

The driver frees a dead process's memory a moment after the end of the process. Measured were 0.1 to 0.3 s after
SIGKILL. A worker that is started earlier finds its GPU still full.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from supervisor.placement.gpus import Gpu

DEADLINE_S = 10.0
"""Seconds for which a start waits for the memory of a dead process."""


@dataclass(frozen=True, slots=True)
class Return:
    """The end of the wait for a dead process's memory.

    back     whether it is free again; False if the time for waiting is over
    after_s  seconds from the process's end to the reading that decided
    """

    worker: str
    pid: int
    gpus: frozenset[int]
    back: bool
    after_s: float


@dataclass(frozen=True, slots=True)
class _Awaited:
    worker: str
    pid: int
    gpus: frozenset[int]
    since: float


class VramReturns:
    """The dead processes whose memory is awaited."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._awaited: list[_Awaited] = []

    def died(self, worker: str, pid: int, reading: Sequence[Gpu], now: float) -> bool:
        """Take note that a worker's process has ended. Return whether a GPU still lists it.

        reading  the GPUs right after the end
        """
        gpus = listing(reading, pid)
        if gpus:
            self._awaited.append(_Awaited(worker, pid, gpus, now))
        return bool(gpus)

    def died_unseen(self, worker: str, pid: int, gpus: frozenset[int], now: float) -> None:
        """Take note that a worker's process has ended while the GPUs answer late. A later reading shows whether one of
        these GPUs lists it."""
        self._awaited.append(_Awaited(worker, pid, gpus, now))

    def read(self, reading: Sequence[Gpu], now: float) -> list[Return]:
        """Take in a later reading of at least ``gpus``. Return the memory that is back, or given up after the
        deadline."""
        over = []
        for awaited in self._awaited:
            back = not listing(reading, awaited.pid)
            after_s = now - awaited.since
            if back or after_s >= self._deadline_s:
                over.append(Return(awaited.worker, awaited.pid, awaited.gpus, back, after_s))
        return self._remove(over)

    def unread(self, now: float) -> list[Return]:
        """Return the memory that is given up after the deadline, while the GPUs answer late."""
        late = [a for a in self._awaited if now - a.since >= self._deadline_s]
        return self._remove([Return(a.worker, a.pid, a.gpus, False, now - a.since) for a in late])

    def give_up(self, now: float) -> list[Return]:
        """Return all awaited memory as not back, because the GPUs can no longer be read."""
        return self._remove([Return(a.worker, a.pid, a.gpus, False, now - a.since) for a in self._awaited])

    def _remove(self, over: list[Return]) -> list[Return]:
        gone = {r.pid for r in over}
        self._awaited = [a for a in self._awaited if a.pid not in gone]
        return over

    @property
    def gpus(self) -> frozenset[int]:
        """Return the GPUs that have to be read until the memory is back. Empty if no memory is awaited."""
        return frozenset[int]().union(*(a.gpus for a in self._awaited))

    def pids_on(self, gpus: Collection[int]) -> list[int]:
        """Return the dead processes that hold memory of any of these GPUs."""
        return [a.pid for a in self._awaited if a.gpus.intersection(gpus)]


def listing(reading: Sequence[Gpu], pid: int) -> frozenset[int]:
    """Return the GPUs that list a process."""
    return frozenset(gpu.index for gpu in reading if pid in gpu.processes)
