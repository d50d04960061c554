"""The GPUs of this box as NVML tells of them: the one place that asks it.

NVML counts GPUs as nvidia-smi does, whatever this process's own CUDA_VISIBLE_DEVICES says, and so do the pins of
models.yaml: workers get CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

EVERY = "GPU-"
"""A pin that means each GPU: the beginning of all UUIDs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment; sizes in bytes.

    processes  pid → bytes it holds here, None where the driver does not tell them. In a container these may be numbers
               of another pid namespace, or none at all.
    mig        whether it is divided into MIG instances, which CUDA sees instead of it
    cpus       CPUs of this machine that are nearest to it, nodes: NUMA nodes of their memory; empty: not known
    """

    index: int
    uuid: str
    total: int
    used: int
    free: int
    processes: Mapping[int, int | None] = field(default_factory=dict)
    mig: bool = False
    cpus: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()

    def is_meant(self, pin: str) -> bool:
        """Whether a pin of models.yaml means this GPU: its index, or its UUID or the beginning of it."""
        return pin == str(self.index) or self.uuid.lower().startswith(pin.lower())


class GpusUnknown(Exception):
    """NVML is not here, or does not answer. The message says why."""


class Gpus(Protocol):
    """Somebody who knows the GPUs."""

    def read(self, only: Collection[int] | None = None) -> list[Gpu]:
        """All GPUs as they are now, or those of these indices. Raises GpusUnknown."""


_MASK_WORDS = 64
"""Of 64 bits each: 4096 CPUs, or nodes."""


class Nvml:
    """The GPUs by ``nvidia-ml-py``, which is imported here. The constructor raises GpusUnknown if that or the driver is
    missing. A reading takes a few calls into the driver for each GPU: nothing for every turn of a loop."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as e:
            raise GpusUnknown(f"the package nvidia-ml-py cannot be imported: {e}") from None
        self._nvml: ModuleType = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._handles: list[tuple[Any, str]] = [(h, _text(pynvml.nvmlDeviceGetUUID(h))) for h in handles]
            self._near = [(self._cpus(handle), self._nodes(handle)) for handle in handles]
        except pynvml.NVMLError as e:
            raise GpusUnknown(str(e)) from None

    def read(self, only: Collection[int] | None = None) -> list[Gpu]:
        nvml = self._nvml
        try:
            return [
                self._gpu(index, handle, uuid)
                for index, (handle, uuid) in enumerate(self._handles)
                if only is None or index in only
            ]
        except nvml.NVMLError as e:
            raise GpusUnknown(str(e)) from None

    def _gpu(self, index: int, handle: Any, uuid: str) -> Gpu:
        # In this order: what a process takes between the two calls is then missing from what is free, and counts once
        # more as what it is about to take. The other way round it would count as free, and be promised to another.
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        cpus, nodes = self._near[index]
        return Gpu(
            index, uuid, memory.total, memory.used, memory.free, {p.pid: p.usedGpuMemory for p in processes},
            self._is_divided(handle), cpus, nodes,
        )  # fmt: skip

    # Not every GPU and driver tells the following: then it is not known.

    def _is_divided(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0] == 1)
        except self._nvml.NVMLError:
            return False

    def _cpus(self, handle: Any) -> frozenset[int]:
        try:
            return _set_bits(self._nvml.nvmlDeviceGetCpuAffinity(handle, _MASK_WORDS))
        except self._nvml.NVMLError:
            return frozenset()

    def _nodes(self, handle: Any) -> frozenset[int]:
        scope = self._nvml.NVML_AFFINITY_SCOPE_NODE
        try:
            return _set_bits(self._nvml.nvmlDeviceGetMemoryAffinity(handle, _MASK_WORDS, scope))
        except self._nvml.NVMLError:
            return frozenset()


def open_gpus(log: logging.Logger) -> Gpus | None:
    """NVML; None, said in the log, if it is not to be had: then nobody waits for VRAM, and status does not show any."""
    try:
        return Nvml()
    except GpusUnknown as e:
        log.warning("VRAM is not watched: NVML: %s", e)
        return None


def _set_bits(words: Iterable[int]) -> frozenset[int]:
    return frozenset(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # old releases of the package return bytes
