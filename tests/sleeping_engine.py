"""An engine without torch that sleeps and wakes as models.yaml says, and tells the stand-in for NVML what it holds."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from model_worker.engine import Capabilities, EngineEvent, Job, ProgressCallback, SleepRefused
from protocol.process.worker_spec import EngineSpec
from tests import nvml_box
from tests.deterministic_engine import DeterministicEngine

CONTEXT = nvml_box.GIB // 2
"""Bytes of GPU memory that the process holds while it sleeps."""


class Sleeper(DeterministicEngine):
    """A DeterministicEngine that can sleep.

    Options: gib (GPU memory while it is awake; 0: on the CPU), sleep_s, wake_s, load_s, host_gib, refuses (the reason
    why it cannot sleep), faults: a map from "sleep", "asleep" or "wake" to "kill" or "hang".
    """

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {
        "gib", "sleep_s", "wake_s", "load_s", "host_gib", "refuses", "faults",
    }  # fmt: skip

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.asleep = False

    def _option(self, name: str, default: float = 0.0) -> float:
        return float(self.spec.options.get(name, default))

    def load(self, progress: ProgressCallback) -> None:
        time.sleep(self._option("load_s"))
        super().load(progress)
        self._hold(int(self._option("gib") * nvml_box.GIB))

    def _hold(self, size: int) -> None:
        if self._option("gib"):
            nvml_box.report(0, size)

    @property
    def capabilities(self) -> Capabilities:
        size = int(self._option("host_gib", 1.0) * nvml_box.GIB)
        return replace(super().capabilities, sleep_bytes=size if self.spec.sleep else None, no_sleep="")

    def prepare_sleep(self) -> bool:
        return False

    def sleep(self, progress: Callable[[], None]) -> None:
        if self.jobs or self.pending:
            raise AssertionError("told to sleep with jobs")
        self._fault("sleep")
        if reason := self.spec.options.get("refuses"):
            raise SleepRefused(str(reason))
        self._move("sleep_s", progress)
        self._hold(CONTEXT)
        self.asleep = True

    def wake(self, progress: Callable[[], None]) -> None:
        if not self.asleep:
            raise AssertionError("told to wake while awake")
        self._fault("wake")
        self._hold(int(self._option("gib") * nvml_box.GIB))
        self._move("wake_s", progress)
        self.asleep = False

    def _move(self, option: str, progress: Callable[[], None]) -> None:
        until = time.monotonic() + self._option(option)
        while (left := until - time.monotonic()) > 0:
            progress()
            time.sleep(min(left, 0.05))

    def _fault(self, moment: str) -> None:
        fault = dict(self.spec.options.get("faults", {})).get(moment)
        if fault == "kill":
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        while fault == "hang":
            time.sleep(3600)

    def submit(self, job: Job) -> None:
        if self.asleep:
            raise AssertionError("a job for a model that sleeps")
        super().submit(job)

    def step(self) -> list[EngineEvent]:
        if self.asleep:
            raise AssertionError("a step of a model that sleeps")
        return super().step()
