"""A stand-in for the part of nvidia-ml-py that placement.nvml_child uses. It reads a JSON file instead of a driver.

``MODELCTL_TEST_BOX`` names the file: {"gpus": [{"uuid", "total", "processes": {pid: bytes}}], "error": text or null}.
A GPU may also have "mig": true, "cpus": [numbers] and "nodes": [numbers], and "free" if its free memory is not the
rest of the total. Its sensors are "utilization", "temperature", "power" and "power_limit", in NVML's units. The driver
does not offer those that are missing. The file is read at every call, so that a test can change the box by replacing
the file.

The driver may misbehave: while "hangs" is true, calls do not return. "says" is a record that is sent over the
child's link. "ends" is the exit code with which the process ends.

While "living" is true, only processes that live hold memory, as with a driver.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any


class NVMLError(Exception):
    """The error that every call may raise, as in the package."""


@dataclass
class Memory:
    total: int
    used: int
    free: int


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None


def _answering_box() -> dict[str, Any]:
    while True:
        with open(os.environ["MODELCTL_TEST_BOX"]) as f:
            box: dict[str, Any] = json.load(f)
        if box.get("living"):
            for gpu in box["gpus"]:
                gpu["processes"] = {pid: size for pid, size in gpu["processes"].items() if _lives(pid)}
        if not box.get("hangs"):
            return box
        time.sleep(0.005)


def _lives(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _box() -> dict[str, Any]:
    box = _answering_box()
    if box["error"]:
        raise NVMLError(box["error"])
    if says := box.get("says"):
        from protocol.process.helper_link import HelperLink

        HelperLink(0).send(says.encode())
    if (code := box.get("ends")) is not None:
        os._exit(code)
    return box


def nvmlInit() -> None:
    if error := _answering_box().get("init_error"):
        raise NVMLError(error)


def nvmlDeviceGetCount() -> int:
    return len(_answering_box()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_answering_box()["gpus"][handle]["uuid"])


def nvmlDeviceGetMemoryInfo(handle: int) -> Memory:
    gpu = _box()["gpus"][handle]
    used = sum(size or 0 for size in gpu["processes"].values())
    return Memory(gpu["total"], used, gpu.get("free", gpu["total"] - used))


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Process]:
    return [Process(int(pid), size) for pid, size in _box()["gpus"][handle]["processes"].items()]


NVML_AFFINITY_SCOPE_NODE = 0
NVML_TEMPERATURE_GPU = 0


@dataclass
class Utilization:
    gpu: int
    memory: int = 0


def nvmlDeviceGetUtilizationRates(handle: int) -> Utilization:
    return Utilization(_sensor(handle, "utilization"))


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return _sensor(handle, "temperature")


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return _sensor(handle, "power")


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return _sensor(handle, "power_limit")


def _sensor(handle: int, name: str) -> int:
    if (value := _answering_box()["gpus"][handle].get(name)) is None:
        raise NVMLError("Not Supported")
    return int(value)


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    mode = int(_box()["gpus"][handle].get("mig", False))
    return [mode, mode]


def nvmlDeviceGetCpuAffinity(handle: int, words: int) -> list[int]:
    return _mask(handle, "cpus", words)


def nvmlDeviceGetMemoryAffinity(handle: int, words: int, scope: int) -> list[int]:
    return _mask(handle, "nodes", words)


def _mask(handle: int, key: str, words: int) -> list[int]:
    """Return the bit mask of these numbers as a list of 64 bit words, as NVML does."""
    numbers = _answering_box()["gpus"][handle].get(key)
    if numbers is None:
        raise NVMLError("Not Supported")
    return [sum(1 << n % 64 for n in numbers if n // 64 == word) for word in range(words)]
