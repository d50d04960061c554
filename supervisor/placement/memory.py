"""The GPU memory of one worker: its needs, its GPUs, and the bytes that it holds. Pure; sizes in bytes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.process.worker_spec import EngineSpec
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import CONTEXT_BYTES, Holding, Needs, Placed, gib, numa_nodes, ranges


@dataclass
class WorkerMemory:
    """The facts about a worker's GPU memory since its last start began.

    needs     by number of GPUs; None if the needs are not known
    count     the number of GPUs that the model asks for
    engine    the specification that the needs belong to
    placed    the GPUs that the worker was placed on; None before, and on the CPU
    cpus      the CPUs that its process is kept to; empty for all
    holding   the memory with which the present process was admitted; None if there is no process, or it is on the CPU
    measured  GPU → bytes that the process held when it was ready, by NVML
    slept     GPU → bytes that the process held when it slept last, by NVML; empty if that is not known
    """

    needs: Mapping[int, Needs] | None = None
    count: int = 1
    engine: EngineSpec | None = None
    placed: Placed | None = None
    cpus: tuple[int, ...] = ()
    holding: Holding | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    slept: Mapping[int, int] = field(default_factory=dict)

    def loaded(self, by_gpu: Mapping[str, int | None]) -> tuple[int, int]:
        """Take note that the model is loaded. Return (bytes that it holds, bytes that it was expected to hold).

        by_gpu  GPU → bytes that NVML lists for the process; None where the driver does not say
        """
        assert self.holding is not None
        self.holding = replace(self.holding, loading=False)
        self.measured = {int(gpu): size for gpu, size in by_gpu.items() if size is not None}
        return sum(self.measured.values()), sum(self.holding.placed.values())

    @property
    def left_asleep(self) -> Mapping[int, int]:
        """Return the bytes of each GPU that the process keeps while it sleeps: measured, or else a CUDA context."""
        gpus = self.placed.bytes if self.placed is not None else {}
        return {gpu: self.slept.get(gpu, CONTEXT_BYTES) for gpu in gpus}

    def fell_asleep(self, by_gpu: Mapping[str, int | None]) -> None:
        """Take note that the worker sleeps. ``by_gpu`` as for ``loaded``."""
        self.slept = {int(gpu): size for gpu, size in by_gpu.items() if size is not None}
        if self.holding is not None:
            self.holding = replace(self.holding, placed=self.left_asleep, loading=False)

    def woke(self) -> None:
        """Take note that the worker is awake, and holds all its memory."""
        if self.holding is not None:
            self.holding = replace(self.holding, loading=False)

    def comes_back(self, reading: Sequence[Gpu]) -> Mapping[int, int]:
        """Return the bytes of each GPU that come back when the worker's process ends: measured, or else estimated.

        While it loads or wakes, this includes what it is about to take, which nobody else can have.
        """
        if self.holding is None:
            return {}
        pid, placed = self.holding.pid, self.holding.placed
        measured = {gpu.index: gpu.processes.get(pid) or 0 for gpu in reading if pid is not None}
        if self.holding.loading:
            return {gpu: max(measured.get(gpu, 0), size) for gpu, size in placed.items()}
        return {gpu: measured.get(gpu, 0) or size for gpu, size in placed.items()}

    def describe(self) -> dict[str, Any]:
        """Return the fields that ``status`` shows. None means not known.

        placed: GPUs of the present or last process. cpus, numa_nodes: those that the process is kept to, None for all.
        vram_estimate: bytes by part. vram_estimate_bytes: their sum. vram_loaded_bytes: measured when it was ready.
        """
        parts = self.needs[self.count].parts(self.count) if self.needs else None
        gpus = self.placed.gpus if self.placed else ()
        return {
            "placed": [gpu.index for gpu in gpus] or None,
            "cpus": ranges(self.cpus) or None,
            "numa_nodes": ranges(numa_nodes(gpus, self.cpus)) or None,
            "vram_estimate_bytes": sum(parts.values()) if parts else None,
            "vram_estimate": parts,
            "vram_loaded_bytes": sum(self.measured.values()) or None,
        }


def loaded_text(measured: int, expected: int) -> str:
    """Return what the log says when a model is loaded: the bytes that its worker holds, beside the estimate."""
    off = (measured - expected) / expected * 100
    return f"holds {gib(measured)} GiB, estimated were {gib(expected)} ({off:+.1f} %)"


# The dead processes that still hold GPU memory. Pure: readings and times are arguments.
#
# The driver frees a dead process's memory a moment after the end of the process. Measured were 0.1 to 0.3 s after
# SIGKILL. A worker that is started earlier finds its GPU still full.


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

    def died(self, worker: str, pid: int, gpus: frozenset[int], now: float) -> None:
        """Take note that a worker's process has ended, and that these GPUs list it. If the GPUs answer late, they may
        list it."""
        self._awaited.append(_Awaited(worker, pid, gpus, now))

    def over(self, reading: Sequence[Gpu] | None, now: float, *, late: bool = False) -> list[Return]:
        """Return the memory that is back, or given up after the deadline. It is awaited no more.

        reading  a later reading of at least ``gpus``; None if there is none. Then all memory is given up
        late     without a reading: the GPUs only answer late, so that nothing is given up before the deadline
        """
        over = [
            Return(a.worker, a.pid, a.gpus, back, now - a.since)
            for a in self._awaited
            if (back := reading is not None and not listing(reading, a.pid))
            or (reading is None and not late)
            or now - a.since >= self._deadline_s
        ]
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
