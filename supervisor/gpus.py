"""The GPUs of this box as NVML tells of them: the one place that asks it.

NVML counts GPUs as nvidia-smi does, whatever this process's own CUDA_VISIBLE_DEVICES says, and so do the pins of
models.yaml: workers get CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment; sizes in bytes.

    processes  pid → bytes it holds here, None where the driver does not tell them. In a container these may be numbers
               of another pid namespace, or none at all.
    """

    index: int
    uuid: str
    total: int
    used: int
    free: int
    processes: Mapping[int, int | None] = field(default_factory=dict)

    def is_meant(self, pin: str) -> bool:
        """Whether a pin of models.yaml means this GPU: its index, or its UUID or the beginning of it."""
        return pin == str(self.index) or self.uuid.lower().startswith(pin.lower())


class GpusUnknown(Exception):
    """NVML is not here, or does not answer. The message says why."""


class Gpus(Protocol):
    """Somebody who knows the GPUs."""

    def read(self, only: Collection[int] | None = None) -> list[Gpu]:
        """All GPUs as they are now, or those of these indices. Raises GpusUnknown."""


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
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return Gpu(
            index, uuid, memory.total, memory.used, memory.free, {p.pid: p.usedGpuMemory for p in processes}
        )  # fmt: skip


def open_gpus(log: logging.Logger) -> Gpus | None:
    """NVML; None, said in the log, if it is not to be had: then nobody waits for VRAM, and status does not show any."""
    try:
        return Nvml()
    except GpusUnknown as e:
        log.warning("VRAM is not watched: NVML: %s", e)
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # old releases of the package return bytes
