"""The models and their processes: what lifecycle decides is done here.

``Fleet`` owns every model's record, its worker process and its timers. It is driven by the loop: worker messages, exits
and timers come in; frames for clients and workers go out through ``Outlet``.
"""

import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from protocol.codec import encode
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import Hello, Message, Progress, Ready, Shutdown, Stats
from protocol.worker_spec import WorkerSpec
from supervisor import logs, stop_ladder
from supervisor.config import Config
from supervisor.exits import ExitReport, classify, not_spawned
from supervisor.gpus import open_gpus
from supervisor.guard import Guard
from supervisor.in_flight import Effect as RequestEffect
from supervisor.lifecycle import Effect, Event, WorkerState
from supervisor.model import Model
from supervisor.scheduler import Scheduler
from supervisor.stop_ladder import Rung
from supervisor.timers import Timers
from supervisor.vram import Vram
from supervisor.worker_process import WorkerProcess
from supervisor.worker_reports import checked_hello, checked_progress, checked_ready, checked_stats

RATE_WINDOW_S = 1.0


class Outlet(Protocol):
    """What the fleet needs of the loop."""

    def perform(self, effects: list[RequestEffect]) -> None: ...
    def send_worker(self, model: str, frame: bytes) -> None: ...
    def watch_process(self, pidfd: int, callback: Callable[[], None]) -> None: ...
    def unwatch_process(self, pidfd: int) -> None: ...


class Fleet:
    """All models. Every method runs on the supervisor's one thread."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        timers: Timers,
        guard: Guard,
        outlet: Outlet,
        runtime_dir: Path,
        back_endpoint: str,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._timers = timers
        self._guard = guard
        self._outlet = outlet
        self._back_endpoint = back_endpoint
        self._log = log
        self._by_routing_id: dict[bytes, Model] = {}
        pins = {n: s.visible_devices.split(",") for n, s in config.models.items() if s.visible_devices}
        self.vram = Vram(open_gpus(log) if pins else None, pins, timers, log)
        self.models: dict[str, Model] = {}
        for name, spec in config.models.items():
            self.models[name] = Model(spec, config.supervisor.restart_policy, logs.log_path(runtime_dir, name))
            scheduler.add_model(name, queue_limit=spec.config.max_queue, refusal=self.models[name].refusal())

    # --- orders -------------------------------------------------------------------------------------------------

    def start(self, name: str, cause: str) -> None:
        """Want a model up, whatever it is doing. A model on its way down is started again when it is stopped."""
        model = self.models[name]
        model.wanted = True
        self._apply(model, Event.START, cause)

    def stop(self, name: str, cause: str, *, now: bool = False) -> None:
        """Want a model down: after its requests (bounded by the drain's time), or at once."""
        model = self.models[name]
        model.wanted = False
        if now and model.state is WorkerState.STOPPING and model.ladder_times is stop_ladder.IMPATIENT:
            return  # climbing as fast as it can: to begin anew would put SIGKILL off
        model.ladder_times = stop_ladder.IMPATIENT if now else self._config.supervisor.ladder
        self._apply(model, Event.STOP_NOW if now else Event.STOP, cause)

    def restart(self, name: str, cause: str) -> None:
        """Stop, then start. A model that is down is just started."""
        self.stop(name, cause)
        self.start(name, cause)

    @property
    def all_stopped(self) -> bool:
        return not self.vram.awaited and all(model.process is None for model in self.models.values())

    # --- what workers say ---------------------------------------------------------------------------------------

    def model_of(self, routing_id: bytes) -> Model | None:
        """The model whose present worker has this identity; None for a former generation's or a stranger's."""
        return self._by_routing_id.get(routing_id)

    def on_worker_message(self, model: Model, message: Message) -> None:
        """HELLO, PROGRESS, READY and STATS. Raises FrameError for a body that is not what it should be."""
        match message:
            case Hello(body):
                checked_hello(body)
                self._apply(model, Event.HELLO, "connected")
            case Progress(body):
                model.progress = checked_progress(body)
            case Ready(body):
                model.info = checked_ready(body)
                model.progress = {}
                if model.process is not None:
                    self.vram.ready(model.name, model.process.pid)
                loaded = f"loaded in {model.info['load_seconds']} s, attention: {model.info['attention']}"
                self._apply(model, Event.LOADED, loaded)
            case Stats(body):
                model.stats = checked_stats(body)
            case _:
                raise FrameError(ErrorCode.UNSUPPORTED, f"{message.kind.name} from a worker")

    def on_exit(self, model: Model) -> None:
        """The pidfd is readable: the process is gone."""
        process = model.process
        assert process is not None
        self._outlet.unwatch_process(process.pidfd)
        asked = model.state is WorkerState.STOPPING  # a draining worker has not been told to leave yet
        code = process.reap()
        model.process = None
        self._by_routing_id.pop(model.routing_id, None)
        self.vram.ended(model.name, process.pid)
        tail = logs.tail(model.log_path)
        self._ended(model, classify(code, asked=asked, log_tail=tail, killed_for=model.killed_for), process.pid)

    def kill(self, model: Model, why: str) -> None:
        """End a worker that is out of its mind or out of reach. Its requests end when it is gone."""
        if model.process is not None and model.killed_for is None and not model.process.is_gone:
            model.killed_for = why
            self._log.error("%s: killing pid %d: %s", model.name, model.process.pid, why)
            model.process.signal(signal.SIGKILL)

    def _ended(self, model: Model, report: ExitReport, pid: int | None) -> None:
        """There is no process any more, or there never was one: what follows from that."""
        for timer in [*model.ladder, model.drain_timer]:
            if timer is not None:
                timer.cancel()
        model.ladder.clear()
        model.last_exit = report
        model.stats, model.progress, model.tokens_per_s = {}, {}, 0.0
        pause = 0.0
        event = Event.DIED
        if report.reason != "asked":
            again = model.history.failed(time.monotonic(), random.random()) if report.retry else None
            event = Event.DIED if again is not None else Event.DIED_FOR_GOOD
            pause = again or 0.0
            verdict = f"next try in {pause:.1f} s" if again is not None else "not tried again"
            if model.state in (WorkerState.DRAINING, WorkerState.STOPPING):
                verdict = "it was being stopped"
            self._log.warning("%s: pid %s: %s; %s", model.name, pid or "none", report.message, verdict)
        self._apply(model, event, report.message, pause=pause)
        if model.wanted and model.state is WorkerState.STOPPED:
            self._apply(model, Event.START, "started again")

    def after_events(self, model: Model) -> None:
        """Requests of a model have ended: a drain may be over."""
        if model.state is WorkerState.DRAINING and self._scheduler.counts(model.name)[0] == 0:
            self._apply(model, Event.DRAINED, "no request left")

    def sample_rates(self, elapsed_s: float) -> None:
        """Tokens per second of each model since the last sample, and when it was last busy."""
        for name, model in self.models.items():
            tokens = self._scheduler.totals(name)["tokens"]
            model.tokens_per_s = (tokens - model.tokens_seen) / elapsed_s
            model.tokens_seen = tokens
            if any(self._scheduler.counts(name)):
                model.last_active = time.monotonic()

    # --- effects ------------------------------------------------------------------------------------------------

    def _apply(self, model: Model, event: Event, cause: str, *, pause: float = 0.0) -> None:
        before = model.state
        now = time.monotonic()
        effects = model.life.apply(event, now, cause)
        if model.state is not before:
            pid = f" pid {model.process.pid}" if model.process else ""
            self._log.info("%s: %s -> %s (%s)%s", model.name, before, model.state, cause, pid)
        for effect in effects:
            self._do(model, effect, now, pause)

    def _do(self, model: Model, effect: Effect, now: float, pause: float) -> None:
        name = model.name
        match effect:
            case Effect.SPAWN:
                self._spawn(model)
            case Effect.OPEN:
                model.last_active = now
                self._outlet.perform(self._scheduler.open(name, model.generation, model.info["max_jobs"]))
            case Effect.ACCEPT_NEW:
                self._scheduler.accept_new(name)
            case Effect.REFUSE_NEW:
                self._scheduler.refuse_new(name, model.refusal())
            case Effect.END_WAITING:
                self._outlet.perform(self._scheduler.end_waiting(name, model.refusal()))
            case Effect.END_ACTIVE:
                if model.last_exit is not None and model.last_exit.reason == "asked":
                    error = WireError(ErrorCode.DRAINING, f"model {name!r} was stopped before the answer was finished")
                else:
                    reason = model.last_exit.reason if model.last_exit else "gone"
                    error = WireError(ErrorCode.WORKER_DIED, f"model {name!r}: the worker process ended ({reason})")
                self._outlet.perform(self._scheduler.end_running(name, error))
                if model.state is WorkerState.STOPPED:
                    self._outlet.perform(self._scheduler.release_held(name))
            case Effect.WATCH_DRAIN:
                model.drain_timer = self._timers.at(
                    now + self._config.supervisor.stop.drain, lambda: self._drain_expired(model)
                )
                self.after_events(model)
            case Effect.CLIMB:
                self._climb(model, now)
            case Effect.ARM_BACKOFF:
                model.restarts += 1
                model.backoff_timer = self._timers.at(
                    now + pause, lambda: self._apply(model, Event.BACKOFF_OVER, "pause over")
                )
            case Effect.FORGIVE:
                model.history.forgive()
                if model.backoff_timer is not None:
                    model.backoff_timer.cancel()

    def _spawn(self, model: Model) -> None:
        model.generation += 1
        model.routing_id = b"W" + secrets.token_bytes(16)
        model.info, model.progress, model.killed_for = {}, {}, None
        spec = WorkerSpec(
            engine=model.spec.engine_spec,
            generation=model.generation,
            visible_devices=model.spec.visible_devices,
            endpoint=self._back_endpoint,
            routing_id=model.routing_id,
            log_path=str(model.log_path),
            supervisor_pid=os.getpid(),
        )
        logs.prepare(model.log_path)
        self.vram.when_free(model.name, lambda: self._launch(model, spec))

    def _launch(self, model: Model, spec: WorkerSpec) -> None:
        try:
            model.process = WorkerProcess(spec, self._guard)
        except OSError as e:
            # Not from here: we are in the middle of the transition to STARTING. The next turn counts it as a death.
            report = not_spawned(e)
            self._timers.at(time.monotonic(), lambda: self._ended(model, report, None))
            return
        self._by_routing_id[model.routing_id] = model
        self._outlet.watch_process(model.process.pidfd, lambda: self.on_exit(model))

    def _drain_expired(self, model: Model) -> None:
        self._outlet.perform(self._scheduler.cancel_running(model.name))
        self._apply(model, Event.DRAINED, "the drain's time is over")

    def _climb(self, model: Model, now: float) -> None:
        if model.drain_timer is not None:
            model.drain_timer.cancel()
        for timer in model.ladder:
            timer.cancel()
        if self.vram.forget(
            model.name
        ):  # not spawned yet: its end is counted in the next turn, as a process's would be
            never = ExitReport(0, "asked", "stopped before it was spawned", retry=False)
            self._timers.at(now, lambda: self._ended(model, never, None))
            return
        times = model.ladder_times or self._config.supervisor.ladder
        rungs = stop_ladder.plan(now, times, reads_messages=bool(model.info))
        model.ladder = [self._timers.at(at, lambda rung=rung: self._rung(model, rung)) for at, rung in rungs]  # type: ignore[misc]

    def _rung(self, model: Model, rung: Rung) -> None:
        if model.process is None:
            return
        self._log.info("%s: %s to pid %d", model.name, rung, model.process.pid)
        if rung is Rung.SHUTDOWN:
            self._outlet.send_worker(model.name, encode(Shutdown()))
        else:
            model.process.signal(signal.SIGTERM if rung is Rung.SIGTERM else signal.SIGKILL)
