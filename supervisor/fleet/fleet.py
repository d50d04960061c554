"""The models and their processes: what lifecycle decides is done here.

``Fleet`` owns every worker's record, its process and its timers; a model has one worker, or several (replicas). It is
driven by the loop: worker messages, exits and timers come in. Frames for clients and workers go into the effect queue.
"""

import logging
import os
import random
import signal
import time
from pathlib import Path

from protocol.codec import encode
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import Hello, Message, ProgressMessage, Ready, Shutdown, Stats
from supervisor import logs
from supervisor.config import Config, ModelSpec
from supervisor.fleet.hang_watch import HangWatch
from supervisor.fleet.replica import ROOM_RETRY_S, Replica
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.fleet.starts import Starts
from supervisor.model_logs import about, without_ours
from supervisor.placement.vram import Vram
from supervisor.requests.effect_queue import EffectQueue, WorkerChanged
from supervisor.requests.in_flight import ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.timers import Timers
from supervisor.workers import stop_ladder
from supervisor.workers.exits import ExitReport, classify
from supervisor.workers.launcher import Launched, Launcher
from supervisor.workers.lifecycle import Event, LifecycleAction, WorkerState
from supervisor.workers.stop_ladder import Rung
from supervisor.workers.worker_life import Desired, Transition
from supervisor.workers.worker_reports import checked_hello, checked_progress, checked_ready, checked_stats

RATE_WINDOW_S = 1.0


class Fleet:
    """All models. Every method runs on the supervisor's one thread."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        timers: Timers,
        launcher: Launcher,
        effects: EffectQueue,
        runtime_dir: Path,
        back_endpoint: str,
        log: logging.Logger,
    ) -> None:
        self.vram = Vram(timers, log)
        self.registry = ReplicaRegistry(config, scheduler, self.vram, runtime_dir)
        outer, cpus = os.environ.get("CUDA_VISIBLE_DEVICES"), os.sched_getaffinity(0)
        self.starts = Starts(self, self.registry, self.vram, launcher, timers, back_endpoint, outer, cpus, log)
        self._scheduler = scheduler
        self._timers = timers
        self._launcher = launcher
        self._effects = effects
        self._log = log
        self._hang_watch = HangWatch(self.kill, log)

    # --- orders -------------------------------------------------------------------------------------------------

    def start(self, name: str, cause: str) -> None:
        """Order a worker up, whatever it does now. A worker on its way down is started again when it has stopped."""
        replica = self.registry.replicas[name]
        self._carry_out(replica, replica.life.start(time.monotonic(), cause))

    def rest(self, name: str, cause: str) -> None:
        """Let the first request for its model start a worker that is stopped or has failed."""
        replica = self.registry.replicas[name]
        self._carry_out(replica, replica.life.rest(time.monotonic(), cause))

    def unload(self, name: str, cause: str) -> None:
        """End the process of a worker that is ready and idle. Its next request starts it again."""
        replica = self.registry.replicas[name]
        self._carry_out(replica, replica.life.unload(time.monotonic(), cause))

    def stop(self, name: str, cause: str, *, now: bool = False) -> None:
        """Order a worker down: after its requests, bounded by the time for draining, or at once."""
        replica = self.registry.replicas[name]
        if (transition := replica.life.stop(time.monotonic(), cause, at_once=now)) is not None:
            self._carry_out(replica, transition)

    def restart(self, name: str, cause: str) -> None:
        """Stop a worker, then start it; requests wait meanwhile. A worker without a process is just started."""
        replica = self.registry.replicas[name]
        self._carry_out(replica, replica.life.restart(time.monotonic(), cause))

    def respec(self, replica: Replica, spec: ModelSpec) -> None:
        was_lazy = replica.spec.config.lazy
        self.registry.respec(replica, spec)
        self._settle(replica, was_lazy)

    def adopt_settings(self, replica: Replica, spec: ModelSpec) -> None:
        """Apply keys of a model that only the supervisor reads. The worker's process goes on."""
        was_lazy = replica.spec.config.lazy
        if replica.desired_spec is replica.spec:
            replica.apply_settings(spec)
        else:  # the present process is of an older specification still
            self.registry.respec(replica, spec)
        self._settle(replica, was_lazy)

    def _settle(self, replica: Replica, was_lazy: bool) -> None:
        """At rest, one that has become lazy sleeps, and one that is so no more does not."""
        lazy = replica.spec.config.lazy
        if replica.state is WorkerState.UNLOADED and not lazy:
            self.stop(replica.name, "it is not lazy any more")
        elif replica.state is WorkerState.STOPPED and lazy and not was_lazy and replica.desired is not Desired.UP:
            self.rest(replica.name, "lazy")

    @property
    def all_stopped(self) -> bool:
        """No process is left. Their VRAM may still be on its way back: ``vram.awaited``."""
        return all(replica.process is None for replica in self.registry.replicas.values())

    # --- what workers say ---------------------------------------------------------------------------------------

    def on_worker_message(self, replica: Replica, message: Message) -> None:
        """HELLO, PROGRESS, READY and STATS. Raises FrameError for a body that is not what it should be."""
        match message:
            case Hello(body):
                checked_hello(body)
                self._report(replica, Event.HELLO, "connected")
            case ProgressMessage(body):
                replica.progress = progress = checked_progress(body)
                effects = self._scheduler.report_loading(
                    replica.model, progress["phase"], progress["done"], progress["total"]
                )
                self._effects.add(effects)
            case Ready(body):
                replica.info = checked_ready(body)
                replica.progress = {}
                if replica.process is not None:
                    self.starts.loaded(replica, replica.process.pid)
                self._report(replica, Event.LOADED, self._loaded(replica))
            case Stats(body):
                replica.stats = checked_stats(body)
            case _:
                raise FrameError(ErrorCode.UNSUPPORTED, f"{message.kind.name} from a worker")

    def _loaded(self, replica: Replica) -> str:
        """Say how a load went: how long it took, on what the model computes, and what memory it holds now."""
        parts = [
            f"loaded in {replica.info['load_seconds']} s on {replica.info['device']}",
            f"attention: {replica.info['attention']}",
            f"context {replica.info['context']} tokens",
        ]
        if replica.process is not None:
            if (held := replica.process.memory()) is not None:
                parts.append(f"{held / 2**20:.0f} MiB of RAM")
            vram = self.vram.describe(replica.name, replica.process.pid)["vram_bytes"]
            if vram is not None:
                parts.append(f"{vram / 2**20:.0f} MiB of VRAM")
        return ", ".join(parts)

    def on_exit(self, process: Launched) -> None:
        """Clean up after a worker's process that has ended. The caller has taken in what the worker had sent."""
        replica = self.registry.worker_of(process)
        asked = replica.state is WorkerState.STOPPING  # a draining worker has not been told to leave yet
        code = self._launcher.reap(process)
        self.registry.process_ended(replica)
        self.vram.ended(replica.name, process.pid)
        self.starts.worker_gone(replica.name)
        tail = without_ours(logs.tail(replica.log_path, since=replica.log_begin))
        killed = (replica.kill_reason, replica.killed_for) if replica.killed_for else None
        self._ended(replica, classify(code, asked=asked, log_tail=tail, killed=killed), process.pid)

    def check_progress(self) -> None:
        """See which workers get on, and end those that hang. To be called every ``watch.CHECK_S``."""
        self._hang_watch.check(self.registry.replicas.values(), time.monotonic())

    def kill(self, replica: Replica, why: str, reason: str = "killed") -> None:
        """End a worker that hangs, is out of its mind or out of reach. Its requests end when it is gone."""
        if replica.process is not None and replica.killed_for is None and not replica.process.is_gone:
            replica.killed_for, replica.kill_reason = why, reason
            self._log.error(
                "%s: killing pid %d: %s", replica.shown, replica.process.pid, why, extra=about(replica.log_name)
            )
            replica.process.signal(signal.SIGKILL)

    def not_started(self, replica: Replica, report: ExitReport) -> None:
        """Take note that a start has ended without a process. ``Start`` calls this."""
        self._ended(replica, report, None)

    def _ended(self, replica: Replica, report: ExitReport, pid: int | None) -> None:
        """There is no process any more, or there never was one: what follows from that."""
        for timer in [*replica.ladder, replica.drain_timer]:
            if timer is not None:
                timer.cancel()
        replica.ladder.clear()
        replica.last_exit = report
        replica.stats, replica.progress, replica.tokens_per_s = {}, {}, 0.0
        now = time.monotonic()
        blames_request = report.retry and self._scheduler.finds_culprit(replica.name, now)
        transition, verdict = replica.life.ended(report, now, blames_request=blames_request, chance=random.random())
        if verdict:
            self._log.warning(
                "%s: pid %s: %s; %s", replica.shown, pid or "none", report.message, verdict,
                extra=about(replica.log_name),
            )  # fmt: skip
        self._carry_out(replica, transition)
        if (next_transition := replica.life.settle(time.monotonic())) is not None:
            self._carry_out(replica, next_transition)
        elif replica.state is WorkerState.FAILED and replica.lacks_room:
            replica.backoff_timer = self._timers.at(
                time.monotonic() + ROOM_RETRY_S, lambda: self._try_room_again(replica)
            )

    def _try_room_again(self, replica: Replica) -> None:
        if replica.state is WorkerState.FAILED and replica.lacks_room:  # a reload may have made it another
            self.rest(replica.name, "there may be room by now")

    def after_events(self, replica: Replica) -> None:
        """Requests of a worker have ended: a drain may be over."""
        if replica.state is WorkerState.DRAINING and self._scheduler.work(replica.name)[0] == 0:
            self._report(replica, Event.DRAINED, "no request left")

    def sample_rates(self, elapsed_s: float) -> None:
        """Tokens per second of each worker since the last sample, and when it was last busy."""
        for name, replica in self.registry.replicas.items():
            running, tokens = self._scheduler.work(name)
            if running or tokens != replica.tokens_seen:
                replica.last_active = time.monotonic()
            replica.tokens_per_s = (tokens - replica.tokens_seen) / elapsed_s
            replica.tokens_seen = tokens

    # --- effects ------------------------------------------------------------------------------------------------

    def _report(self, replica: Replica, event: Event, cause: str) -> None:
        """Carry out what follows from an event in a worker's life. Raises IllegalTransition."""
        self._carry_out(replica, replica.life.apply(event, time.monotonic(), cause))

    def _carry_out(self, replica: Replica, transition: Transition) -> None:
        if transition.after is not transition.before:
            pid = f" pid {replica.process.pid}" if replica.process else ""
            self._log.info(
                "%s: %s -> %s (%s)%s", replica.shown, transition.before, transition.after, transition.cause, pid,
                extra=about(replica.log_name),
            )  # fmt: skip
        for action in transition.actions:
            self._do(replica, action, transition.at)
        self._effects.add([WorkerChanged()])

    def _do(self, replica: Replica, action: LifecycleAction, now: float) -> None:
        name = replica.name
        match action:
            case LifecycleAction.SPAWN:
                self.starts.begin(replica)
            case LifecycleAction.OPEN:
                replica.last_active = now
                capacity, batch_size = replica.info["max_jobs"], replica.spec.config.max_batch_size
                self._effects.add(self._scheduler.open(name, replica.generation, capacity, now, batch_size=batch_size))
            case LifecycleAction.ACCEPT_NEW:
                self._scheduler.accept_new(name)
            case LifecycleAction.HOLD_NEW:
                self._effects.add(self._scheduler.pause(name, now))
            case LifecycleAction.REST:
                self._effects.add(self._scheduler.rest(name, now))
            case LifecycleAction.REFUSE_NEW:
                self._effects.add(self._scheduler.refuse_new(name, replica.refusal(), now))
            case LifecycleAction.END_WAITING:
                self._effects.add(self._scheduler.end_waiting(name, replica.refusal()))
            case LifecycleAction.END_ACTIVE:
                asked = replica.last_exit is not None and replica.last_exit.reason == "asked"
                if asked:
                    message = f"model {replica.model!r} was stopped before the answer was finished"
                    error = WireError(ErrorCode.DRAINING, message)
                else:
                    reason = replica.last_exit.reason if replica.last_exit else "gone"
                    message = f"model {replica.model!r}: the worker process ended ({reason})"
                    error = WireError(ErrorCode.WORKER_DIED, message)
                self._effects.add(self._scheduler.worker_gone(name, error, now, struck=not asked))
                if replica.state is WorkerState.STOPPED and not replica.life.comes_again:
                    self._effects.add(self._scheduler.release_held(name, now))
            case LifecycleAction.WATCH_DRAIN:
                replica.drain_timer = self._timers.at(
                    now + self.registry.config.supervisor.stop.drain, lambda: self._drain_expired(replica)
                )
                self.after_events(replica)
            case LifecycleAction.CLIMB:
                self._climb(replica, now)
            case LifecycleAction.ARM_BACKOFF:
                replica.restarts += 1
                replica.backoff_timer = self._timers.at(
                    now + replica.life.pause_s, lambda: self._report(replica, Event.BACKOFF_OVER, "pause over")
                )
            case LifecycleAction.FORGIVE:
                if replica.backoff_timer is not None:
                    replica.backoff_timer.cancel()

    def _drain_expired(self, replica: Replica) -> None:
        if replica.desired is not Desired.UP:  # else it is started again, and its requests go on then
            self._effects.add(self._scheduler.end_running(replica.name))
        self._report(replica, Event.DRAINED, "the drain's time is over")

    def _climb(self, replica: Replica, now: float) -> None:
        if replica.drain_timer is not None:
            replica.drain_timer.cancel()
        for timer in replica.ladder:
            timer.cancel()
        if self.starts.cancel(replica):
            return
        times = stop_ladder.IMPATIENT if replica.life.impatient else self.registry.config.supervisor.ladder
        rungs = stop_ladder.plan(now, times, reads_messages=bool(replica.info))
        replica.ladder = [self._timers.at(at, lambda rung=rung: self._rung(replica, rung)) for at, rung in rungs]  # type: ignore[misc]

    def _rung(self, replica: Replica, rung: Rung) -> None:
        if replica.process is None:
            return
        self._log.info("%s: %s to pid %d", replica.shown, rung, replica.process.pid, extra=about(replica.log_name))
        if rung is Rung.SHUTDOWN:
            self._effects.add([ToWorker(replica.name, replica.generation, encode(Shutdown()))])
        else:
            replica.process.signal(signal.SIGTERM if rung is Rung.SIGTERM else signal.SIGKILL)
