"""Read the GPU memory that workers hold, and let a start wait until a dead worker's memory is free again."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.config.spelling import Limit
from supervisor.logs.events import EventKind, noted
from supervisor.logs.files import about
from supervisor.placement.gpu_reader import START_S, GpuReader
from supervisor.placement.gpus import Gpu, GpusAbsent, GpusLate, GpusUnknown
from supervisor.placement.memory import Return, VramReturns, listing
from supervisor.placement.policy import limit_of
from supervisor.reactor import Timers

POLL_S = 0.02
"""Seconds between two readings while the memory of a dead process is awaited."""
FRESH_S = 1.0
"""The greatest age, in seconds, of a reading that ``status`` shows."""
AHEAD_S = 3.0
"""The greatest age, in seconds, of a reading that ``status`` shows while clients ask for ``status`` again and again.
Each ``status`` then shows the last reading, and asks NVML for the next one without waiting. Otherwise all tokens would
wait for the driver, which usually takes 1 to 30 ms, once a second for as long as a page is open."""
CHECK_S = 0.25
"""Seconds between two checks whether an answer of NVML that is late has come."""


@dataclass
class _WatchedWorker:
    """The known facts about one worker's GPU memory.

    pins         the worker's GPUs, as models.yaml names them
    gpus         indices of these GPUs; None before the first reading
    ready        pid of the worker's last process that was loaded
    looked       that pid, once NVML was read after the load
    seen         that pid, once NVML has listed it
    returned     the state of the last process's memory: "awaited", "back", "not back" or "not watched"
    returned_ms  milliseconds until the memory was back
    on_free      the start that waits until dead workers have given their memory back
    """

    pins: Collection[str]
    gpus: frozenset[int] | None = None
    seen: int | None = None
    ready: int | None = None
    looked: int | None = None
    returned: str | None = None
    returned_ms: float | None = None
    on_free: Callable[[], None] | None = field(default=None, repr=False)


class Vram:
    """The GPU memory of all workers. Runs on the supervisor's one thread and never sleeps: timers of the loop call it.

    Without NVML no start waits, and ``status`` shows no memory. While NVML answers late, memory counts as not back.
    """

    def __init__(self, timers: Timers, log: logging.Logger) -> None:
        self._gpus: GpuReader | None = None
        self._opened = self._serves = False
        self._timers = timers
        self._log = log
        self._said_unknown = False
        self._returns = VramReturns()
        self._last: tuple[float, list[Gpu]] | None = None
        self._polling = False
        self._looking = False
        self._trouble: tuple[float, GpusUnknown] | None = None
        """The time since which there is no reading, and the reason."""
        self._workers: dict[str, _WatchedWorker] = {}

    def watch(self, worker: str, pins: Collection[str]) -> None:
        """Watch the GPUs of a worker. The first call starts the process that opens NVML.

        pins  the worker's GPUs, as models.yaml names them
        """
        if not self._opened:
            self._opened, self._gpus = True, GpuReader(self._log, start_s=0.0 if self._serves else START_S)
        self._workers[worker] = _WatchedWorker(pins)

    def serves(self) -> None:
        """Take note that clients are served from now on. If a reload adds a model and the driver is opened only then,
        nothing waits for the driver: every token would wait, too."""
        self._serves = True

    def unwatch(self, worker: str) -> None:
        """Forget a worker that was removed. Starts still wait for the memory that it held."""
        self._workers.pop(worker, None)

    def close(self) -> None:
        """End the process that reads NVML."""
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    @property
    def trouble(self) -> str | None:
        """Return why the GPUs cannot be read, for people. None if they can be read, or no worker uses them."""
        if self._trouble is None:
            return None
        since, why = self._trouble
        return f"NVML: {why}, since {time.monotonic() - since:.0f} s"

    @property
    def late(self) -> bool:
        """Return whether the last reading failed because the answer is late. Another try may get it."""
        return self._trouble is not None and isinstance(self._trouble[1], GpusLate)

    @property
    def awaited(self) -> bool:
        """Return whether memory of a dead process is not back yet."""
        return bool(self._returns.gpus)

    def ready(self, worker: str, pid: int) -> None:
        """Read the GPUs after a load. If NVML knows the pids of workers at all, it lists this one now."""
        watched = self._workers.get(worker)
        if watched is not None:
            watched.ready = pid
            self.reading()

    def ended(self, worker: str, pid: int) -> None:
        """Take note that a worker's process has ended. ``when_free`` waits for its memory from now on."""
        watched = self._workers.get(worker)
        if watched is None:
            return
        watched.returned = watched.returned_ms = None
        reading = self.reading(watched.gpus)
        now = time.monotonic()
        if watched.gpus is not None and self.late and (watched.seen == pid or watched.looked != pid):
            listed = watched.gpus
        elif reading is None or watched.gpus is None:
            watched.returned = "not watched"
            return
        else:
            listed = listing(reading, pid)
        if listed:
            self._returns.died(worker, pid, listed, now)
            watched.returned = "awaited"
            self._poll_later(now)
        elif watched.seen == pid:
            self._settled(Return(worker, pid, watched.gpus, True, 0.0))
        elif watched.looked == pid:
            watched.returned = "not watched"
            if not self._said_unknown:
                self._said_unknown = True
                self._log.warning(
                    "%s: NVML never listed its worker pid %d (another pid namespace, as in containers?): "
                    "VRAM of workers like it is not waited for", worker, pid,
                )  # fmt: skip

    def when_free(self, worker: str, on_free: Callable[[], None]) -> None:
        """Call ``on_free`` when no dead worker holds memory of this worker's GPUs any more.

        That may be at once. Memory that is not back ``DEADLINE_S`` seconds after its worker's end is not waited for.
        """
        watched = self._workers.get(worker)
        if watched is not None and watched.gpus is None:
            self.reading()
        pids = [] if watched is None else self._returns.pids_on(watched.gpus or ())
        if watched is None or not pids:
            on_free()
            return
        self._log.info("%s: waits for the VRAM of pid %s", worker, ", ".join(map(str, pids)), extra=about(worker))
        watched.on_free = on_free

    def forget(self, worker: str) -> None:
        """Cancel ``when_free`` for a worker."""
        watched = self._workers.get(worker)
        if watched is not None:
            watched.on_free = None

    def describe(self, worker: str, pid: int | None) -> dict[str, Any]:
        """Return the fields that ``status`` shows about a worker's memory. None means not known.

        vram_bytes: bytes that the present process holds, by NVML. vram_by_gpu: GPU → these bytes. vram_return: the
        state of the last process's memory: "awaited", "back", "not back" or "not watched". vram_returned_ms:
        milliseconds until it was back.

        pid  the present process; None if there is none
        """
        watched = self._workers.get(worker)
        reading = [] if watched is None else self._recent()
        held = {str(g.index): g.processes[pid] for g in reading if pid is not None and pid in g.processes}
        sizes = [size for size in held.values() if size is not None]
        return {
            "vram_bytes": sum(sizes) if sizes else None,
            "vram_by_gpu": held or None,
            "vram_return": watched and watched.returned,
            "vram_returned_ms": watched and watched.returned_ms,
        }

    def holders(self) -> dict[int, str]:
        """Return pid → text that says how much the process holds, by NVML, of the GPUs that models use."""
        recent = self._recent()
        used = {index for watched in self._workers.values() for index in watched.gpus or ()}
        holdings: dict[int, list[str]] = {}
        for gpu in recent:
            for pid, size in gpu.processes.items() if gpu.index in used else ():
                holdings.setdefault(pid, []).append(
                    f"{'memory' if size is None else f'{size / (1 << 30):.1f} GiB'} of GPU {gpu.index}"
                )
        return {pid: " and ".join(parts) for pid, parts in holdings.items()}

    def describe_gpus(self, limits: Mapping[str, Limit] | Limit | None) -> list[dict[str, Any]]:
        """Return every GPU as ``status`` shows it. Empty if no model uses a GPU. ``limits`` as for ``policy.rooms``."""
        return [described_gpu(gpu, limits) for gpu in self._recent()]

    def _poll_later(self, now: float, took_s: float = 0.0) -> None:
        if not self._polling:  # one timer serves all dead processes
            self._polling = True
            self._timers.at(now + max(POLL_S, 2 * took_s), self._poll)  # if the driver is slow, tokens go first

    def _poll(self) -> None:
        self._polling = False
        begun = time.monotonic()
        reading = self.reading(self._returns.gpus)
        now = time.monotonic()
        for outcome in self._returns.over(reading, now, late=self.late):
            self._settled(outcome)
        if self._returns.gpus:
            self._poll_later(now, now - begun)
        for watched in list(self._workers.values()):  # a start may unload or start other workers
            if watched.on_free is not None and not self._returns.pids_on(watched.gpus or ()):
                on_free, watched.on_free = watched.on_free, None
                on_free()

    def _settled(self, outcome: Return) -> None:
        watched = self._workers.get(outcome.worker) or _WatchedWorker(())  # the worker was removed meanwhile
        watched.returned = "back" if outcome.back else "not back"
        watched.returned_ms = round(outcome.after_s * 1000, 1) if outcome.back else None
        where = ", ".join(map(str, sorted(outcome.gpus)))
        if outcome.back:
            self._log.info(
                "%s: VRAM back after %s ms (GPU %s, pid %d)",
                outcome.worker, watched.returned_ms, where, outcome.pid, extra=about(outcome.worker),
            )  # fmt: skip
        else:
            self._log.warning(
                "%s: VRAM of pid %d on GPU %s is not back after %.1f s; not waiting any longer",
                outcome.worker, outcome.pid, where, outcome.after_s, extra=noted(EventKind.VRAM, outcome.worker),
            )  # fmt: skip

    def _recent(self) -> list[Gpu]:
        """Return all GPUs, read at most ``AHEAD_S`` ago. Empty if they cannot be read."""
        age = None if self._last is None else time.monotonic() - self._last[0]
        if age is None or age > (FRESH_S if self._trouble is not None else AHEAD_S):
            self.reading()
        elif age > FRESH_S:
            self._read_ahead()
        return self._last[1] if self._last else []

    def reading(self, only: Collection[int] | None = None) -> list[Gpu] | None:
        """Read all GPUs now, or those with the indices ``only``. Return None if they cannot be read, and say so in the
        log."""
        if self._gpus is None:
            return None
        try:
            reading = self._gpus.read(only)
        except GpusUnknown as e:
            self._unreadable(e, time.monotonic())
            return None
        if self._trouble is not None:
            after = time.monotonic() - self._trouble[0]
            self._log.info("VRAM can be read again, after %.1f s", after, extra=noted(EventKind.VRAM))
            self._trouble = self._last = None
        if only is None:
            self._last = time.monotonic(), reading
            self._note(reading)
        return reading

    def _read_ahead(self) -> None:
        """Take in the answer to the last question if it has come. If there is no question, ask one. Never waits."""
        if self._gpus is None:
            return
        try:
            answer = self._gpus.read_ahead()
        except GpusUnknown as e:
            self._unreadable(e, time.monotonic())
            return
        if answer is not None:
            self._last = answer
            self._note(answer[1])

    def _unreadable(self, why: GpusUnknown, now: float) -> None:
        before, since = (None, now) if self._trouble is None else (self._trouble[1], self._trouble[0])
        self._trouble = since, why
        self._last = now, []  # so that NVML is not asked again for each model of a status
        if isinstance(why, GpusAbsent):
            self._log.warning("VRAM is not watched: NVML: %s", why, extra=noted(EventKind.VRAM))
            self.close()
        elif type(before) is not type(why) or (before.args != why.args and not isinstance(why, GpusLate)):
            self._log.warning("VRAM cannot be read: NVML: %s", why, extra=noted(EventKind.VRAM))
        if isinstance(why, GpusLate) and not self._looking:
            self._looking = True
            self._timers.at(now + CHECK_S, self._read_late_answer)

    def _read_late_answer(self) -> None:
        """Check whether a late answer has come, and say so in the log. Without this check, the next reading might be
        hours away."""
        self._looking = False
        if self.late:
            self.reading()

    def _note(self, reading: list[Gpu]) -> None:
        """Note which GPUs the pins mean, at the first reading, and which workers NVML lists."""
        for watched in self._workers.values():
            if watched.gpus is None:
                meant = (gpu.index for gpu in reading for pin in watched.pins if gpu.is_meant(pin))
                watched.gpus = frozenset(meant)
            if watched.ready is not None:
                watched.looked = watched.ready
                if listing(reading, watched.ready):
                    watched.seen = watched.ready


def described_gpu(gpu: Gpu, limits: Mapping[str, Limit] | Limit | None) -> dict[str, Any]:
    """Return a GPU as ``status`` shows it. ``limits`` as for ``policy.rooms``."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "total_bytes": gpu.total,
        "used_bytes": gpu.used,
        "free_bytes": gpu.free,
        "limit_bytes": limit_of(gpu, limits),
        "utilization_percent": gpu.sensors.utilization,
        "temperature_celsius": gpu.sensors.temperature,
        "power_watts": gpu.sensors.power,
        "power_limit_watts": gpu.sensors.power_limit,
    }


# The host memory of models that sleep: the bound, and who has to leave. Sizes are in bytes. All but ``free_bytes`` is
# pure.


SHARE = 0.5
"""The share of the free host memory that models may take by default."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The host memory of one worker.

    since  monotonic seconds since which the worker sleeps; None if it is awake and keeps a copy of its weights
    """

    worker: str
    bytes: int
    since: float | None


def room(copies: Sequence[HostCopy], bound: int) -> int:
    """Return the bytes that workers may take that fall asleep now, if all that sleep are unloaded."""
    return max(0, bound - sum(copy.bytes for copy in copies if copy.since is None))


def to_unload(size: int, copies: Sequence[HostCopy], bound: int) -> tuple[str, ...] | None:
    """Return the workers to unload before another one may sleep with ``size`` bytes: those that have slept longest.
    Return None if that is not enough."""
    excess = sum(copy.bytes for copy in copies) + size - bound
    asleep = sorted((copy for copy in copies if copy.since is not None), key=lambda copy: copy.since or 0.0)
    leave: list[str] = []
    for copy in asleep:
        if excess <= 0:
            break
        leave.append(copy.worker)
        excess -= copy.bytes
    return tuple(leave) if excess <= 0 else None


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the machine and this process's cgroup have free. 0 if that cannot be read."""
    try:
        facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
        own = next(line for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, KeyError, ValueError, StopIteration):
        return 0
    group = cgroups / own.removeprefix("0::").lstrip("/")
    for place in (group, *group.parents):  # a limit of any group above counts, too
        if not place.is_relative_to(cgroups):
            break
        try:
            limit, used = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    return free
