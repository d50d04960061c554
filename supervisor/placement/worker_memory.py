"""The GPU memory of one worker: its needs, its GPUs, and the bytes that it holds. Pure; sizes in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.process.worker_spec import EngineSpec
from supervisor.placement.affinity import numa_nodes, ranges
from supervisor.placement.gpu_shares import CONTEXT_BYTES, Needs
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import Holding, Placed, gib


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
