"""Start workers: estimate what a model needs, wait for memory, choose GPUs, launch the process.

A ``Start`` takes one process from the order to the launch. Its methods stand in the order of its stages:

    begin            checks the engine's packages, and has another process read the model's directory for an estimate
    wait_for_memory  waits until dead workers have given back their memory of the model's GPUs
    _decide          chooses GPUs, and counts the memory that other workers hold and are about to load
    _make_room       if there is no room: unloads idle models, or waits until busy models are idle
    _launch          starts the process
    _refuse          ends the start without a process
    cancel           ends the start at any stage, because the worker was ordered down

``starts`` has the starts that are under way, and says whose turn it is. Models that are pinned to a GPU are placed
before ``auto`` ones, and each kind in the order of models.yaml. ``modelctl plan`` does the same.
"""

import os
import time
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from protocol.process.engine_packages import missing_for
from protocol.process.worker_exit import LOAD_ERROR_PREFIX
from protocol.process.worker_spec import WorkerSpec
from supervisor.event_history import EventKind, noted
from supervisor.fleet.replica import Replica
from supervisor.model_logs import about
from supervisor.placement.affinity import near_cpus, ranges
from supervisor.placement.estimates import Estimated
from supervisor.placement.eviction import EvictionCandidate, NoRoom, choose
from supervisor.placement.gpu_requests import ESTIMATED, answer_with, gpu_request_of, question_of
from supervisor.placement.policy import GpuRequest, Holding, Placed, PlacementRefused, gib, place, place_unseen, rooms
from supervisor.placement.worker_memory import WorkerMemory
from supervisor.workers.exits import ExitReport, not_admitted, not_spawned
from supervisor.workers.lifecycle import GOING_DOWN

if TYPE_CHECKING:
    from supervisor.fleet.starts import Starts

IDLE_WAIT_S = 60.0
"""Seconds that a start waits for busy models to become idle, if there would be room without them. The time in which
one of them is loading does not count."""
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


class Start:
    """The start of one process, of a new generation. ``Starts.begin`` makes it.

    number  the place of this start in the order in which starts began
    """

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        starts.registry.new_generation(replica)
        self._starts = starts
        self.replica = replica
        self._spec = replica.spec
        self._gpu_request = gpu_request_of(replica.spec)
        self._number = number
        self.stage = Stage.ESTIMATE
        self._estimated: Estimated | None = None
        self._refusal: ExitReport | None = None
        self.leaving: set[str] = set()
        """Workers that are unloaded to make room for this one."""
        self._claims = False
        """Whether workers were unloaded for this start. Their memory is reserved for this start, even if a request
        needs one of those workers again at once."""
        self._no_room_since: float | None = None
        self._no_reading_since: float | None = None

    # --- the stages, in their order -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Check that the engine's packages are there, and estimate what the model needs."""
        engine = self._spec.config.engine
        if (missing := missing_for(engine)) is not None:
            self._refuse_soon(not_admitted("config", LOAD_ERROR_PREFIX + missing, retry=False))
            return
        if self._gpu_request is None:  # on the CPU
            self._launch("", None)
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
        if estimated.error is not None:
            reason = "unreadable" if estimated.retry else "config"
            self._refuse(not_admitted(reason, LOAD_ERROR_PREFIX + estimated.error, retry=estimated.retry))
        else:
            self._starts.advance()

    def wait_for_memory(self) -> None:
        """Decide now, or as soon as dead workers have given back their memory of the model's GPUs. ``Starts`` calls
        this when the turn of this start has come."""
        self.stage = Stage.MEMORY
        self._starts.vram.when_free(self.replica.name, self._decide)

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
            limits = starts.registry.config.supervisor.vram_limit
            decision = place(self._gpu_request, needs, rooms(reading, starts.holdings(), limits), starts.outer)
        if isinstance(decision, Placed):
            memory.placed, memory.cpus = decision, near_cpus(decision.gpus, starts.cpus)
            self._say_placed(decision, memory)
            self._launch(decision.devices, decision)
        elif not (decision.missing and self._waits_for_room(decision)):
            reason = "no room" if decision.missing else "unreadable" if late else "config"
            # After a crash, a refusal for want of room is not final: what fills the GPU now may go.
            crashed = bool(self.replica.life.history.recent)
            self._refuse_soon(not_admitted(reason, decision.message, retry=reason != "config" and crashed))

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
        leaving = self._make_room(refused.missing)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving, self._claims = Stage.ROOM, set(leaving), True
            return True
        if leaving is NoRoom.NEVER:
            return False
        now = time.monotonic()
        if self._no_room_since is None:
            self._no_room_since = now
            self._say(f"{refused.message}; waits for busy models to become idle")
        if any(h.loading and h.placed.keys() & refused.missing.keys() for h in self._starts.holdings()):
            self._no_room_since = now  # a worker that loads cannot be idle yet, and a large model may load for longer
        if now - self._no_room_since >= IDLE_WAIT_S:
            return False
        self._decide_again_at(now + RETRY_S)
        return True

    def _make_room(self, missing: Mapping[int, int]) -> tuple[str, ...] | NoRoom:
        """Unload idle workers whose memory this one needs. Return their names, or why no worker is unloaded.

        Workers that load now, or leave anyway, count as busy: the start waits for them.

        missing  GPU → bytes
        """
        assert self._gpu_request is not None
        registry, replica = self._starts.registry, self.replica
        now, reading = time.monotonic(), self._starts.vram.reading() or []
        candidates = [
            EvictionCandidate(
                other.name,
                other.memory.comes_back(reading),
                busy=not registry.is_idle(other),
                priority=other.spec.config.priority,
                load_s=float(other.info.get("load_seconds", 0)),
                idle_s=now - other.last_active,
            )
            for other in registry.replicas.values()
            if other.state in GOING_DOWN or (other.model != replica.model and other.may_be_evicted)
        ]
        chosen = choose(missing, candidates, one_suffices=self._gpu_request.pins is None)
        if isinstance(chosen, NoRoom):
            return chosen
        short = ", ".join(f"{gib(size)} GiB on GPU {gpu}" for gpu, size in missing.items())
        message = f"{replica.shown}: needs {short}: unloading {', '.join(chosen)}"
        self._starts.log.info("%s", message, extra=noted(EventKind.EVICTION, replica.log_name))
        for name in chosen:
            self._starts.control.unload(name, f"evicted for {replica.label}")
        return chosen

    def _decide_again_at(self, when: float) -> None:
        self.stage = Stage.ROOM
        self._starts.timers.at(when, self.decide_again)

    def decide_again(self) -> None:
        """Have the start wait for its turn again, if it still waits for room or for a reading."""
        if self.stage is Stage.ROOM:
            self.stage = Stage.TURN
            self._starts.advance()

    def _launch(self, devices: str, placed: Placed | None) -> None:
        """Start the process.

        devices  the CUDA_VISIBLE_DEVICES of the process
        placed   where the worker was placed; None on the CPU
        """
        starts, replica, config = self._starts, self.replica, self._spec.config
        spec = WorkerSpec(
            engine=self._spec.engine_spec,
            generation=replica.generation,
            visible_devices=devices,
            cpus=replica.memory.cpus,
            sampling=config.sampling or {},
            limits=config.limits or {},
            tool_format=config.tool_format,
            reasoning=config.reasoning,
            endpoint=starts.back_endpoint,
            routing_id=replica.routing_id,
            log_path=str(replica.log_path),
            supervisor_pid=os.getpid(),
            leases=starts.registry.config.supervisor.leases(config),
            name=replica.label,
        )
        try:
            process = starts.launcher.start(spec)
        except OSError as e:
            self._refuse_soon(not_spawned(e))
            return
        starts.registry.launched(replica, process)
        if placed is not None:
            replica.memory.holding = Holding(replica.label, process.pid, placed.bytes, loading=True)
        starts.log.info(
            "%s: spawned pid %d, generation %d, devices: %s",
            replica.shown, process.pid, replica.generation, devices or "cpu", extra=about(replica.log_name),
        )  # fmt: skip
        self._end()
        starts.at_next_turn(starts.advance)

    # --- the ends without a process -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the start, because the worker was ordered down. The next turn of the loop counts that as the worker's
        end, like the end of a process."""
        self._starts.estimator.forget(self.replica.name)
        self._starts.vram.forget(self.replica.name)
        self._refuse_soon(ExitReport(0, "asked", "stopped before it was spawned", retry=False))

    def _refuse_soon(self, report: ExitReport) -> None:
        """Refuse the start in the next turn, since the worker may be in the middle of its transition to STARTING."""
        self._refusal = report
        if self.stage is not Stage.REFUSED:
            self.stage = Stage.REFUSED
            self._starts.at_next_turn(lambda: self._refuse(self._refusal or report))

    def _refuse(self, report: ExitReport) -> None:
        self._end()
        self._starts.control.not_started(self.replica, report)
        self._starts.advance()

    def _end(self) -> None:
        self.stage = Stage.OVER
        self._starts.remove(self)

    # --- whose turn it is ---------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[bool, int]:
        """The place among the starts under way. Pinned models come first, then the starts that began earlier."""
        return self._gpu_request is None or self._gpu_request.pins is None, self._number

    def goes_before(self, other: "Start") -> bool:
        """Return whether ``other`` has to wait until this start is decided."""
        if self is other or self.stage is Stage.REFUSED or not _may_want_same(self._gpu_request, other._gpu_request):
            return False
        if self._claims or other._claims:
            return self._claims and (not other._claims or self.order < other.order)
        pinned_waits = self._no_reading_since is not None and not self.order[0] and other.order[0]
        return self.order < other.order and (self.stage is Stage.ESTIMATE or pinned_waits)

    # --- what the log is told -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        name = self.replica.name
        self._starts.log.info("%s", f"{name}: {text}", extra=noted(EventKind.PLACEMENT, name))

    def _say_placed(self, placed: Placed, memory: WorkerMemory) -> None:
        where = ", ".join(str(gpu.index) for gpu in placed.gpus) or placed.devices
        if memory.needs is not None:
            what = memory.needs[memory.count].text(memory.count)
        else:
            why = self._estimated.unknown if self._estimated else ""
            what = f"needs not known ({why}; `vram` in models.yaml can say it), so nothing is refused"
        near = f"; CPUs {ranges(memory.cpus)}" if memory.cpus else ""
        self._say(f"placed on GPU {where}: {what}{near}")


def _may_want_same(one: GpuRequest | None, other: GpuRequest | None) -> bool:
    """Return whether two models may want the same GPU."""
    if one is None or other is None:
        return False
    return one.pins is None or other.pins is None or bool({*one.pins} & {*other.pins})
