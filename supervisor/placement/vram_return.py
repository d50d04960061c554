"""Whose VRAM is still out although its process is gone. Pure: readings and times are arguments.

The driver gives a dead process's memory back a moment after its end (0.1 to 0.3 s after SIGKILL were measured). A
worker spawned before that finds its GPU as full as it was.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from supervisor.placement.gpus import Gpu

DEADLINE_S = 10.0
"""How long a dead process's memory is waited for."""


@dataclass(frozen=True, slots=True)
class Return:
    """What has become of it. ``after_s``: seconds from the process's end to the reading that decided."""

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
    """The dead processes that GPUs still list."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._awaited: list[_Awaited] = []

    def died(self, worker: str, pid: int, reading: Sequence[Gpu], now: float) -> bool:
        """A worker's process is gone; ``reading``: the GPUs right after. Returns whether one of them lists it still."""
        gpus = listing(reading, pid)
        if gpus:
            self._awaited.append(_Awaited(worker, pid, gpus, now))
        return bool(gpus)

    def died_unseen(self, worker: str, pid: int, gpus: frozenset[int], now: float) -> None:
        """The same while the GPUs answer late. A later reading tells whether any of these lists it."""
        self._awaited.append(_Awaited(worker, pid, gpus, now))

    def read(self, reading: Sequence[Gpu], now: float) -> list[Return]:
        """A later reading of at least ``gpus``: what is back, and what is given up because its time is over."""
        over = []
        for awaited in self._awaited:
            back = not listing(reading, awaited.pid)
            after_s = now - awaited.since
            if back or after_s >= self._deadline_s:
                over.append(Return(awaited.worker, awaited.pid, awaited.gpus, back, after_s))
        return self._remove(over)

    def unread(self, now: float) -> list[Return]:
        """The GPUs answer late: what is given up because its time is over."""
        late = [a for a in self._awaited if now - a.since >= self._deadline_s]
        return self._remove([Return(a.worker, a.pid, a.gpus, False, now - a.since) for a in late])

    def give_up(self, now: float) -> list[Return]:
        """The GPUs can no longer be read: everything that is awaited, as not back."""
        return self._remove([Return(a.worker, a.pid, a.gpus, False, now - a.since) for a in self._awaited])

    def _remove(self, over: list[Return]) -> list[Return]:
        gone = {r.pid for r in over}
        self._awaited = [a for a in self._awaited if a.pid not in gone]
        return over

    @property
    def gpus(self) -> frozenset[int]:
        """The GPUs that have to be read on; empty when nothing is awaited."""
        return frozenset[int]().union(*(a.gpus for a in self._awaited))

    def pids_on(self, gpus: Collection[int]) -> list[int]:
        """The dead processes that hold memory of any of these GPUs."""
        return [a.pid for a in self._awaited if a.gpus.intersection(gpus)]


def listing(reading: Sequence[Gpu], pid: int) -> frozenset[int]:
    """The GPUs that list a process."""
    return frozenset(gpu.index for gpu in reading if pid in gpu.processes)
