"""The GPUs of this box, as those who place models and wait for memory see them.

They are counted as nvidia-smi does, whatever this process's own CUDA_VISIBLE_DEVICES says, and so do the pins of
models.yaml: workers get CUDA_DEVICE_ORDER=PCI_BUS_ID. NVML, which tells of them, is asked by ``gpu_reader``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
    """The GPUs cannot be read now. The message says why."""


class GpusAbsent(GpusUnknown):
    """Nor will they ever be: the package or the driver is missing."""


class GpusLate(GpusUnknown):
    """The answer is not there yet. Another try, later, may have it; nobody needs to wait for that in between."""


class Gpus(Protocol):
    """Somebody who knows the GPUs."""

    def read(self, only: Collection[int] | None = None) -> list[Gpu]:
        """All GPUs as they are now, or those of these indices. Raises GpusUnknown."""

    def close(self) -> None:
        """Nothing is read any more."""
