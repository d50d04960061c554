"""The VRAM of workers: who holds what, and that the next worker is spawned when the last one's memory is back."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from supervisor.model_logs import about
from supervisor.placement.gpu_reader import START_S, GpuReader
from supervisor.placement.gpus import Gpu, GpusAbsent, GpusLate, GpusUnknown
from supervisor.placement.vram_return import Return, VramReturns, listing
from supervisor.timers import Timers

POLL_S = 0.02
"""Between readings while a dead process's memory is awaited."""
FRESH_S = 1.0
"""How old a reading may be that ``status`` shows."""
CHECK_S = 0.25
"""Between looks whether an answer that is late has come."""


@dataclass
class _WatchedWorker:
    """One model's. ``gpus``: indices that its pins mean, None before a reading has told. ``ready``: pid of its last
    worker that was loaded, ``looked``: for which NVML has been read since, ``seen``: which it listed alive then."""

    pins: Collection[str]
    gpus: frozenset[int] | None = None
    seen: int | None = None
    ready: int | None = None
    looked: int | None = None
    returned: str | None = None
    returned_ms: float | None = None
    on_free: Callable[[], None] | None = field(default=None, repr=False)


class Vram:
    """All workers' VRAM. Runs on the supervisor's one thread, by the loop's timers; never sleeps. Without NVML nobody
    waits, and nothing is shown. While NVML answers late, memory is waited for as long as if it were not back."""

    def __init__(self, timers: Timers, log: logging.Logger) -> None:
        self._gpus: GpuReader | None = None
        self._opened = self._serves = False
        self._timers = timers
        self._log = log
        self._said: set[str] = set()
        self._returns = VramReturns()
        self._last: tuple[float, list[Gpu]] | None = None
        self._polling = False
        self._looking = False
        self._trouble: tuple[float, GpusUnknown] | None = None
        """Since when there is no reading, and why."""
        self._workers: dict[str, _WatchedWorker] = {}

    def watch(self, worker: str, pins: Collection[str]) -> None:
        """A worker that is pinned to GPUs, by its pins in models.yaml. For the first, NVML begins to be opened."""
        if not self._opened:
            self._opened, self._gpus = True, GpuReader(self._log, start_s=0.0 if self._serves else START_S)
        self._workers[worker] = _WatchedWorker(pins)

    def serves(self) -> None:
        """From now on tokens wait meanwhile: a driver that is opened later, for a model that a reload has brought, is
        not waited for."""
        self._serves = True

    def unwatch(self, worker: str) -> None:
        """A worker that is stopped will not come back. What it held is still waited for."""
        self._workers.pop(worker, None)

    def close(self) -> None:
        """The supervisor leaves."""
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    @property
    def trouble(self) -> str | None:
        """Why the GPUs cannot be read, for people; None if they can be, or nobody uses them."""
        if self._trouble is None:
            return None
        since, why = self._trouble
        return f"NVML: {why}, since {time.monotonic() - since:.0f} s"

    @property
    def late(self) -> bool:
        """Whether the last reading was none because the answer is late: another try may have it."""
        return self._trouble is not None and isinstance(self._trouble[1], GpusLate)

    @property
    def awaited(self) -> bool:
        """Whether memory of a dead process is still out."""
        return bool(self._returns.gpus)

    def ready(self, worker: str, pid: int) -> None:
        """The model is loaded: if NVML knows our pids at all, it lists this one now."""
        watched = self._workers.get(worker)
        if watched is not None:
            watched.ready = pid
            self._read()

    def ended(self, worker: str, pid: int) -> None:
        """The worker's process is gone. From now on ``when_free`` waits for its memory."""
        watched = self._workers.get(worker)
        if watched is None:
            return
        watched.returned = watched.returned_ms = None
        reading = self._read(watched.gpus)
        now = time.monotonic()
        if watched.gpus is not None and self.late and (watched.seen == pid or watched.looked != pid):
            self._returns.died_unseen(worker, pid, watched.gpus, now)
            watched.returned = "awaited"
            self._poll_later(now)
        elif reading is None or watched.gpus is None:
            watched.returned = "not watched"
        elif self._returns.died(worker, pid, reading, now):
            watched.returned = "awaited"
            self._poll_later(now)
        elif watched.seen == pid:
            self._settled(Return(worker, pid, watched.gpus, True, 0.0))
        elif watched.looked == pid:
            watched.returned = "not watched"
            self._say_once(
                "unknown pids",
                f"{worker}: NVML never listed its worker pid {pid} (another pid namespace, as in containers?): "
                "VRAM of workers like it is not waited for",
            )

    def when_free(self, worker: str, on_free: Callable[[], None]) -> None:
        """Call ``spawn``: at once, or when no dead worker holds memory of the model's GPUs, or its time is over."""
        watched = self._workers.get(worker)
        if watched is not None and watched.gpus is None:
            self._read()
        pids = [] if watched is None else self._returns.pids_on(watched.gpus or ())
        if watched is None or not pids:
            on_free()
            return
        self._log.info("%s: waits for the VRAM of pid %s", worker, ", ".join(map(str, pids)), extra=about(worker))
        watched.on_free = on_free

    def forget(self, worker: str) -> bool:
        """The model is not to be spawned any more. Returns whether it was waiting for that."""
        watched = self._workers.get(worker)
        if watched is None or watched.on_free is None:
            return False
        watched.on_free = None
        return True

    def reading(self) -> list[Gpu] | None:
        """All GPUs as they are now; None if they cannot be read."""
        return self._read()

    def describe(self, worker: str, pid: int | None) -> dict[str, Any]:
        """vram_bytes: what the present process holds by NVML, vram_by_gpu: GPU → these bytes; vram_return: "awaited",
        "back", "not back" or "not watched", of the last process; vram_returned_ms. None: not known."""
        watched = self._workers.get(worker)
        if watched is None:
            return {"vram_bytes": None, "vram_by_gpu": None, "vram_return": None, "vram_returned_ms": None}
        held = {str(g.index): g.processes[pid] for g in self._recent() if pid is not None and pid in g.processes}
        sizes = [size for size in held.values() if size is not None]
        return {
            "vram_bytes": sum(sizes) if sizes else None,
            "vram_by_gpu": held or None,
            "vram_return": watched.returned,
            "vram_returned_ms": watched.returned_ms,
        }

    def holders(self) -> dict[int, str]:
        """pid → what it holds of the GPUs that are used, as NVML lists it, in words."""
        recent = self._recent()
        used = {index for watched in self._workers.values() for index in watched.gpus or ()}
        holdings: dict[int, list[str]] = {}
        for gpu in recent:
            for pid, size in gpu.processes.items() if gpu.index in used else ():
                holdings.setdefault(pid, []).append(
                    f"{'memory' if size is None else f'{size / (1 << 30):.1f} GiB'} of GPU {gpu.index}"
                )
        return {pid: " and ".join(parts) for pid, parts in holdings.items()}

    def describe_gpus(self) -> list[dict[str, Any]]:
        """Every GPU of the box: index, uuid, total_bytes, used_bytes, free_bytes. Empty if none is used."""
        return [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "total_bytes": gpu.total,
                "used_bytes": gpu.used,
                "free_bytes": gpu.free,
            }
            for gpu in self._recent()
        ]

    def _poll_later(self, now: float, took_s: float = 0.0) -> None:
        if not self._polling:  # one timer for all that is awaited
            self._polling = True
            self._timers.at(now + max(POLL_S, 2 * took_s), self._poll)  # where the driver is slow, tokens go first

    def _poll(self) -> None:
        self._polling = False
        begun = time.monotonic()
        reading = self._read(self._returns.gpus)
        now = time.monotonic()
        if reading is not None:
            over = self._returns.read(reading, now)
        else:
            over = self._returns.unread(now) if self.late else self._returns.give_up(now)
        for outcome in over:
            self._settled(outcome)
        if self._returns.gpus:
            self._poll_later(now, now - begun)
        for watched in list(self._workers.values()):  # a spawn may make others sleep, or wake
            if watched.on_free is not None and not self._returns.pids_on(watched.gpus or ()):
                on_free, watched.on_free = watched.on_free, None
                on_free()

    def _settled(self, outcome: Return) -> None:
        watched = self._workers.get(outcome.worker) or _WatchedWorker(())  # one that was removed meanwhile
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
                outcome.worker, outcome.pid, where, outcome.after_s, extra=about(outcome.worker),
            )  # fmt: skip

    def _recent(self) -> list[Gpu]:
        """All GPUs, read at most ``FRESH_S`` ago; empty if they cannot be read."""
        if self._last is None or time.monotonic() - self._last[0] > FRESH_S:
            self._read()
        return self._last[1] if self._last else []

    def _read(self, only: Collection[int] | None = None) -> list[Gpu] | None:
        """The GPUs; None if they cannot be read, which is said."""
        if self._gpus is None:
            return None
        try:
            reading = self._gpus.read(only)
        except GpusUnknown as e:
            self._unreadable(e, time.monotonic())
            return None
        if self._trouble is not None:
            self._log.info("VRAM can be read again, after %.1f s", time.monotonic() - self._trouble[0])
            self._trouble = self._last = None
        if only is None:
            self._last = time.monotonic(), reading
            self._note(reading)
        return reading

    def _unreadable(self, why: GpusUnknown, now: float) -> None:
        before, since = (None, now) if self._trouble is None else (self._trouble[1], self._trouble[0])
        self._trouble = since, why
        self._last = now, []  # not asked again for each model of a status
        if isinstance(why, GpusAbsent):
            self._log.warning("VRAM is not watched: NVML: %s", why)
            self.close()
        elif type(before) is not type(why) or (before.args != why.args and not isinstance(why, GpusLate)):
            self._log.warning("VRAM cannot be read: NVML: %s", why)
        if isinstance(why, GpusLate) and not self._looking:
            self._looking = True
            self._timers.at(now + CHECK_S, self._read_late_answer)

    def _read_late_answer(self) -> None:
        """Whether an answer that was late has come: nobody else may ask for hours, and it is to be said."""
        self._looking = False
        if self.late:
            self._read()

    def _note(self, reading: list[Gpu]) -> None:
        """Which GPUs the pins mean, where no reading has told yet, and which workers NVML lists alive."""
        for watched in self._workers.values():
            if watched.gpus is None:
                meant = (gpu.index for gpu in reading for pin in watched.pins if gpu.is_meant(pin))
                watched.gpus = frozenset(meant)
            if watched.ready is not None:
                watched.looked = watched.ready
                if listing(reading, watched.ready):
                    watched.seen = watched.ready

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._log.warning("%s", text)
