"""The file that tells the stand-in for NVML (``tests/stand_in_nvml``) which GPUs the box has."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
STRANGER = 4_000_000_000
"""A pid that no process on Linux can have."""


class Box:
    """The GPUs that NVML reports. Every change replaces the file, so that no reader sees half of a change."""

    def __init__(self, path: Path, sizes: Sequence[int] = (80, 80)) -> None:
        """Write a box with empty GPUs. sizes: the memory of each GPU in GiB."""
        self.path = path
        self._state: dict[str, Any] = {"gpus": [], "error": None, "init_error": None}
        self.becomes(sizes)

    def becomes(self, sizes: Sequence[int], **facts: Sequence[Any]) -> None:
        """Replace the box by another one with empty GPUs. facts: mig, cpus or nodes of each of its GPUs."""
        self._state["gpus"] = [
            {"uuid": f"GPU-{i}a2b3c4d-0000", "total": size * GIB, "processes": {}}
            | {name: values[i] for name, values in facts.items()}
            for i, size in enumerate(sizes)
        ]
        self._write()

    def holds(self, gpu: int, pid: int, size: int | None = 12 * GIB) -> None:
        self._state["gpus"][gpu]["processes"][str(pid)] = size
        self._write()

    def gives_back(self, pid: int) -> None:
        for gpu in self._state["gpus"]:
            gpu["processes"].pop(str(pid), None)
        self._write()

    def fails(self, error: str | None, *, at_init: bool = False) -> None:
        self._state["init_error" if at_init else "error"] = error
        self._write()

    def driver(self, **how: Any) -> None:
        """Make the driver misbehave: hangs=True, says=text or ends=code, as the stand-in describes. None ends it."""
        self._state |= how
        self._write()

    def lists_the_living(self) -> None:
        """From now on workers report themselves (``report``), and only processes that live hold memory. Do not change
        the box after that."""
        self.driver(living=True)

    def _write(self) -> None:
        _replace(self.path, self._state)


def report(gpu: int, size: int) -> None:
    """Note how much of a GPU this process holds. A worker of a test calls this in place of a driver."""
    path = Path(os.environ["MODELCTL_TEST_BOX"])
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(path.read_text())
        state["gpus"][gpu]["processes"][str(os.getpid())] = size
        _replace(path, state)


def _replace(path: Path, state: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state))
    fresh.replace(path)
