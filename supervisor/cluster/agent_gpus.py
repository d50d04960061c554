"""The GPUs of an agent's machine: whether the worker fits on those that were leased, and what they hold.

The agent estimates the worker's need and reads NVML before it starts the worker. The words and the arithmetic are those
with which the supervisor places workers of its own machine.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.process.engine_packages import missing_for
from protocol.process.worker_exit import LOAD_ERROR_PREFIX
from protocol.process.worker_spec import WorkerSpec
from supervisor.cluster.agent_messages import Admitted, Gpus, Order, Refused
from supervisor.placement.affinity import near_cpus, numa_nodes, ranges
from supervisor.placement.estimates import ESTIMATED, Estimated, Estimator, Question
from supervisor.placement.gpu_reader import GpuReader
from supervisor.placement.gpu_shares import Needs, split_of
from supervisor.placement.gpus import Gpu, GpusAbsent, GpusLate, GpusUnknown
from supervisor.placement.policy import GpuRequest, Placed, PlacementRefused, place, place_unseen, rooms
from supervisor.timers import Timers

ROOM_WAIT_S = 10.0
"""Seconds that a worker waits for room. The memory of a process that has just ended may not be back yet."""
READING_WAIT_S = 30.0
"""Seconds that a worker waits for a driver whose answer is late. Then it starts without a look at the GPUs."""
RETRY_S = 0.25
"""Seconds between two looks at the GPUs for a worker that waits."""
REPORT_S = 1.0
"""Seconds between two readings of the GPUs for the supervisor's status."""


@dataclass(frozen=True)
class Fits:
    """The worker can be started on these CPUs (empty: all). ``report`` tells the supervisor about it."""

    report: Admitted
    cpus: tuple[int, ...] = ()


class AgentGpus:
    """Looks at the GPUs for one worker. A worker on the CPU has no GPUs, and always fits.

    spec   with the places of the model's directories on this machine, and with the devices of the lease
    order  a worker whose order has ``passed`` has been refused before, and does not wait for room again
    """

    def __init__(self, spec: WorkerSpec, order: Order, timers: Timers, log: logging.Logger) -> None:
        self._spec, self._passed, self._limits = spec, order.passed, order.limits
        self._count, self._vram = order.elsewhere.gpus, order.elsewhere.vram
        self._estimator = Estimator(timers)
        self._estimated: Estimated | None = None
        self._reader = GpuReader(log, start_s=0.0) if self._count else None
        self._begun = self._again_at = time.monotonic()
        self._said: Gpus | None = None
        self._ready_at: float | None = None
        """Since when the worker is known to be loaded."""
        self._is_measured = False
        self._loaded: int | None = None
        """The bytes that the worker held when it was loaded, by the first reading after that."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when ``decide`` has an estimate to take in."""
        return self._estimator.descriptor

    def begin(self) -> Refused | None:
        """Check that the engine is installed, and begin to read the model's directory. Return why that is in vain.

        Raises OSError if the system has no process or descriptor left.
        """
        spec = self._spec
        if (missing := missing_for(spec.engine.engine)) is not None:
            return Refused("config", LOAD_ERROR_PREFIX + missing, False)
        if self._count and not spec.visible_devices:
            return Refused("config", "Ray leased GPUs and set no CUDA_VISIBLE_DEVICES: let it do so", False)
        if self._count and spec.engine.engine in ESTIMATED:
            question = Question(spec.engine, spec.sampling, spec.forced, (self._count,))
            self._estimator.ask("the worker", question, self._take)
        else:
            self._take(Estimated(unknown=f"there is no estimate for engine {spec.engine.engine}"))
        return None

    def _take(self, estimated: Estimated) -> None:
        self._estimated, self._begun = estimated, time.monotonic()

    def decide(self, now: float) -> Fits | Refused | None:
        """Return whether the worker fits; None if that is not known yet. Call this again and again."""
        self._estimator.ended()
        estimated = self._estimated
        if estimated is None or now < self._again_at:
            return None
        self._again_at = now + RETRY_S
        if estimated.error is not None:
            return Refused(estimated.reason, LOAD_ERROR_PREFIX + estimated.error, estimated.retry)
        if self._reader is None:
            return Fits(Admitted([], {}, None, None, None))
        reading: Sequence[Gpu] | None = None
        try:
            reading = self._reader.read()
        except GpusLate:
            if now - self._begun < READING_WAIT_S:
                return None
        except GpusUnknown:
            pass
        return self._place(estimated, reading, now)

    def _place(self, estimated: Estimated, reading: Sequence[Gpu] | None, now: float) -> Fits | Refused | None:
        engine, count = self._spec.engine, self._count
        split, pins = split_of(engine.engine, engine.options, count), tuple(self._spec.visible_devices.split(","))
        request = GpuRequest(pins, split, count)
        needs = {count: Needs(declared=self._vram)} if self._vram else estimated.needs
        there = rooms(reading or (), [], self._limits)
        decision = place_unseen(request, None) if reading is None else place(request, needs, there)
        if isinstance(decision, PlacementRefused):
            if not decision.missing:
                return Refused("config", decision.message, False)
            if not self._passed and now - self._begun < ROOM_WAIT_S:
                return None
            leased = [room for room in there if any(map(room.gpu.is_meant, pins))]
            left = [room for room in there if room not in leased and room.gpu.index not in self._passed]
            other = place(GpuRequest(None, split, count), needs, left)
            indices = [room.gpu.index for room in leased]
            return Refused("no room", decision.message, False, indices, isinstance(other, Placed))
        cpus = near_cpus(decision.gpus, os.sched_getaffinity(0))
        parts = needs[count].parts(count) if needs else {}
        unknown = None if needs else estimated.unknown
        nodes = ranges(numa_nodes(decision.gpus, cpus)) or None
        indices = [gpu.index for gpu in decision.gpus]
        return Fits(Admitted(indices, parts, unknown, ranges(cpus) or None, nodes), cpus)

    def report(self, pid: int, *, is_loaded: bool) -> Gpus | None:
        """Return what the GPUs hold now, if that has changed. Never waits. Call this every ``REPORT_S``.

        pid        the worker
        is_loaded  whether the worker has loaded its model
        """
        if self._reader is None:
            return None
        if is_loaded and self._ready_at is None:
            self._ready_at = time.monotonic()
        try:
            answer = self._reader.read_ahead()
        except GpusAbsent:
            self.close()
            return None
        except GpusUnknown:
            return None
        if answer is None:
            return None
        asked_at, gpus = answer
        held = [[gpu.index, gpu.processes[pid]] for gpu in gpus if pid in gpu.processes]
        # An answer to a question of before shows a part of the model.
        if not self._is_measured and self._ready_at is not None and asked_at >= self._ready_at:
            self._is_measured = True
            self._loaded = sum(size for _, size in held if size is not None) or None
        told = Gpus([[gpu.index, gpu.uuid, gpu.total, gpu.used, gpu.free] for gpu in gpus], held, self._loaded)
        if told == self._said:
            return None
        self._said = told
        return told

    def close(self) -> None:
        """End the processes that read the model's directory and NVML."""
        self._estimator.forget("the worker")
        if self._reader is not None:
            self._reader.close()
            self._reader = None
