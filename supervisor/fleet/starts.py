"""Starts and wakes of workers: their turn, their places in groups, the wait for GPU memory, and the process.

A start (``Start``) and a wake (``WakeAdmission``) take GPU memory. ``Starts`` says whose turn it is. One that finds
no room puts idle models to sleep or unloads them, or waits until busy models are idle. ``placement.eviction`` says when
busy models have to take no new requests for that.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from protocol.codec import encode
from protocol.messages import Wake as WakeMessage
from protocol.process.shown import masks
from protocol.process.worker_spec import LOAD_ERROR_PREFIX, WorkerSpec, missing_for
from supervisor.config.file import ModelSpec
from supervisor.fleet.replicas import Replica, ReplicaRegistry
from supervisor.fleet.sleepers import GroupPlaces, Sleepers
from supervisor.logs.events import EventKind, noted
from supervisor.logs.files import about
from supervisor.placement.estimates import (
    ESTIMATED,
    Estimated,
    Estimator,
    answer_with,
    declared,
    gpu_request_of,
    question_of,
)
from supervisor.placement.eviction import (
    BusyWait,
    Eviction,
    EvictionCandidate,
    NoRoom,
    Sizes,
    behind,
    choose,
    who_yields,
)
from supervisor.placement.gpus import Gpu
from supervisor.placement.memory import WorkerMemory
from supervisor.placement.policy import (
    GpuRequest,
    Holding,
    Needs,
    Placed,
    PlacementRefused,
    Room,
    gib,
    near_cpus,
    place,
    place_unseen,
    ranges,
    room_to_wake,
    rooms,
)
from supervisor.placement.vram import Vram
from supervisor.reactor import Timers
from supervisor.requests.request import Awaited, EffectQueue, ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.table import awaited_text
from supervisor.workers.exits import ExitReport, not_admitted, not_spawned
from supervisor.workers.launcher import Elsewhere, Launcher
from supervisor.workers.life import GOING_DOWN, WorkerState

_LEAVING = (*GOING_DOWN, WorkerState.FALLING_ASLEEP)
RETRY_S = 0.25
"""Seconds between two decisions about a start that waits for room or for a reading of the GPUs."""
READING_WAIT_S = 30.0
"""Seconds that a start waits for GPUs whose answer is late. A worker that is started without a reading may take memory
that other workers need."""


class Stage(Enum):
    ESTIMATE = "estimate"
    """The model's needs are not known yet."""
    TURN = "turn"
    """The start waits for others that are decided before it."""
    MEMORY = "memory"
    """The start waits for the memory of dead workers, or is being decided."""
    ROOM = "room"
    """There is no room, or no reading of the GPUs. The start is decided again later."""
    REFUSED = "refused"
    """The worker is not started. The next turn of the loop counts that as its end."""
    OVER = "over"
    """The process was launched, or the refusal was counted."""


class Admission:
    """One worker that is to take GPU memory.

    number  the place in the order in which starts and wakes began
    """

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        self._starts = starts
        self.replica = replica
        self._spec = replica.spec
        self._gpu_request = gpu_request_of(replica.spec)
        self.number = number
        self.stage = Stage.ESTIMATE
        self.leaving: set[str] = set()
        """Workers that are put to sleep or unloaded to make room for this one."""
        self.has_places = False
        """Whether the model has its places in its groups. Without them this one holds no memory either."""
        self._claims = False
        """Whether workers were put to sleep or unloaded for this one. Their memory is reserved for it, even if a
        request needs one of those workers again at once."""
        self.yielding: tuple[str, ...] = ()
        """Workers that take no new requests, because this one waits for their places or their memory."""
        self.awaited: frozenset[Any] = frozenset()
        """GPUs on which this one waits for busy models. Later starts make no model leave there."""
        self._began = time.monotonic()
        self._busy_wait: BusyWait | None = None
        crashed = bool(replica.life.history.recent)
        self._for_requests = replica.spec.config.lazy and (crashed or starts.scheduler.lacks_worker(replica.model))
        """Whether a model yields to this one only while requests wait for it. Else somebody has ordered the worker up,
        or it is to be up at all times."""
        self._has_waited = False
        self._shown: Awaited = ()
        self._no_reading_since: float | None = None

    # --- what a start and a wake do differently -------------------------------------------------------------------

    def _decide(self) -> None:
        """Take the memory if there is room. Else wait for it, or end without it."""
        raise NotImplementedError

    def _refuse_place(self, why: str) -> None:
        """End without the memory, because a group of the model is full."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """End this, because the worker was ordered down. Return whether that is reported as the end of a process."""
        raise NotImplementedError

    # --- the wait for places in groups ----------------------------------------------------------------------------

    def take_turn(self) -> None:
        """Take the model's places in its groups, then wait for memory. ``Starts`` calls this when the turn of this
        start has come."""
        if not self.has_places:
            missing = self._starts.places.missing(self.replica.model)
            if missing:
                self._wait_for_place(missing)
                return
            self.has_places = True
            self._busy_wait = None
            self._stop_waiting()
        self._wait_for_memory()

    def _wait_for_place(self, missing: Mapping[str, int]) -> None:
        """Make models of full groups leave, or wait until one is idle, or end without a place."""
        places = self._starts.places
        leaving = places.make_room(self.replica, missing)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving = Stage.ROOM, set(leaving)
            self._stop_waiting()
            return
        why, models = places.refusal(missing), places.holders()
        yielding = self._who_yields(missing, models, one_loads=places.is_loading(missing))
        if leaving is NoRoom.NEVER or yielding is None:
            self._refuse_place(why)
            return
        in_the_way = yielding or who_yields(missing, [replace(model, stays_s=0.0) for model in models])
        self._wait_for_busy(why, places.workers_of(yielding), places.workers_of(in_the_way))

    # --- the wait for memory ------------------------------------------------------------------------------------

    def _wait_for_memory(self) -> None:
        """Decide now, or as soon as dead workers have given back their memory of the model's GPUs."""
        self.stage = Stage.MEMORY
        self._starts.vram.when_free(self.replica.name, self._decide)

    def _waits_for_reading(self) -> bool:
        """Return whether the start is decided again later, because the GPUs answer late."""
        now = time.monotonic()
        if self._no_reading_since is None:
            self._no_reading_since = now
            self._say(f"waits for the GPUs to be read: {self._starts.vram.trouble}")
        if now - self._no_reading_since >= READING_WAIT_S:
            return False
        self._decide_again_at(now + RETRY_S)
        return True

    def _waits_for_room(self, refused: PlacementRefused) -> bool:
        """Return whether the start is decided again later, because workers were unloaded or may soon be idle."""
        assert self._gpu_request is not None
        missing, one_suffices = refused.missing, self._gpu_request.one_suffices
        others = self._candidates(self._starts.vram.reading() or [], time.monotonic())
        others = behind(others, self._starts.awaited_before(self.number))
        leaving = self._make_room(missing, others)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving, self._claims = Stage.ROOM, set(leaving), True
            self._stop_waiting()
            return True
        one_loads = any(h.loading and h.placed.keys() & missing.keys() for h in self._starts.holdings())
        yielding = self._who_yields(missing, others, one_suffices=one_suffices, one_loads=one_loads)
        if leaving is NoRoom.NEVER or yielding is None:
            self._stop_waiting()
            return False
        at_last = [replace(other, stays_s=0.0) for other in others]
        in_the_way = yielding or who_yields(missing, at_last, one_suffices=one_suffices)
        held = [gpu for other in others if other.worker in yielding for gpu in other.held]
        self.awaited = frozenset(held or missing) if self.is_wanted else frozenset()
        self._wait_for_busy(refused.message, yielding, in_the_way)
        return True

    def _who_yields(self, missing: Sizes, others: Sequence[EvictionCandidate], **how: bool) -> tuple[str, ...] | None:
        """Return the workers that take no new requests until the next look. ``how``: see ``BusyWait.look``."""
        if self._busy_wait is None:
            self._busy_wait = BusyWait(self._began)
        return self._busy_wait.look(time.monotonic(), missing, others, wanted=self.is_wanted, **how)

    @property
    def is_wanted(self) -> bool:
        """Whether busy models have to make room: somebody has ordered the worker up, or requests wait for it and for no
        other worker of its model."""
        return not self._for_requests or self._starts.scheduler.lacks_worker(self.replica.model)

    def _wait_for_busy(self, why: str, yielding: tuple[str, ...], in_the_way: Sequence[str]) -> None:
        """Have the start decided again later, because busy models are in the way.

        yielding    the workers that take no new requests until then
        in_the_way  those that do not make room yet, too
        """
        if not self._has_waited:
            self._has_waited = True
            self._say(f"{why}; waits for busy models to become idle")
        self._starts.let_yield(self, yielding)
        self._show(self._starts.registry.awaited(in_the_way))
        self._decide_again_at(time.monotonic() + RETRY_S)

    def _stop_waiting(self) -> None:
        """Let all models go on that have yielded to this start, since it waits for busy models no more."""
        self.awaited = frozenset()
        self._starts.let_yield(self, ())
        self._show(())

    def _show(self, awaited: Awaited) -> None:
        """Show in ``status``, and to clients that wait, what this start waits for."""
        if awaited != self._shown:
            self._shown = awaited
            self.replica.waits = f"queued: waits for {awaited_text(awaited)}" if awaited else ""
            self._starts.scheduler.waits_for(self.replica.model, awaited)

    def _make_room(
        self, missing: Mapping[int, int], candidates: Sequence[EvictionCandidate]
    ) -> tuple[str, ...] | NoRoom:
        """Put idle workers to sleep, or unload them, if this one needs their memory.

        Return their names, or the reason why none makes room.

        Workers that load now, or leave anyway, count as busy: the start waits for them.

        missing     GPU → bytes
        candidates  the workers that may leave
        """
        assert self._gpu_request is not None
        sleepers, one_suffices = self._starts.sleepers, self._gpu_request.one_suffices
        chosen = choose(missing, candidates, one_suffices=one_suffices, host_room=sleepers.room)
        if isinstance(chosen, NoRoom):
            return chosen
        self._say_evicted(missing, chosen)
        for eviction in chosen:
            sleepers.evict(eviction.worker, f"evicted for {self.replica.label}", sleeps=eviction.sleeps)
        return tuple(eviction.worker for eviction in chosen)

    def _candidates(self, reading: Sequence[Gpu], now: float) -> list[EvictionCandidate]:
        """Return the workers that may make room: those of other models, and those that leave anyway."""
        return [
            self._candidate(other, reading, now)
            for other in self._starts.registry.replicas.values()
            if other.state in _LEAVING or (other.model != self.replica.model and other.may_be_evicted)
        ]

    def _candidate(self, other: Replica, reading: Sequence[Gpu], now: float) -> EvictionCandidate:
        leases = {} if other.process is None else other.process.leases
        held: Sizes = {**other.memory.comes_back(reading), **leases}
        may_sleep, left = other.can_sleep and other.state is not WorkerState.ASLEEP, other.memory.left_asleep
        return EvictionCandidate(
            other.name,
            held,
            busy=not (self._starts.registry.may_leave(other) or other.state is WorkerState.ASLEEP),
            priority=other.spec.config.priority,
            load_s=float(other.info.get("load_seconds", 0)),
            idle_s=now - other.last_active,
            slept={gpu: max(0, size - left.get(gpu, 0)) for gpu, size in held.items()} if may_sleep else None,
            wake_s=self._starts.sleepers.seconds(other),
            host_bytes=max(0, other.sleep_bytes - other.host_bytes),
            leaves=other.state in _LEAVING,
            stays_s=other.stays_s(now),
            yields=bool(other.yields_to),
        )

    def _say_evicted(self, missing: Mapping[int, int], chosen: Sequence[Eviction]) -> None:
        short = ", ".join(f"{gib(size)} GiB on GPU {gpu}" for gpu, size in missing.items())
        parts = [
            f"{verb} {', '.join(names)}"
            for verb, sleeps in (("putting to sleep", True), ("unloading", False))
            if (names := [eviction.worker for eviction in chosen if eviction.sleeps is sleeps])
        ]
        message = f"{self.replica.shown}: needs {short}: {'; '.join(parts)}"
        self._starts.log.info("%s", message, extra=noted(EventKind.EVICTION, self.replica.log_name))

    def _decide_again_at(self, when: float) -> None:
        self.stage = Stage.ROOM
        self._starts.timers.at(when, self.decide_again)

    def decide_again(self) -> None:
        """Have the start wait for its turn again, if it still waits for room or for a reading."""
        if self.stage is Stage.ROOM:
            self.stage = Stage.TURN
            self._starts.advance()

    # --- whose turn it is ---------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[bool, int]:
        """The place among the starts under way. Pinned models come first, then the starts that began earlier."""
        return self._gpu_request is None or self._gpu_request.pins is None, self.number

    def goes_before(self, other: "Admission") -> bool:
        """Return whether ``other`` has to wait until this start is decided."""
        if self is other or self.stage is Stage.REFUSED:
            return False
        # Places go to the start that began first, so that no start is overtaken again and again. A start with claims on
        # memory has its places, so that no two starts can wait for each other, one for memory and one for a place.
        want_places = not self.has_places and not other.has_places and self.number < other.number
        if want_places and self._starts.places.share(self.replica.model, other.replica.model):
            return True
        if not _may_want_same(self._gpu_request, other._gpu_request):
            return False
        if self._claims or other._claims:
            return self._claims and (not other._claims or self.order < other.order)
        pinned_waits = self._no_reading_since is not None and not self.order[0] and other.order[0]
        return self.order < other.order and (self.stage is Stage.ESTIMATE or pinned_waits)

    def _say(self, text: str) -> None:
        name = self.replica.name
        self._starts.log.info("%s", f"{name}: {text}", extra=noted(EventKind.PLACEMENT, name))

    def _end(self) -> None:
        self.stage = Stage.OVER
        self._stop_waiting()
        self.replica.waits = ""  # for room elsewhere
        self._starts.remove(self)


def _may_want_same(one: GpuRequest | None, other: GpuRequest | None) -> bool:
    """Return whether two models may want the same GPU."""
    if one is None or other is None:
        return False
    return one.pins is None or other.pins is None or bool({*one.pins} & {*other.pins})


# Start workers: estimate what a model needs, wait for memory, choose GPUs, launch the process.
#
# A ``Start`` takes one process from the order to the launch. Its methods stand in the order of its stages:
#
#     begin            checks the engine's packages, and has another process read the model's directory for an estimate
#     take_turn        takes the model's places in its groups (``admission``)
#     _wait_for_memory waits until dead workers have given back their memory of the model's GPUs (``admission``)
#     _decide          chooses GPUs, and counts the memory that other workers hold and are about to load
#     _waits_for_room  if there is no room: puts idle models to sleep or unloads them, or waits until busy models are
#                      idle (``admission``)
#     _decide_elsewhere  asks the launcher for GPUs elsewhere, unloads idle models there, or waits
#     _launch          starts the process, here or elsewhere
#     _refuse          ends the start without a process
#     cancel           ends the start at any stage, because the worker was ordered down
#
# ``starts`` has the starts that are under way, and says whose turn it is. Models that are pinned to a GPU are placed
# before ``auto`` ones, and each kind in the order of models.yaml. ``modelctl plan`` does the same.


READING_RETRY_S = 2.0
"""Seconds between two decisions about a start that waits for GPUs here or elsewhere, without an end. Each reads the
GPUs, which tokens wait for."""


class Start(Admission):
    """The start of one process, of a new generation. ``Starts.begin`` makes it."""

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        starts.registry.new_generation(replica)
        super().__init__(starts, replica, number)
        self._estimated: Estimated | None = None
        self._refusal: ExitReport | None = None
        self._elsewhere = self._spec.elsewhere
        self._said: str | None = None
        """Why the start waits for GPUs elsewhere, as the log was told last."""

    # --- the stages, in their order -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Check that the engine's packages are there, and estimate what the model needs."""
        engine = self._spec.config.engine
        if self._spec.here and (missing := missing_for(engine)) is not None:
            if self._elsewhere is None:
                self._refuse_soon(not_admitted("config", LOAD_ERROR_PREFIX + missing, retry=False))
                return
            self._gpu_request = None  # the packages may be there
        if self._gpu_request is None:  # on the CPU, or elsewhere
            self.stage = Stage.TURN
            self._starts.advance()
            return
        # No check for engine transformers: its worker finds the same faults, and the first token would wait for both.
        question = question_of(self._spec) if engine in ESTIMATED else None
        if question is not None:
            try:
                self._starts.estimator.ask(self.replica.name, question, self._take_estimate)
            except OSError as e:
                self._refuse_soon(not_spawned(e))
            return
        self._estimated, self.stage = answer_with(self._spec, None), Stage.TURN
        if self._gpu_request.pins is None:
            self._starts.at_next_turn(self._starts.advance)  # pinned models that are started along with it go first
        else:
            self._starts.advance()

    def _take_estimate(self, estimated: Estimated) -> None:
        self._estimated, self.stage = answer_with(self._spec, estimated), Stage.TURN
        if estimated.error is not None and estimated.faults[0].machine and self._elsewhere is not None:
            self._gpu_request = None
            self._starts.advance()
        elif estimated.error is not None:
            self._refuse(not_admitted(estimated.reason, LOAD_ERROR_PREFIX + estimated.error, retry=estimated.retry))
        else:
            self._starts.advance()

    def _wait_for_memory(self) -> None:
        if self._gpu_request is not None:
            super()._wait_for_memory()
        elif self._elsewhere is not None and self._elsewhere.gpus:
            self._decide_elsewhere(self._elsewhere, None)
        else:
            self._launch("", None, self._elsewhere)

    def _decide(self) -> None:
        """Choose GPUs. If there is no room now, wait for it or refuse the start."""
        assert self._gpu_request is not None
        assert self._estimated is not None
        starts, needs = self._starts, self._estimated.needs
        reading = starts.vram.reading()
        late = reading is None and starts.vram.late
        if late and self._waits_for_reading():
            return
        self._no_reading_since = None
        memory = self.replica.memory = WorkerMemory(needs, self._gpu_request.counts[0], self._spec.engine_spec)
        if reading is None:
            starts.say_unseen()
            decision = place_unseen(self._gpu_request, starts.outer)
        else:
            decision = place(self._gpu_request, needs, starts.rooms(reading), starts.outer)
        if isinstance(decision, Placed):
            memory.placed, memory.cpus = decision, near_cpus(decision.gpus, starts.cpus)
            self._say_placed(decision, memory)
            self._launch(decision.devices, decision)
        elif self._elsewhere is not None:
            self._decide_elsewhere(self._elsewhere, decision)
        elif not (decision.missing and self._waits_for_room(decision)):
            reason = "no room" if decision.missing else "unreadable" if late else "config"
            # After a crash, a refusal for want of room is not final: what fills the GPU now may go.
            crashed = bool(self.replica.life.history.recent)
            self._refuse_soon(not_admitted(reason, decision.message, retry=reason != "config" and crashed))

    def _decide_elsewhere(self, elsewhere: Elsewhere, here: PlacementRefused | None) -> None:
        """Start the worker elsewhere if there is room. If there is none, have idle models leave, here or there, or
        wait.

        here  why it cannot be placed on this machine; None if it is not to be
        """
        starts = self._starts
        if (no := starts.launcher.no_room(elsewhere)) is None:
            self._launch("", None, elsewhere)
            return
        self.replica.waits = why = str(no) if here is None else f"{here.message}; {no}"
        if str(no) != self._said:  # the figures of this machine's GPUs may change at every look
            self._said = str(no)
            self._say(f"waits: {why}")
        if here is not None and here.missing and self._waits_for_room(here):
            return
        now = time.monotonic()
        others = self._candidates([], now)
        leaving = choose(no.missing, others, one_suffices=True)
        if isinstance(leaving, NoRoom):
            yielding = self._who_yields(no.missing, others, one_suffices=True)
            if yielding is None:
                self._busy_wait = None
            starts.let_yield(self, yielding or ())
            self._decide_again_at(now + (RETRY_S if here is None else READING_RETRY_S))
            return
        self.stage, self.leaving = Stage.ROOM, {eviction.worker for eviction in leaving}
        starts.let_yield(self, ())
        self._say(f"{no}: unloading {', '.join(sorted(self.leaving))}")
        for worker in sorted(self.leaving):
            starts.sleepers.evict(worker, f"evicted for {self.replica.label}", sleeps=False)

    def _launch(self, devices: str, placed: Placed | None, elsewhere: Elsewhere | None = None) -> None:
        """Start the process.

        devices    the CUDA_VISIBLE_DEVICES of the process
        placed     where the worker was placed; None on the CPU, and elsewhere
        elsewhere  what it wants there; None to start it on this machine
        """
        starts, replica, config = self._starts, self.replica, self._spec.config
        engine = self._spec.engine_spec
        needs = (replica.memory.needs or {}).get(1)
        if elsewhere is not None:
            engine = dataclasses.replace(engine, sleep=False)
            replica.memory = WorkerMemory()
        elif engine.sleep and needs is not None:
            prepares = starts.sleepers.takes_ahead(replica, needs.weights + needs.draft)
            engine = dataclasses.replace(engine, prepare_sleep=prepares)
        replica.log_style = starts.registry.log_styles.of(replica.model)
        spec = WorkerSpec(
            engine=engine,
            generation=replica.generation,
            visible_devices=devices,
            cpus=replica.memory.cpus,
            masks=masks(),
            endpoint=starts.back_endpoint,
            routing_id=replica.routing_id,
            log_path=str(replica.log_path),
            supervisor_pid=os.getpid(),
            leases=starts.registry.config.supervisor.leases(config),
            name=replica.label,
            log=replica.log_style,
            **self._spec.told,
        )
        try:
            process = starts.launcher.start(spec, elsewhere)
        except OSError as e:
            self._refuse_soon(not_spawned(e))
            return
        starts.registry.launched(replica, process)
        if placed is not None:
            replica.memory.holding = Holding(replica.label, process.pid, placed.bytes, loading=True)
        where = f"on {process.placed_on}" if process.placed_on else f"devices: {devices or 'cpu'}"
        what = f"spawned pid {process.pid}" if process.pid else "ordered"
        starts.log.info(
            "%s: %s, generation %d, %s", replica.shown, what, replica.generation, where, extra=about(replica.log_name)
        )
        self._end()
        starts.at_next_turn(starts.advance)

    # --- the ends without a process -----------------------------------------------------------------------------

    def cancel(self) -> bool:
        """End the start, because the worker was ordered down. The next turn of the loop counts that as the worker's
        end, like the end of a process."""
        self._starts.estimator.forget(self.replica.name)
        self._starts.vram.forget(self.replica.name)
        self._refuse_soon(ExitReport(0, "asked", "stopped before it was spawned", retry=False))
        return True

    def _refuse_place(self, why: str) -> None:
        self._refuse_soon(not_admitted("no room", why, retry=bool(self.replica.life.history.recent)))

    def _refuse_soon(self, report: ExitReport) -> None:
        """Refuse the start in the next turn, since the worker may be in the middle of its transition to STARTING."""
        self._refusal = report
        if self.stage is not Stage.REFUSED:
            self.stage = Stage.REFUSED
            self._starts.at_next_turn(lambda: self._refuse(self._refusal or report))

    def _refuse(self, report: ExitReport) -> None:
        self._end()
        self._starts.not_started(self.replica, report)
        self._starts.advance()

    # --- what the log is told -----------------------------------------------------------------------------------

    def _say_placed(self, placed: Placed, memory: WorkerMemory) -> None:
        where = ", ".join(str(gpu.index) for gpu in placed.gpus) or placed.devices
        if memory.needs is not None:
            what = memory.needs[memory.count].text(memory.count)
        else:
            why = self._estimated.unknown if self._estimated else ""
            what = f"needs not known ({why}; `vram` in models.yaml can say it), so nothing is refused"
        near = f"; CPUs {ranges(memory.cpus)}" if memory.cpus else ""
        self._say(f"placed on GPU {where}: {what}{near}")


# Wake a worker that is asleep: wait for room on the GPUs that it was placed on, then tell it to take its memory.


class WakeAdmission(Admission):
    """The wake of one worker. ``Starts.begin_wake`` makes it.

    The worker's process has a context and addresses on its GPUs, so it wakes on these GPUs or not at all.
    """

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        super().__init__(starts, replica, number)
        self.stage = Stage.TURN

    def _decide(self) -> None:
        starts, memory = self._starts, self.replica.memory
        reading = starts.vram.reading()
        if memory.placed is None or (reading is None and not starts.vram.late):  # on the CPU, or NVML tells nothing
            self._tell()
            return
        if reading is None:
            if not self._waits_for_reading():
                self._turn_away(PlacementRefused(f"the GPUs cannot be read: {starts.vram.trouble}"))
            return
        self._no_reading_since = None
        refused = room_to_wake(memory.placed, memory.comes_back(reading), starts.rooms(reading))
        if refused is None:
            self._tell()
        elif not self._waits_for_room(refused):
            self._turn_away(refused)

    def _tell(self) -> None:
        """Send WAKE. From now on the memory counts as taken."""
        replica, starts = self.replica, self._starts
        if replica.process is not None:  # else the loop is about to see its end
            if replica.memory.placed is not None:
                placed = replica.memory.placed.bytes
                replica.memory.holding = Holding(replica.label, replica.process.pid, placed, loading=True)
            starts.effects.append(ToWorker(replica.name, replica.generation, encode(WakeMessage())))
        self._end()
        starts.at_next_turn(starts.advance)

    def _refuse_place(self, why: str) -> None:
        self._turn_away(PlacementRefused(why))

    def _turn_away(self, refused: PlacementRefused) -> None:
        self._end()
        self._starts.sleepers.not_woken(self.replica, refused.message)
        self._starts.at_next_turn(self._starts.advance)

    def cancel(self) -> bool:
        """End the wake, because the worker was ordered down. Its process is ended by the stop ladder."""
        self._starts.vram.forget(self.replica.name)
        self._end()
        return False


# The starts and wakes that are under way, their order, and the parts that all of them use.


@dataclass(eq=False, repr=False)
class Starts:
    """The starts that are under way. Runs on the supervisor's one thread.

    not_started  cleans up after a start that has ended without a process
    outer        the supervisor's own CUDA_VISIBLE_DEVICES; None if it has none
    cpus         CPUs that the supervisor itself may use
    """

    not_started: Callable[[Replica, ExitReport], None]
    registry: ReplicaRegistry
    scheduler: Scheduler
    vram: Vram
    launcher: Launcher
    sleepers: Sleepers
    effects: EffectQueue
    timers: Timers
    back_endpoint: str
    outer: str | None
    cpus: Collection[int]
    log: logging.Logger

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.timers)
        self._under_way: dict[str, Admission] = {}
        self._number = 0
        self._said_unseen = False
        self.places = GroupPlaces(self.registry, self.sleepers, self._with_places, self.log)

    def _with_places(self) -> dict[str, bool]:
        return {worker: start.has_places for worker, start in self._under_way.items()}

    def begin(self, replica: Replica) -> None:
        """Begin the start of a worker's next process. If the start ends without a process, ``not_started`` is
        called, but never from within this call."""
        self._number += 1
        start = self._under_way[replica.name] = Start(self, replica, self._number)
        start.begin()

    def begin_wake(self, replica: Replica) -> None:
        """Begin to wake a worker that sleeps. If it stays asleep, ``Sleepers.not_woken`` is called, but never from
        within this call."""
        self._number += 1
        self._under_way[replica.name] = WakeAdmission(self, replica, self._number)
        self.at_next_turn(self.advance)  # the worker is in the middle of its transition to WAKING

    def cancel(self, replica: Replica) -> bool:
        """End a worker's start or wake. Return whether that is reported as the end of a process."""
        under_way = self._under_way.get(replica.name)
        return under_way is not None and under_way.cancel()

    def advance(self) -> None:
        """Let each start go on, unless it must wait for another start."""
        for start in sorted(self._under_way.values(), key=lambda start: start.order):
            if start.stage is Stage.TURN and not any(o.goes_before(start) for o in self._under_way.values()):
                start.take_turn()

    def memory_came_back(self, worker: str) -> None:
        """Note that a worker's process has ended, or that it sleeps. A start or a wake may have waited for that."""
        for start in self._under_way.values():
            if worker in start.leaving:
                start.leaving.discard(worker)
                if not start.leaving:
                    self.at_next_turn(start.decide_again)

    def awaited_before(self, number: int) -> set[Any]:
        """Return the GPUs on which starts wait for busy models that began before the one with this number."""
        earlier = (start for start in self._under_way.values() if start.number < number)
        return {gpu for start in earlier for gpu in start.awaited}

    def let_yield(self, start: Admission, workers: tuple[str, ...]) -> None:
        """Have these workers take no new requests, because a start waits for their places or their memory. Let those
        go on to which no start says so any more."""
        if not (workers or start.yielding):
            return
        start.yielding = workers
        to = {worker: each.replica.label for each in self._under_way.values() for worker in each.yielding}
        for replica in self.registry.replicas.values():
            self._let_yield(replica, to.get(replica.name, ""))

    def _let_yield(self, replica: Replica, to: str) -> None:
        """Have a worker take no new requests while another one waits for its place, or let it go on. This is called
        again while the other one waits, since a new process of the worker takes requests.

        to  the name of the other one; "" to go on
        """
        held = self.scheduler.is_held_back(replica.name)
        yields = bool(to) and replica.state is WorkerState.READY
        if yields and not held:
            self.scheduler.hold_back(replica.name)
            running = self.scheduler.work(replica.name)[0]
            message = f"{replica.shown}: takes no new requests, and finishes {running}: {to} waits for its place"
            self.log.info("%s", message, extra=noted(EventKind.PLACEMENT, replica.log_name))
        elif held and not yields:
            self.effects.extend(self.scheduler.go_on(replica.name, time.monotonic()))
        replica.yields_to = to if yields else ""

    def fits_beside(self, old: Replica, after: ModelSpec) -> bool:
        """Return whether a successor would find room beside the old worker, as far as that is known without reading the
        model's directory. Its needs are declared, or they are those of the old worker if nothing of them has changed.
        """
        gpu_request, elsewhere = gpu_request_of(after), after.elsewhere
        if elsewhere is not None and elsewhere.gpus and self.launcher.no_room(elsewhere) is None:
            return True
        if gpu_request is None:
            return not after.config.gpu_count
        needs: Mapping[int, Needs] | None = declared(after, gpu_request)
        if needs is None and old.memory.engine == after.engine_spec and gpu_request_of(old.spec) == gpu_request:
            needs = old.memory.needs
        reading = self.vram.reading()
        if needs is None or reading is None:
            return False
        return isinstance(place(gpu_request, needs, self.rooms(reading), self.outer), Placed)

    def holdings(self) -> list[Holding]:
        """Return what each process was admitted with."""
        memories = (replica.memory for replica in self.registry.replicas.values())
        return [memory.holding for memory in memories if memory.holding is not None]

    def rooms(self, reading: Sequence[Gpu]) -> list[Room]:
        """Return the room on every GPU."""
        return rooms(reading, self.holdings(), self.registry.config.supervisor.vram_limit)

    def at_next_turn(self, call: Callable[[], None]) -> None:
        self.timers.at(time.monotonic(), call)

    def remove(self, start: Admission) -> None:
        """Forget a start that is over."""
        if self._under_way.get(start.replica.name) is start:
            del self._under_way[start.replica.name]

    def say_unseen(self) -> None:
        """Say in the log, once, that models are placed without a reading."""
        if not self._said_unseen:
            self._said_unseen = True
            self.log.warning(
                "models go where they are pinned, without a look at the GPUs: NVML tells nothing",
                extra=noted(EventKind.PLACEMENT),
            )
