"""Memory by process: GPU memory as NVML shows it, or main memory, with which a script can be tried without a GPU."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

import psutil

GIB = 2**30
MIB = 2**20
POLL_SECONDS = 0.002

_CONTEXT = """
import sys, torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


class Memory(Protocol):
    def of(self, pid: int) -> dict[int, int]:
        """Return the bytes that a process holds, by GPU index. GPUs where it holds nothing are left out."""

    def used(self) -> int:
        """Return the bytes that all processes use on the watched GPU."""


class GpuMemory:
    """A reader of NVML. GPUs are numbered as nvidia-smi numbers them. ``used`` is about one of them."""

    def __init__(self, gpu: int) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = gpu
        self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def of(self, pid: int) -> dict[int, int]:
        held = {}
        for index, gpu in enumerate(self._gpus):
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            if size := sum(process.usedGpuMemory or 0 for process in processes if process.pid == pid):
                held[index] = int(size)
        return held

    def used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpus[self._gpu]).used)


class MainMemory:
    """A replacement of GpuMemory on a machine without a GPU: resident memory, as if it were the memory of GPU 0."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, pid: int) -> dict[int, int]:
        self._seen.add(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            if size := psutil.Process(pid).memory_info().rss:
                return {0: size}
        return {}

    def used(self) -> int:
        return sum(sum(self.of(pid).values()) for pid in list(self._seen))


def memory(gpu: str) -> Memory:
    return MainMemory() if gpu == "cpu" else GpuMemory(int(gpu))


def context_bytes(memory: Memory) -> int:
    """Return the bytes that a process holds that only creates a CUDA context, with PyTorch's kernels in it."""
    with subprocess.Popen(
        [sys.executable, "-c", _CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return sum(memory.of(process.pid).values())


def wait_for(condition: Callable[[], bool], within: float, what: str) -> float:
    """Wait until a condition holds. Return the seconds that this took. Raises TimeoutError that names the condition."""
    begun = time.perf_counter()
    while not condition():
        if time.perf_counter() - begun > within:
            raise TimeoutError(f"not within {within} s: {what}")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - begun
