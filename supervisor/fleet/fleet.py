"""Carry out what is decided about the lives of all workers: start, stop, restart, kill, and clean up after a death.

``WorkerLife`` decides. ``Fleet`` takes orders, messages of workers, exits and timers, hands them to the worker's life,
and carries out the actions that it returns. Frames for clients and workers go into the effect queue.
"""

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import Shutdown, Sleep
from supervisor.config.file import Config, ModelSpec
from supervisor.config.spelling import PhaseLines, percentage_of, phase_of
from supervisor.fleet.replicas import ROOM_RETRY_S, Replica, ReplicaRegistry
from supervisor.fleet.sleepers import Sleepers
from supervisor.fleet.starts import Starts
from supervisor.logs import files
from supervisor.logs.events import EventKind, noted
from supervisor.logs.files import about, without_ours
from supervisor.placement.memory import loaded_text
from supervisor.placement.vram import Vram
from supervisor.reactor import Timers
from supervisor.requests.request import EffectQueue, ToWorker, WorkerChanged
from supervisor.requests.scheduler import Scheduler
from supervisor.workers import life
from supervisor.workers.exits import ExitReport, classify, not_admitted
from supervisor.workers.launcher import Launched, Launcher
from supervisor.workers.life import (
    ON_DEMAND,
    CheckClock,
    Desired,
    Event,
    HangDetector,
    HangVerdict,
    LifecycleAction,
    Rung,
    Transition,
    WorkerState,
)

# Write to the log how the starts of workers go on, so that the log of a slow load shows that something happens.


@runtime_checkable
class ShowsStarts(Protocol):
    """A handler of the log that also shows on a terminal how far each start is."""

    def show_starts(self, starts: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Show name → (phase, progress) of each worker that starts. ``progress`` is that of the worker's report."""


class StartLines:
    """Logs each part of a load, and every ten seconds how far it is. Other lines tell of the states themselves."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines = PhaseLines()
        self._screens = [handler for handler in log.handlers if isinstance(handler, ShowsStarts)]

    def check(self, replicas: Iterable[Replica], now: float) -> None:
        """Log the lines that are due, and show on a terminal how far the starts are."""
        starts = {}
        for replica in replicas:
            if replica.state not in (WorkerState.STARTING, WorkerState.LOADING):
                self._lines.forget(replica.name)
                continue
            progress = replica.how_far()
            phase = phase_of(replica.state, progress)
            starts[replica.shown] = phase, progress
            line = self._lines.due(replica.name, phase, now, percentage=percentage_of(progress))
            if line and line != replica.state:
                self._log.info("%s: %s", replica.shown, line, extra=about(replica.log_name))
        for screen in self._screens:
            screen.show_starts(starts)


# Watch all workers: read their leases, ask a hung worker for its stacks, and have it killed.
#
# ``supervisor.workers.life`` decides which worker hangs.


class HangWatch:
    """The checks of all workers for hangs, done whenever ``check`` is called.

    kill  ends a worker's process: (worker, message for the log, reason in the exit report)
    """

    def __init__(self, kill: Callable[[Replica, str, str], None], log: logging.Logger) -> None:
        self._kill = kill
        self._log = log
        self._clock = CheckClock()

    def check(self, replicas: Iterable[Replica], now: float) -> None:
        """Check every worker that has a process, whatever its state."""
        passed = self._clock.passed(now)
        for replica in replicas:
            process = replica.process
            if process is None or (reading := process.read_lease()) is None:
                replica.detector = None  # no process, or one that has no lease
                continue
            if replica.detector is None:  # a new process
                replica.detector = HangDetector(reading)
                continue
            self._act(replica, process, replica.detector, replica.detector.check(reading, passed))

    def _act(self, replica: Replica, process: Launched, detector: HangDetector, verdict: HangVerdict) -> None:
        if verdict in (HangVerdict.HUNG, HangVerdict.LOST) and (process.is_gone or replica.killed_for is not None):
            return  # it has ended, or was killed: the loop is about to see its end
        if verdict is HangVerdict.HUNG:
            message = f"{replica.shown}: pid {process.pid} {detector.story()}; {process.condition()}"
            self._log.error("%s", message, extra=noted(EventKind.HANG, replica.log_name))
            if detector.can_tell:
                process.dump_stacks()
        elif verdict is HangVerdict.SPARED:
            message = f"{replica.shown}: pid {process.pid} goes on after all"
            self._log.warning("%s", message, extra=noted(EventKind.HANG, replica.log_name))
        elif verdict is HangVerdict.LOST:
            self._kill(replica, f"{detector.story()}; {process.condition()}", "hung")


RATE_WINDOW_S = 1.0


@dataclass(eq=False, repr=False)
class Fleet:
    """All workers of all models. Every method runs on the supervisor's one thread."""

    config: InitVar[Config]
    _scheduler: Scheduler
    _timers: Timers
    _launcher: Launcher
    _effects: EffectQueue
    runtime_dir: InitVar[Path]
    back_endpoint: InitVar[str]
    _log: logging.Logger

    def __post_init__(self, config: Config, runtime_dir: Path, back_endpoint: str) -> None:
        scheduler, timers, effects, log = self._scheduler, self._timers, self._effects, self._log
        self.vram = Vram(timers, log)
        self.registry = ReplicaRegistry(config, scheduler, self.vram, runtime_dir)
        outer, cpus = os.environ.get("CUDA_VISIBLE_DEVICES"), os.sched_getaffinity(0)
        self.sleepers = Sleepers(self.unload, self.carry_out, self.registry, self.vram, log)
        self.starts = Starts(
            self._ended, self.registry, scheduler, self.vram, self._launcher, self.sleepers, effects, timers,
            back_endpoint, outer, cpus, log,
        )  # fmt: skip
        self._hang_watch = HangWatch(self.kill, log)
        self._start_lines = StartLines(log)

    # --- orders -------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, cause: str) -> None:
        """Order a worker up, whatever it does now. A worker on its way down is started again when it has stopped. One
        that sleeps is woken."""
        replica.sleep_wanted = None
        self.carry_out(replica, replica.life.start(time.monotonic(), cause))

    def rest(self, replica: Replica, cause: str) -> None:
        """Let the first request for its model start a worker that is stopped or has failed."""
        self.carry_out(replica, replica.life.rest(time.monotonic(), cause))

    def unload(self, replica: Replica, cause: str) -> None:
        """End the process of a worker that is ready and idle, or asleep. Its next request starts it again."""
        replica.stay_s = None
        self.carry_out(replica, replica.life.unload(time.monotonic(), cause))

    def let_go_of(self, replica: Replica, cause: str) -> None:
        """End the process of a worker, whatever it does now, when its requests have finished. Its next request starts
        it again, also if models.yaml does not make it lazy."""
        replica.stay_s = replica.sleep_wanted = None
        if (transition := replica.life.let_go_of(time.monotonic(), cause)) is not None:
            self.carry_out(replica, transition)
            self._settle(replica)  # one in backoff has no process whose end would do this

    def stop(self, replica: Replica, cause: str, *, now: bool = False) -> None:
        """Stop a worker.

        By default the worker finishes its requests first, for at most the time for draining. With ``now`` it ends at
        once.
        """
        replica.stay_s = None
        if (transition := replica.life.stop(time.monotonic(), cause, at_once=now)) is not None:
            self.carry_out(replica, transition)

    def restart(self, replica: Replica, cause: str) -> None:
        """Stop a worker, then start it; requests wait meanwhile. A worker without a process is just started."""
        self.carry_out(replica, replica.life.restart(time.monotonic(), cause))

    def respec(self, replica: Replica, spec: ModelSpec) -> None:
        """Set the specification of a worker's next process."""
        was_lazy = replica.spec.config.lazy
        self.registry.respec(replica, spec)
        if replica.state is WorkerState.ASLEEP:
            self.unload(replica, "its configuration has changed")
        self._follow_lazy(replica, was_lazy)

    def adopt_settings(self, replica: Replica, spec: ModelSpec) -> None:
        """Apply keys of a model that only the supervisor reads. The worker's process goes on."""
        was_lazy = replica.spec.config.lazy
        if replica.desired_spec is replica.spec:
            replica.spec = replica.desired_spec = spec
        else:  # the present process is of an older specification still
            self.registry.respec(replica, spec)
        self._follow_lazy(replica, was_lazy)

    def _follow_lazy(self, replica: Replica, was_lazy: bool) -> None:
        """Let requests start a stopped worker that has become lazy, and stop an unloaded one that is lazy no more."""
        lazy = replica.spec.config.lazy
        if replica.state in ON_DEMAND and was_lazy and not lazy:
            self.stop(replica, "it is not lazy any more")
        elif replica.state is WorkerState.STOPPED and lazy and not was_lazy and replica.desired is not Desired.UP:
            self.rest(replica, "lazy")

    @property
    def all_stopped(self) -> bool:
        """Whether no process is left. The driver may still hold VRAM of the last processes, see ``vram.awaited``."""
        return all(replica.process is None for replica in self.registry.replicas.values())

    # --- what workers say ---------------------------------------------------------------------------------------

    def connected(self, replica: Replica) -> None:
        """Take note that a worker's process has connected. Tell it what its log is to hold."""
        self._report(replica, Event.HELLO, "connected")
        self._effects.extend(self.registry.log_orders([replica]))

    def loaded(self, replica: Replica, info: dict[str, Any]) -> None:
        """Take note that a worker can generate. ``info``: what its READY says."""
        replica.info, replica.progress = info, {}
        self.sleepers.loaded(replica)
        self._report(replica, Event.LOADED, self._measured(replica))

    def _measured(self, replica: Replica) -> str:
        """Measure the memory of a worker that is ready now, and compare it with the estimate.

        Return a text for the log: the load time, the device, and the memory that the worker holds.
        """
        parts = [
            f"loaded in {replica.info['load_seconds']} s on {replica.info['device']}",
            f"attention: {replica.info['attention']}",
            f"context {replica.info['context']} tokens",
        ]
        if (process := replica.process) is None:
            return ", ".join(parts)
        if (pid := process.local_pid) is not None:
            self.vram.ready(replica.name, pid)
        vram = self.vram.describe(replica.name, pid)
        if replica.memory.holding is not None:
            measured, expected = replica.memory.loaded(vram["vram_by_gpu"] or {})
            if measured and expected:
                self._log.info("%s: %s", replica.name, loaded_text(measured, expected), extra=about(replica.name))
        if (ram := process.memory()) is not None:
            parts.append(f"{ram / 2**20:.0f} MiB of RAM")
        if vram["vram_bytes"] is not None:
            parts.append(f"{vram['vram_bytes'] / 2**20:.0f} MiB of VRAM")
        return ", ".join(parts)

    def on_exit(self, process: Launched) -> None:
        """Clean up after a worker's process that has ended. The caller has taken in what the worker had sent."""
        replica = self.registry.worker_of(process)
        asked = replica.state is WorkerState.STOPPING  # a draining worker has not been told to leave yet
        code = self._launcher.reap(process)
        tail = without_ours(files.tail(replica.log_path, since=replica.log_begin))
        killed = (replica.kill_reason, replica.killed_for) if replica.killed_for else None
        if process.lost:
            killed = "lost", process.lost
        if process.refused is not None and not asked:
            reason, message, retry = process.refused
            # as for a start on this machine: after a crash, what fills the GPU now may go
            again = retry or (reason == "no room" and bool(replica.life.history.recent))
            report = not_admitted(reason, message, retry=again)
        else:
            report = classify(code, asked=asked, log_tail=tail, killed=killed)
        self.registry.process_ended(replica)
        if (pid := process.local_pid) is not None:
            self.vram.ended(replica.name, pid)
        self.starts.memory_came_back(replica.name)
        self._ended(replica, report, process.pid or None)

    def check_progress(self) -> None:
        """End the workers that hang, log how loads go on, and tell waiting clients how far directories are copied. The
        loop calls this every ``life.CHECK_S`` seconds."""
        now = time.monotonic()
        self._hang_watch.check(self.registry.replicas.values(), now)
        self._start_lines.check(self.registry.replicas.values(), now)
        for replica in self.registry.replicas.values():
            if (progress := replica.prepared_further()) is not None:
                self._effects.extend(self._scheduler.report_loading(replica.model, progress))

    def cut_logs(self) -> None:
        """Keep the logs of the workers small while they run. The loop calls this every ``files.CUT_S`` seconds."""
        replicas = self.registry.replicas.values()
        for path in {replica.log_path for replica in replicas}:
            if files.cut(path):
                for replica in replicas:
                    if replica.log_path == path:
                        replica.log_begin = None

    def kill(self, replica: Replica, why: str, reason: str = "killed") -> None:
        """Kill a worker that hangs, sends nonsense or cannot be reached. Its requests go on after its end."""
        if replica.process is not None and replica.killed_for is None and not replica.process.is_gone:
            replica.killed_for, replica.kill_reason = why, reason
            self._log.error(
                "%s: killing pid %d: %s", replica.shown, replica.process.pid, why,
                extra=noted(EventKind.KILL, replica.log_name),
            )  # fmt: skip
            replica.process.signal(signal.SIGKILL)

    def _ended(self, replica: Replica, report: ExitReport, pid: int | None = None) -> None:
        """Carry out what follows when there is no process any more, or when none could be started. ``Starts`` calls
        this for a start that has ended without a process."""
        for timer in [*replica.ladder, replica.drain_timer]:
            if timer is not None:
                timer.cancel()
        replica.ladder.clear()
        replica.last_exit, replica.last_exit_at = report, time.time()
        replica.stats, replica.progress, replica.tokens_per_s = {}, {}, 0.0
        now = time.monotonic()
        blames_request = report.retry and self._scheduler.finds_culprit(replica.name, now)
        transition, what_next = replica.life.ended(report, now, blames_request=blames_request, chance=random.random())
        if what_next:
            self._log.warning(
                "%s: pid %s: %s; %s", replica.shown, pid or "none", report.message, what_next,
                extra=noted(EventKind.REFUSAL if pid is None else EventKind.DEATH, replica.log_name),
            )  # fmt: skip
        self.carry_out(replica, transition)
        if not self._settle(replica) and replica.state is WorkerState.FAILED and replica.lacks_room:
            replica.backoff_timer = self._timers.at(
                time.monotonic() + ROOM_RETRY_S, lambda: self._try_room_again(replica)
            )

    def _settle(self, replica: Replica) -> bool:
        """Let a worker without a process go on towards the state that is desired. Return whether it did."""
        if (transition := replica.life.settle(time.monotonic())) is None:
            return False
        self.carry_out(replica, transition)
        return True

    def _try_room_again(self, replica: Replica) -> None:
        if replica.state is WorkerState.FAILED and replica.lacks_room:  # a reload may have changed it
            self.rest(replica, "there may be room by now")

    def after_events(self, replica: Replica) -> None:
        """End the drain of a worker if it has no request left. Call this when requests of the worker have ended."""
        if replica.state is WorkerState.DRAINING and self._scheduler.work(replica.name)[0] == 0:
            self._report(replica, Event.DRAINED, "no request left")

    def sample_rates(self, elapsed_s: float) -> None:
        """Note the tokens per second of each worker since the last sample, and the time when it was last busy.

        elapsed_s  seconds since the last sample
        """
        for name, replica in self.registry.replicas.items():
            running, tokens = self._scheduler.work(name)
            if running or tokens != replica.tokens_seen:
                replica.last_active = time.monotonic()
            replica.tokens_per_s = (tokens - replica.tokens_seen) / elapsed_s
            replica.speeds.append(round(replica.tokens_per_s, 1))
            replica.tokens_seen = tokens

    # --- actions ------------------------------------------------------------------------------------------------

    def _report(self, replica: Replica, event: Event, cause: str) -> None:
        """Carry out what follows from an event in a worker's life. Raises IllegalTransition."""
        self.carry_out(replica, replica.life.apply(event, time.monotonic(), cause))

    def carry_out(self, replica: Replica, transition: Transition) -> None:
        """Do what follows from a transition."""
        if transition.after is not transition.before:
            pid = f" pid {replica.process.pid}" if replica.process and replica.process.pid else ""
            before, after, cause = str(transition.before), str(transition.after), transition.cause
            self._log.info(
                "%s: %s -> %s (%s)%s", replica.shown, before, after, cause, pid,
                extra=noted(
                    EventKind.STATE, replica.log_name, before=before, state=after, reason=cause,
                    **_short(replica, transition),
                ),
            )  # fmt: skip
        for action in transition.actions:
            self._do(replica, action, transition.at)
        self._effects.append(WorkerChanged())

    def _do(self, replica: Replica, action: LifecycleAction, now: float) -> None:
        worker = replica.name
        match action:
            case LifecycleAction.BEGIN_START:
                self.starts.begin(replica)
            case LifecycleAction.OPEN:
                replica.last_active = now
                capacity, batch_size = replica.info["max_jobs"], replica.spec.config.together
                number, gpu = replica.generation, replica.placed_on
                self._effects.extend(
                    self._scheduler.open(worker, number, capacity, now, batch_size=batch_size, gpu=gpu)
                )
            case LifecycleAction.ACCEPT_NEW:
                self._scheduler.accept_new(worker)
            case LifecycleAction.HOLD_NEW:
                self._effects.extend(self._scheduler.pause(worker, now))
            case LifecycleAction.REST:
                self._effects.extend(self._scheduler.rest(worker, now))
            case LifecycleAction.REFUSE_NEW:
                self._effects.extend(self._scheduler.refuse_new(worker, replica.refusal(), now))
            case LifecycleAction.END_WAITING:
                self._effects.extend(self._scheduler.end_waiting(worker, replica.refusal(), now))
            case LifecycleAction.END_ACTIVE:
                asked = replica.last_exit is not None and replica.last_exit.reason == "asked"
                if asked:
                    message = f"model {replica.model!r} was stopped before the answer was finished"
                    error = WireError(ErrorCode.DRAINING, message)
                else:
                    reason = replica.last_exit.reason if replica.last_exit else "gone"
                    message = f"model {replica.model!r}: the worker process ended ({reason})"
                    error = WireError(ErrorCode.WORKER_DIED, message)
                self._effects.extend(self._scheduler.worker_gone(worker, error, now, struck=not asked))
                if replica.state is WorkerState.STOPPED and not replica.life.comes_again:
                    self._effects.extend(self._scheduler.release_held(worker, now))
            case LifecycleAction.WATCH_DRAIN:
                replica.drain_timer = self._timers.at(
                    now + self.registry.config.supervisor.stop.drain, lambda: self._drain_expired(replica)
                )
                self.after_events(replica)
            case LifecycleAction.PUT_TO_SLEEP:
                self._effects.append(ToWorker(worker, replica.generation, encode(Sleep())))
            case LifecycleAction.BEGIN_WAKE:
                self.starts.begin_wake(replica)
            case LifecycleAction.TURN_AWAY:
                self._effects.extend(self._scheduler.refuse_new(worker, replica.refusal(), now))
                self._effects.extend(self._scheduler.end_waiting(worker, replica.refusal(), now))
                self._effects.extend(self._scheduler.rest(worker, now))
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
        if replica.desired is not Desired.UP:  # else the worker is started again, and its requests go on
            self._effects.extend(self._scheduler.end_running(replica.name, time.monotonic()))
        self._report(replica, Event.DRAINED, "the drain's time is over")

    def _climb(self, replica: Replica, now: float) -> None:
        if replica.drain_timer is not None:
            replica.drain_timer.cancel()
        for timer in replica.ladder:
            timer.cancel()
        if self.starts.cancel(replica):
            return
        times = life.IMPATIENT if replica.life.impatient else self.registry.config.supervisor.ladder
        rungs = life.plan(now, times, reads_messages=bool(replica.info))
        replica.ladder = [self._timers.at(at, lambda rung=rung: self._rung(replica, rung)) for at, rung in rungs]  # type: ignore[misc]

    def _rung(self, replica: Replica, rung: Rung) -> None:
        if replica.process is None:
            return
        self._log.info("%s: %s to pid %d", replica.shown, rung, replica.process.pid, extra=about(replica.log_name))
        if rung is Rung.SHUTDOWN:
            self._effects.append(ToWorker(replica.name, replica.generation, encode(Shutdown())))
        else:
            replica.process.signal(signal.SIGTERM if rung is Rung.SIGTERM else signal.SIGKILL)


def _short(replica: Replica, transition: Transition) -> dict[str, str]:
    """Return a short message for the commonest event, that a worker became ready. Its reason has what else is known."""
    if transition.after is not WorkerState.READY or transition.before not in (WorkerState.LOADING, WorkerState.WAKING):
        return {}
    took = (replica.wake_s or 0.0) if transition.before is WorkerState.WAKING else replica.info["load_seconds"]
    return {
        "message": f"{replica.shown}: ready, {took:.1f} s" if took < 10 else f"{replica.shown}: ready, {took:.0f} s"
    }
