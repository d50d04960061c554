"""Start workers: estimate what a model needs, wait for memory, choose GPUs, launch the process.

A ``Start`` takes one process from the order to the launch. Its methods stand in the order of its stages:

    begin            checks the engine's packages, and has another process read the model's directory for an estimate
    take_turn        takes the model's places in its groups (``admission``)
    _wait_for_memory waits until dead workers have given back their memory of the model's GPUs (``admission``)
    _decide          chooses GPUs, and counts the memory that other workers hold and are about to load
    _waits_for_room  if there is no room: puts idle models to sleep or unloads them, or waits until busy models are
                     idle (``admission``)
    _decide_elsewhere  asks the launcher for GPUs elsewhere, unloads idle models there, or waits
    _launch          starts the process, here or elsewhere
    _refuse          ends the start without a process
    cancel           ends the start at any stage, because the worker was ordered down

``starts`` has the starts that are under way, and says whose turn it is. Models that are pinned to a GPU are placed
before ``auto`` ones, and each kind in the order of models.yaml. ``modelctl plan`` does the same.
"""

import dataclasses
import os
import time
from typing import TYPE_CHECKING

from protocol.process.engine_packages import missing_for
from protocol.process.masking import masks
from protocol.process.worker_exit import LOAD_ERROR_PREFIX
from protocol.process.worker_spec import WorkerSpec
from supervisor.fleet.admission import RETRY_S, Admission, Stage
from supervisor.fleet.replica import Replica
from supervisor.model_logs import about
from supervisor.placement.affinity import near_cpus, ranges
from supervisor.placement.estimates import ESTIMATED, Estimated
from supervisor.placement.eviction import NoRoom, choose
from supervisor.placement.gpu_requests import answer_with, question_of
from supervisor.placement.policy import Holding, Placed, PlacementRefused, place, place_unseen, rooms
from supervisor.placement.worker_memory import WorkerMemory
from supervisor.workers.exits import ExitReport, not_admitted, not_spawned
from supervisor.workers.machines import Elsewhere

if TYPE_CHECKING:
    from supervisor.fleet.starts import Starts


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
            limits = starts.registry.config.supervisor.vram_limit
            decision = place(self._gpu_request, needs, rooms(reading, starts.holdings(), limits), starts.outer)
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
            yielding = self._turn.look(now, no.missing, others, one_suffices=True, wanted=self.is_wanted)
            if yielding is None:
                self._turn.begin_again()
            starts.let_yield(self, yielding or ())
            self._decide_again_at(now + (RETRY_S if here is None else READING_RETRY_S))
            return
        self.stage, self.leaving = Stage.ROOM, {eviction.worker for eviction in leaving}
        starts.let_yield(self, ())
        self._say(f"{no}: unloading {', '.join(sorted(self.leaving))}")
        for worker in sorted(self.leaving):
            starts.fleet.unload(worker, f"evicted for {self.replica.label}")

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

    def _end(self) -> None:
        super()._end()
        self.replica.waits = ""  # for room elsewhere

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
        self._starts.fleet.not_started(self.replica, report)
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
