"""Before a worker is spawned: what it will take, whether there is room, and where.

Each start asks three in turn: for the model's needs (a process reads its directory), for the memory of dead workers to
be back, and then, at one moment and with everything that others are about to load, for a place. Who finds none is not
spawned. Models pinned to a GPU are placed before ``auto`` ones, each kind in the order of models.yaml, when they are
started together; ``modelctl plan`` does the same.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from protocol.process.engine_packages import missing_for
from protocol.process.worker_exit import LOAD_ERROR_PREFIX
from protocol.process.worker_spec import EngineSpec
from supervisor.config import ModelSpec
from supervisor.model_logs import about
from supervisor.placement.affinity import near_cpus, ranges
from supervisor.placement.estimates import Estimated, Estimator
from supervisor.placement.eviction import NoRoom
from supervisor.placement.gpu_requests import ESTIMATED, answer_with, declared, gpu_request_of, question_of
from supervisor.placement.gpu_shares import Needs
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import GpuRequest, Holding, Placed, Refused, gib, place, place_unseen, rooms
from supervisor.placement.sizes import Limit
from supervisor.placement.vram import Vram
from supervisor.timers import Timers
from supervisor.workers.exits import ExitReport, not_admitted, not_spawned

IDLE_WAIT_S = 60.0
"""How long a start waits for busy models to become idle, where there would be room without them. The time in which one
of them is loaded does not count."""
IDLE_CHECK_S = 0.25
READING_WAIT_S = 30.0
"""How long a start waits for GPUs whose answer is late: admitted without a look, it may take what others count on."""
Limits = Mapping[str, Limit] | Limit | None
Launch = Callable[[str, tuple[int, ...]], int | None]
"""(CUDA_VISIBLE_DEVICES, CPUs to keep to) → pid; None if there is no process after all."""


class MakeRoom(Protocol):
    """Sends workers to sleep for one that is to be loaded, see ``Demand.make_room``."""

    def __call__(self, worker: str, missing: Mapping[int, int], *, one_suffices: bool) -> tuple[str, ...] | NoRoom: ...


@dataclass
class _Asked:
    """A start that is being decided. ``estimated``: None before the answer. ``last``: no further try if refused."""

    worker: str
    label: str
    spec: ModelSpec
    gpu_request: GpuRequest
    number: int
    limits: Limits
    last: bool
    launch: Launch = field(repr=False)
    refuse: Callable[[ExitReport], None] = field(repr=False)
    estimated: Estimated | None = None
    waits_for_memory: bool = False
    evicting: set[str] = field(default_factory=set)
    """Workers that leave for it."""
    claims: bool = False
    """Others leave for it: what they held is its, and not theirs again at the next request for them."""
    since: float | None = None
    """When it was found first that there is no room."""
    unread_since: float | None = None
    """When it was found first that the GPUs answer late."""

    @property
    def order(self) -> tuple[bool, int]:
        return self.gpu_request.pins is None, self.number

    def goes_before(self, other: "_Asked") -> bool:
        """Whether ``other`` has to wait until this one is decided."""
        if self is other or not self.may_want(other):
            return False
        if self.claims or other.claims:
            return self.claims and (not other.claims or self.order < other.order)
        pinned_waits = (
            self.unread_since is not None and self.gpu_request.pins is not None and other.gpu_request.pins is None
        )
        return self.order < other.order and (self.estimated is None or pinned_waits)

    def may_want(self, other: "_Asked") -> bool:
        """Whether the two may want the same GPU."""
        return (
            self.gpu_request.pins is None
            or other.gpu_request.pins is None
            or bool({*self.gpu_request.pins} & {*other.gpu_request.pins})
        )


@dataclass
class _Known:
    """What is known of a worker beyond its life. ``needs`` of ``spec`` by number of GPUs, of which it has ``count``;
    ``measured``: GPU → bytes when it was ready."""

    needs: Mapping[int, Needs] | None = None
    count: int = 1
    spec: EngineSpec | None = None
    placed: Placed | None = None
    cpus: tuple[int, ...] = ()
    measured: Mapping[int, int] = field(default_factory=dict)


class Admission:
    """All workers' places. Runs on the supervisor's one thread; the loop calls ``answered`` when ``descriptor`` is
    readable.

    vram   who reads the GPUs, and waits for memory
    outer  the supervisor's own CUDA_VISIBLE_DEVICES, None if it has none
    cpus   CPUs that the supervisor itself may use
    """

    def __init__(
        self,
        vram: Vram,
        outer: str | None,
        cpus: Collection[int],
        timers: Timers,
        log: logging.Logger,
    ) -> None:
        self.vram = vram
        self._outer = outer
        self._cpus = cpus
        self._timers = timers
        self._log = log
        self._estimator = Estimator(timers)
        self._asked: dict[str, _Asked] = {}
        self._without_packages: set[str] = set()
        """Workers whose refusal, for want of a package, is due in the next turn."""
        self._number = 0
        self._holdings: dict[str, Holding] = {}
        self._known: dict[str, _Known] = {}
        self._said_unseen = False
        self.make_room: MakeRoom = _make_none
        """Asked for one that finds no room."""

    @property
    def descriptor(self) -> int:
        return self._estimator.descriptor

    def answered(self) -> None:
        self._estimator.ended()

    def admit(
        self,
        worker: str,
        label: str,
        spec: ModelSpec,
        launch: Launch,
        refuse: Callable[[ExitReport], None],
        *,
        limits: Limits,
        last: bool,
    ) -> None:
        """Call ``spawn`` when there is a place, at once or later; or ``refuse``, never from within this call.

        label   what people call the worker
        limits  vram_limit of models.yaml
        last    whether a refusal for want of room is final. After a crash it is not: what fills the GPU now may go.
        """
        gpu_request = gpu_request_of(spec)
        self._known[worker] = _Known()
        if (missing := missing_for(spec.config.engine)) is not None:
            self._without_packages.add(worker)
            report = not_admitted("config", LOAD_ERROR_PREFIX + missing, retry=False)
            self._at_next_turn(lambda: self._refuse_without_packages(worker, refuse, report))
            return
        if gpu_request is None:
            launch("", ())
            return
        self._number += 1
        asked = _Asked(worker, label, spec, gpu_request, self._number, limits, last, launch, refuse)
        self._asked[worker] = asked
        # not for engine transformers: its worker finds the same faults, and the first token would wait for both
        question = question_of(spec) if spec.config.engine in ESTIMATED else None
        if question is not None:
            try:
                self._estimator.ask(worker, question, lambda estimated: self._on_estimate(asked, estimated))
            except OSError as e:
                report = not_spawned(e)
                self._at_next_turn(lambda: self._refuse(asked, report))
            return
        asked.estimated = answer_with(spec, None)
        if gpu_request.pins is None:
            self._at_next_turn(self._go_on)  # the pinned ones that are started along with it go first
        else:
            self._go_on()

    def forget(self, worker: str) -> bool:
        """The worker is not to be spawned any more. Returns whether that had yet to be decided."""
        self._estimator.forget(worker)
        self.vram.forget(worker)
        if worker in self._without_packages:
            self._without_packages.discard(worker)
            return True
        if self._asked.pop(worker, None) is None:
            return False
        self._at_next_turn(self._go_on)
        return True

    def ready(self, worker: str, pid: int) -> None:
        """The model is loaded: what it holds is measured from now on, no longer reckoned."""
        self.vram.ready(worker, pid)
        holding = self._holdings.get(worker)
        if holding is None:
            return
        self._holdings[worker] = replace(holding, loading=False)
        known = self._known[worker]
        held = self.vram.describe(worker, pid)["vram_by_gpu"] or {}
        known.measured = {int(gpu): size for gpu, size in held.items() if size is not None}
        measured, wanted = sum(known.measured.values()), sum(holding.placed.values())
        if measured and wanted:
            off = (measured - wanted) / wanted * 100
            self._log.info(
                "%s: holds %s GiB, estimated were %s (%+.1f %%)", worker, gib(measured), gib(wanted), off,
                extra=about(worker),
            )  # fmt: skip

    def ended(self, worker: str, pid: int) -> None:
        """The worker's process is gone."""
        self._holdings.pop(worker, None)
        self.vram.ended(worker, pid)
        for asked in self._asked.values():
            if worker in asked.evicting:
                asked.evicting.discard(worker)
                if not asked.evicting:
                    self._at_next_turn(lambda asked=asked: self._try_again(asked))  # type: ignore[misc]

    def removed(self, worker: str) -> None:
        """Nobody will ask for this worker any more."""
        self._known.pop(worker, None)

    def fits_surge(self, old: str, before: ModelSpec, after: ModelSpec, limits: Limits) -> bool:
        """Whether a successor would find room while the old worker is there, as far as that is known without reading
        the model's directory: its needs are declared, or are those of the old one, of which nothing has changed."""
        gpu_request = gpu_request_of(after)
        if gpu_request is None:
            return True
        known = self._known.get(old)
        needs: Mapping[int, Needs] | None = declared(after, gpu_request)
        if (
            needs is None
            and known is not None
            and known.spec == after.engine_spec
            and gpu_request_of(before) == gpu_request
        ):
            needs = known.needs
        reading = self.vram.reading()
        if needs is None or reading is None:
            return False
        there = rooms(reading, [*self._holdings.values()], limits)
        return isinstance(place(gpu_request, needs, there, self._outer), Placed)

    def describe(self, worker: str) -> dict[str, Any]:
        """placed: GPUs of the present or last process; cpus, numa_nodes: those it is kept to, None for all;
        vram_estimate: bytes by part, vram_estimate_bytes: their sum; vram_loaded_bytes: measured when it was ready.
        None: not known."""
        known = self._known.get(worker, _Known())
        parts = known.needs[known.count].parts(known.count) if known.needs else None
        nodes = frozenset[int]().union(*(gpu.nodes for gpu in known.placed.gpus)) if known.placed and known.cpus else ()
        return {
            "placed": [gpu.index for gpu in known.placed.gpus] if known.placed and known.placed.gpus else None,
            "cpus": ranges(known.cpus) or None,
            "numa_nodes": ranges(nodes) or None,
            "vram_estimate_bytes": sum(parts.values()) if parts else None,
            "vram_estimate": parts,
            "vram_loaded_bytes": sum(known.measured.values()) or None,
        }

    def _on_estimate(self, asked: _Asked, reported: Estimated) -> None:
        asked.estimated = answer_with(asked.spec, reported)
        if reported.error is not None:
            reason = "unreadable" if reported.retry else "config"
            self._refuse(asked, not_admitted(reason, LOAD_ERROR_PREFIX + reported.error, retry=reported.retry))
        self._go_on()

    def _go_on(self) -> None:
        """Decide for everybody who need not wait for the answer to another's question."""
        for asked in sorted(self._asked.values(), key=lambda a: a.order):
            ready = asked.estimated is not None and not any(a.goes_before(asked) for a in self._asked.values())
            if ready and not asked.waits_for_memory and self._asked.get(asked.worker) is asked:
                asked.waits_for_memory = True
                self.vram.when_free(asked.worker, lambda asked=asked: self._decide(asked))  # type: ignore[misc]

    def _decide(self, asked: _Asked) -> None:
        assert asked.estimated is not None
        worker, needs = asked.worker, asked.estimated.needs
        reading = self.vram.reading()
        late = reading is None and self.vram.late
        if late and self._reading_comes(asked):
            return
        asked.unread_since = None
        if reading is None:
            self._say_unseen()
            verdict = place_unseen(asked.gpu_request, self._outer)
        else:
            verdict = place(
                asked.gpu_request, needs, rooms(reading, [*self._holdings.values()], asked.limits), self._outer
            )  # fmt: skip
        count = asked.gpu_request.counts[0]
        known = self._known[worker] = _Known(needs, count, asked.spec.engine_spec)
        if isinstance(verdict, Refused) and verdict.missing and self._room_comes(asked, verdict):
            return
        if isinstance(verdict, Refused):
            reason = "no room" if verdict.missing else "unreadable" if late else "config"
            report = not_admitted(reason, verdict.message, retry=reason != "config" and not asked.last)
            self._at_next_turn(lambda: self._refuse(asked, report))
            return
        del self._asked[worker]
        self._at_next_turn(self._go_on)
        known.placed, known.cpus = verdict, near_cpus(verdict.gpus, self._cpus)
        self._say_placed(asked, verdict, known)
        # before it is spawned: that may fail, and another may be decided while it is under way
        holding = self._holdings[worker] = Holding(asked.label, None, verdict.bytes, loading=True)
        pid = asked.launch(verdict.devices, known.cpus)
        if pid is None:
            del self._holdings[worker]
        else:
            self._holdings[worker] = replace(holding, pid=pid)

    def _room_comes(self, asked: _Asked, verdict: Refused) -> bool:
        """Whether others leave for it, or may do so soon; then this is decided again."""
        leaving = self.make_room(asked.worker, verdict.missing, one_suffices=asked.gpu_request.pins is None)
        now = time.monotonic()
        if not isinstance(leaving, NoRoom):
            asked.evicting, asked.claims = set(leaving), True
            return True
        if leaving is NoRoom.NEVER:
            return False
        if asked.since is None:
            asked.since = now
            message = f"{asked.worker}: {verdict.message}; waits for busy models to become idle"
            self._log.info("%s", message, extra=about(asked.worker))
        if any(h.loading and h.placed.keys() & verdict.missing.keys() for h in self._holdings.values()):
            asked.since = now  # who loads cannot be idle yet, and a large model may take longer than that
        if now - asked.since >= IDLE_WAIT_S:
            return False
        self._timers.at(now + IDLE_CHECK_S, lambda: self._try_again(asked))
        return True

    def _reading_comes(self, asked: _Asked) -> bool:
        """Whether to wait for a reading; then this is decided again."""
        now = time.monotonic()
        if asked.unread_since is None:
            asked.unread_since = now
            message = f"{asked.worker}: waits for the GPUs to be read: {self.vram.trouble}"
            self._log.info("%s", message, extra=about(asked.worker))
        if now - asked.unread_since >= READING_WAIT_S:
            return False
        self._timers.at(now + IDLE_CHECK_S, lambda: self._try_again(asked))
        return True

    def _try_again(self, asked: _Asked) -> None:
        if self._asked.get(asked.worker) is asked:
            asked.waits_for_memory = False
            self._go_on()

    def held(self, worker: str, reading: Sequence[Gpu]) -> Mapping[int, int]:
        """GPU → bytes that come back when a worker goes: measured, or else as they were reckoned."""
        holding = self._holdings.get(worker)
        if holding is None:
            return {}
        measured = {g.index: g.processes.get(holding.pid) for g in reading if holding.pid is not None}
        return {gpu: measured.get(gpu) or size for gpu, size in holding.placed.items()}

    def _refuse(self, asked: _Asked, report: ExitReport) -> None:
        if self._asked.get(asked.worker) is asked:  # else it was stopped meanwhile
            del self._asked[asked.worker]
            asked.refuse(report)
            self._go_on()

    def _refuse_without_packages(self, worker: str, refuse: Callable[[ExitReport], None], report: ExitReport) -> None:
        if worker in self._without_packages:  # else it was stopped meanwhile
            self._without_packages.discard(worker)
            refuse(report)

    def _at_next_turn(self, call: Callable[[], None]) -> None:
        self._timers.at(time.monotonic(), call)

    def _say_placed(self, asked: _Asked, placed: Placed, known: _Known) -> None:
        where = ", ".join(str(gpu.index) for gpu in placed.gpus) or placed.devices
        if known.needs is not None:
            what = known.needs[known.count].text(known.count)
        else:
            why = asked.estimated.unknown if asked.estimated else ""
            what = f"needs not known ({why}; `vram` in models.yaml can say it), so nothing is refused"
        near = f"; CPUs {ranges(known.cpus)}" if known.cpus else ""
        self._log.info("%s: placed on GPU %s: %s%s", asked.worker, where, what, near, extra=about(asked.worker))

    def _say_unseen(self) -> None:
        if not self._said_unseen:
            self._said_unseen = True
            self._log.warning("models go where they are pinned, without a look at the GPUs: NVML tells nothing")


def _make_none(worker: str, missing: Mapping[int, int], *, one_suffices: bool) -> NoRoom:
    return NoRoom.NEVER
