"""Workers as processes of this machine: spawned, watched through their pidfds, guarded, signalled as groups, reaped."""

import logging
import multiprocessing
import multiprocessing.reduction
import operator
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from protocol.process.birth import helper_environment
from protocol.process.worker_spec import DEFAULT_LEASES, Reading, WatchedPage, WorkerPhase, WorkerSpec, pack_spec
from supervisor.reactor import Timer, Timers
from supervisor.workers import guard
from supervisor.workers.environment import directory_of_titles, entries
from supervisor.workers.guard import WORKER_MARK, kill_group
from supervisor.workers.launcher import Elsewhere, Launched, Launcher
from supervisor.workers.orphans import Descendants, Orphans, is_stopped, stat_of

# Spare workers: processes ahead of their time, which have imported what an engine needs and wait for a model.
#
# Most seconds of a start go into imports, so a start that finds a spare is quicker. A spare has no model, and has not
# used the GPU's driver. It is guarded, recorded and reaped as a worker is. ``SparePlan`` decides when one is made
# (pure).


ENGINES = frozenset({"transformers", "exllamav2", "embedding"})
"""The engines that get spares. An engine of one's own may read its settings when it is imported."""
QUIET_S = 2.0
"""Seconds without a start after which a spare is made. A spare's imports take a second or more of a core."""
TRIES = 3
"""Spares in a row that may end by themselves, until no more are made for the engine."""
PAUSE_S = 10.0
"""Seconds until the next spare is made after one that has ended by itself."""
LEAST_FREE = 2 << 30
"""Bytes of host memory that must be free before a spare is made."""
LARGEST_SPEC = 32 << 10
"""Bytes of a packed specification that a spare takes. They fit into a pipe's buffer, so that sending never waits."""


class SparePlan:
    """Decides for which engines a spare is made. Times are monotonic seconds, and the caller passes them."""

    def __init__(self) -> None:
        self._ended: dict[str, tuple[int, float]] = {}
        """Engine → how many spares have ended in a row, and when the next one may be made."""
        self._busy_at = float("-inf")

    def missing(self, wanted: Collection[str], there: Collection[str], now: float, *, starting: bool) -> list[str]:
        """Return the engines for which a spare is to be made now.

        wanted    the engines of the configured models
        there     the engines that have a spare
        starting  whether a worker starts, loads or wakes, whose processor time a spare would take
        """
        if starting:
            self._busy_at = now
        if now - self._busy_at < QUIET_S:
            return []
        found = []
        for engine in sorted(ENGINES.intersection(wanted).difference(there)):
            ended, not_before = self._ended.get(engine, (0, 0.0))
            if ended < TRIES and now >= not_before:
                found.append(engine)
        return found

    def ended(self, engine: str, now: float) -> bool:
        """Take note that a spare has ended by itself. Return whether another one will be made."""
        ended = self._ended.get(engine, (0, 0.0))[0] + 1
        self._ended[engine] = ended, now + PAUSE_S
        return ended < TRIES

    def used(self, engine: str) -> None:
        """Take note that a spare has become a worker, so spares of this engine work."""
        self._ended.pop(engine, None)


GUARD_RETRY_S = 1.0
GUARD_CHECK_S = 1.0
"""Seconds between two checks that the guard runs. A guard that was stopped (SIGSTOP) could not act when the supervisor
dies, and nothing else shows that it was stopped."""
_SPAWN = multiprocessing.get_context("spawn")
_WORKER_MAIN, _SPARE_MAIN = entries()  # imported now: at a start there may be no descriptor left
PAGE = object()
"""Stands in the arguments of a process for the descriptor of its page."""
_CONDITIONS = {
    "R": "it is computing",
    "S": "it sleeps",
    "D": "it waits in the kernel (a disk or a driver)",
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped (a debugger)",
}
"""State of a worker's main thread, see proc(5) → its meaning for people."""


class _Inherited:
    """A descriptor that is passed to a spawned process. That process gets a copy, and the copy's number as argument."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (multiprocessing.reduction.DupFd(self._descriptor),)


class WorkerProcess:
    """A running worker. ``pidfd`` becomes readable when the process has ended, whatever its children do.

    ``Process.sentinel`` does not become readable while a child of the worker survives. The constructor raises OSError
    if the system has no process or descriptor left.

    name       the name of the process, for multiprocessing
    mark       what it and all that it starts have in their environment, see ``orphans``
    start_s    the first lease, in seconds
    target     what the process calls, with ``arguments``: one of these is the descriptor of the page, where PAGE stands
    """

    def __init__(
        self, name: str, mark: str, start_s: float, target: Callable[..., None], arguments: Sequence[Any]
    ) -> None:
        # The kernel sends the signal of PR_SET_PDEATHSIG when the *thread* that spawned the worker ends.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be spawned from the main thread")
        self.mark = mark
        resource_tracker.ensure_running()  # it outlives this worker, and must not have its mark
        self._page = WatchedPage(start_s)
        os.environ[WORKER_MARK] = mark
        try:
            page = _Inherited(self._page.descriptor)
            given = tuple(page if argument is PAGE else argument for argument in arguments)
            self._process = _SPAWN.Process(target=target, args=given, name=name)
            self._process.start()
        except BaseException:
            self._page.close()
            raise
        finally:
            del os.environ[WORKER_MARK]
        self._page.handed_over()
        assert self._process.pid is not None
        self.pid = self.local_pid = self._process.pid
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left, and a process that nobody watches must not stay
            self.abandon()
            raise

    waits = lost = placed_on = ""  # it runs on this machine, where every end is seen
    refused = progress = None
    leases: Mapping[str, int] = {}

    def describe(self) -> dict[str, Any]:
        return {}

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, even if it was not reaped yet."""
        poll = select.poll()  # not select(): there may be more descriptors than it can count
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its process group. Do nothing if they have ended."""
        kill_group(self.pid, number)

    def read_lease(self) -> Reading:
        return self._page.read()

    def dump_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def condition(self) -> str:
        stat = stat_of(self.pid)
        return "it is gone" if stat is None else _CONDITIONS.get(stat.state, "it is gone")

    def memory(self) -> int | None:
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def abandon(self) -> None:
        """Kill a process that was just started, and wait for its end."""
        self._process.kill()
        self._process.join()
        self._page.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def end_group(self) -> None:
        """Kill the rest of the group of a worker that has ended. Call this before ``join``: as long as the worker is a
        zombie, its pid cannot belong to another process."""
        kill_group(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Collect the exit status and close the pidfd. Call this once the pidfd is readable.

        Return the exit code, or minus the number of the signal that ended the process. The process is reaped through
        multiprocessing, which would otherwise count it as alive for ever. ``exitcode`` is used because
        ``Process.join(0)`` imports a module, which fails when no descriptor is left.
        """
        code = self._process.exitcode
        self._page.close()
        os.close(self.pidfd)
        self._process.close()
        return code if code is not None else -signal.SIGKILL


class SpareProcess(WorkerProcess):
    """A process that has imported what an engine needs, and becomes a worker when it gets a specification."""

    def __init__(self, engine: str, mark: str, log_path: str) -> None:
        self.engine = engine
        theirs, ours = os.pipe()
        self._pipe = open(ours, "wb", buffering=0)  # noqa: SIM115
        try:
            arguments = (engine, os.getpid(), PAGE, log_path, _Inherited(theirs))
            super().__init__(f"spare-{engine}", mark, DEFAULT_LEASES.start_s, _SPARE_MAIN, arguments)
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(theirs)

    @property
    def is_ready(self) -> bool:
        """Return whether the imports are done."""
        reading = self.read_lease()
        return reading.phase is WorkerPhase.IDLE and not self.is_gone

    def become(self, spec: WorkerSpec) -> bool:
        """Let the process become this worker. Return False if it cannot; the caller then ends it."""
        packed = pack_spec(spec)
        if len(packed) > LARGEST_SPEC or not self.is_ready or is_stopped(self.pid):
            return False
        self._page.expect(spec.leases.start_s)  # before the process writes its own leases
        try:
            self._pipe.write(packed)
        except OSError:
            return False
        self._pipe.close()
        return True

    def join(self) -> int:
        self._pipe.close()
        return super().join()


# The guard (``supervisor.workers.guard``).


class Guard:
    """The guard's process, as the supervisor sees it. ``pidfd`` lets the loop notice if somebody kills the guard.

    It is no ``supervisor.helper.Helper``, because it may not miss a group. A pipe takes the groups before the process
    exists, a guard that ended is started again without a pause, and the guard imports nothing that could fail.

    environment  the environment variables of the guard's process
    titles       directory in which the guard's process finds setproctitle
    """

    def __init__(self, environment: dict[str, str], titles: str) -> None:
        self._environment = environment
        self._titles = titles
        self._groups: set[int] = set()
        self.pidfd = -1
        self._start()

    def _start(self) -> None:
        """Start a guard process that knows the groups watched so far. Raises OSError."""
        guards_end, ours = os.pipe()
        self._pipe = open(ours, "wb", buffering=0)  # noqa: SIM115
        try:
            # The groups are in the pipe before the process exists. If the supervisor is killed at the next instruction,
            # the new guard still reads them. There is one group for each worker, so the pipe never fills up here.
            for group in self._groups:
                self._tell(f"+{group}\n")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(guard.__file__), self._titles],
                stdin=guards_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a reader that has stopped must not stop the guard
                start_new_session=True,  # a Ctrl-C, or a kill of the supervisor's group, must not take the guard along
                cwd="/",
                env=self._environment,
            )
            self.pid = self._process.pid
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:  # no descriptor left. At its pipe's end this guard would kill the workers: end it first
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(guards_end)

    def watch(self, group: int) -> None:
        """Kill this process group when the supervisor dies."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Forget a process group that has ended. Its number may belong to another group soon."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def restart(self) -> None:
        """Start another guard, and give it the groups of the former one. Raises OSError; then call this again later."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            self._process.wait()
            self._pipe.close()
        self._start()

    def kill(self) -> None:
        """Kill a guard that was stopped. The loop calls ``restart`` when its pidfd is readable."""
        self._process.kill()

    def close(self) -> None:
        """End the guard, once no worker is left, and reap it."""
        self._tell(".\n")  # so it looks for nothing
        self._pipe.close()
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _tell(self, line: str) -> None:
        if self._pipe.closed:
            return  # no guard could be started yet: ``restart`` gives it all groups
        with suppress(BrokenPipeError):  # the guard has ended: its pidfd is readable, and the loop calls ``restart``
            self._pipe.write(line.encode())


class LocalLauncher(Launcher):
    """The launcher of workers on this machine, see ``launcher.Launcher``. Use it on the main thread only: workers die
    with the thread that spawned them."""

    def __init__(self, timers: Timers, orphans: Orphans, log: logging.Logger, spare_log: Path) -> None:
        self._timers = timers
        self._orphans = orphans
        self._descendants = Descendants(orphans.mark, log)
        self._look_timer: Timer | None = None
        self._log = log
        self._processes: dict[int, WorkerProcess] = {}
        """The workers that were not reaped yet, by pidfd."""
        self._spares: dict[str, SpareProcess] = {}
        """By engine."""
        self._leaving: dict[int, SpareProcess] = {}
        """Spares that were killed and not reaped yet, by pidfd."""
        self._spare_plan = SparePlan()
        self._spare_log = str(spare_log)
        self._epoll = select.epoll()
        self._guard = Guard(helper_environment(), directory_of_titles())
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
        self._check_guard()
        self._look_for_descendants()

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def start(self, spec: WorkerSpec, elsewhere: Elsewhere | None = None) -> WorkerProcess:
        process = self._adopted(spec)
        if process is None:
            name = f"worker-{spec.engine.model}"
            mark = self._descendants.new_mark()
            process = WorkerProcess(name, mark, spec.leases.start_s, _WORKER_MAIN, (spec, PAGE))
            self._watch(process)
        self._record(process, spec.engine.model, spec.name)
        self._processes[process.pidfd] = process
        return process

    def _watch(self, process: WorkerProcess) -> None:
        """See the end of a process that was just started, and have the guard end it with the supervisor."""
        try:
            self._epoll.register(process.pidfd, select.EPOLLIN)
        except OSError:  # a process that nobody watches must not stay
            process.abandon()
            raise
        self._guard.watch(process.pid)

    def _record(self, process: WorkerProcess, model: str, name: str = "") -> None:
        self._orphans.record(process.pid, model)
        self._descendants.began(process.mark, process.pid, name or model)

    def _adopted(self, spec: WorkerSpec) -> WorkerProcess | None:
        """Return a spare that has become this worker; None if there is none that can."""
        spare = self._spares.get(spec.engine.engine)
        if spare is None or (not spare.is_ready and not spare.is_gone):  # one that still imports is for the next start
            return None
        del self._spares[spare.engine]
        if not spare.become(spec):
            self._log.warning("the spare worker (pid %d) cannot be used: starting another process", spare.pid)
            self._end(spare)
            return None
        self._spare_plan.used(spare.engine)
        return spare

    def keep_spares(
        self,
        wanted: Collection[tuple[str, Elsewhere | None]],
        now: float,
        *,
        starting: bool,
        free: Callable[[], int] = lambda: 0,
    ) -> None:
        engines = {engine for engine, _ in wanted}
        for engine in self._spares.keys() - engines:
            self._end(self._spares.pop(engine))
        for engine in self._spare_plan.missing(engines, self._spares, now, starting=starting):
            if 0 < free() < LEAST_FREE:
                return
            try:
                spare = SpareProcess(engine, self._descendants.new_mark(), self._spare_log)
                self._watch(spare)
            except OSError as e:
                self._log.warning("no spare worker can be started: %s", e)
                self._spare_plan.ended(engine, now)
                continue
            self._record(spare, f"spare worker of {engine}")
            self._spares[engine] = spare

    def _end(self, spare: SpareProcess) -> None:
        """Kill a spare. ``ended`` collects it: one that reads from a disk that hangs dies later."""
        spare.signal(signal.SIGKILL)
        self._leaving[spare.pidfd] = spare

    def spares(self) -> list[dict[str, object]]:
        """Return the spares as ``status`` shows them. ``ready``: whether the imports are done."""
        return [
            {"engine": engine, "pid": spare.pid, "ready": spare.is_ready, "ram_bytes": spare.memory()}
            for engine, spare in self._spares.items()
        ]

    def is_worker(self, pid: int) -> bool:
        """Return whether this process is a worker that this launcher has started and not reaped yet."""
        return any(process.pid == pid for process in self._processes.values())

    def ended(self) -> list[Launched]:
        # The guard comes before the workers, since the next process of a worker may need the guard.
        ready = sorted(self._epoll.poll(0), key=lambda event: event[0] != self._guard.pidfd)
        gone: list[Launched] = []
        for descriptor, _ in ready:
            if descriptor in self._processes:
                gone.append(self._processes[descriptor])
            elif (spare := self._leaving.pop(descriptor, None)) is not None:
                self._collect(spare)
            elif (spare := next((s for s in self._spares.values() if s.pidfd == descriptor), None)) is not None:
                self._spare_ended(self._spares.pop(spare.engine))
            else:
                self._log.warning("the guard process ended; starting another")
                self._epoll.unregister(descriptor)
                self._restart_guard()
        return gone

    def _spare_ended(self, spare: SpareProcess) -> None:
        self._collect(spare)
        again = self._spare_plan.ended(spare.engine, time.monotonic())
        what = "another one follows" if again else f"no more are made; {self._spare_log} may say why"
        self._log.warning("the spare worker of %s (pid %d) has ended: %s", spare.engine, spare.pid, what)

    def reap(self, process: Launched) -> int:
        assert isinstance(process, WorkerProcess)
        del self._processes[process.pidfd]
        return self._collect(process)

    def _collect(self, process: WorkerProcess) -> int:
        self._epoll.unregister(process.pidfd)
        process.end_group()
        self._guard.forget(process.pid)  # before the pid can belong to another process, which the guard would kill
        code = process.join()
        self._orphans.forget(process.pid)
        self._descendants.ended(process.mark)
        self._look_for_descendants()  # now: the next worker may need the GPU that they hold
        return code

    def _look_for_descendants(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        now = time.monotonic()
        pause = self._descendants.look(now)
        self._look_timer = None if pause is None else self._timers.at(now + pause, self._look_for_descendants)

    def sweep(self, holds: Mapping[int, str]) -> None:
        self._orphans.sweep(holds)

    def record_again(self) -> None:
        """Write the record of the workers into a runtime directory that was made again."""
        self._orphans.write()

    def close(self) -> None:
        self.keep_spares((), time.monotonic(), starting=False)
        for spare in self._leaving.values():
            spare.end_group()
        self._descendants.end_all()
        self._guard.close()
        self._epoll.close()

    def _check_guard(self) -> None:
        """Kill a guard that was stopped. ``ended`` then sees its end and starts another guard."""
        if is_stopped(self._guard.pid):
            self._log.warning("the guard process (pid %d) was stopped: replacing it", self._guard.pid)
            self._guard.kill()
        self._timers.at(time.monotonic() + GUARD_CHECK_S, self._check_guard)

    def _restart_guard(self) -> None:
        try:
            self._guard.restart()
        except OSError as e:  # no process or descriptor is left. Meanwhile the kernel (PR_SET_PDEATHSIG) kills workers
            self._log.error("no guard process: %s; trying again", e)
            self._timers.at(time.monotonic() + GUARD_RETRY_S, self._restart_guard)
            return
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
