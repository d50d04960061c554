"""Workers as processes of this machine: spawned, watched through their pidfds, guarded, signalled as groups, reaped."""

import logging
import multiprocessing
import multiprocessing.reduction
import operator
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.process.helper_environment import helper_environment
from protocol.process.progress_lease import Reading, WatchedPage
from protocol.process.worker_spec import WorkerSpec
from supervisor.packages import directory_of_titles
from supervisor.timers import Timers
from supervisor.worker_modules import worker_main
from supervisor.workers.guard import Guard, kill_group
from supervisor.workers.launcher import Launched
from supervisor.workers.orphans import Orphans
from supervisor.workers.processes import is_stopped

GUARD_RETRY_S = 1.0
GUARD_CHECK_S = 1.0
"""Seconds between two checks that the guard runs. A guard that was stopped (SIGSTOP) could not act when the supervisor
dies, and nothing else shows that it was stopped."""
_SPAWN = multiprocessing.get_context("spawn")
_WORKER_MAIN = worker_main()  # imported now: at a start there may be no descriptor left
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
    """

    def __init__(self, spec: WorkerSpec) -> None:
        # The kernel sends the signal of PR_SET_PDEATHSIG when the *thread* that spawned the worker ends.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be spawned from the main thread")
        self._page = WatchedPage(spec.leases.start_s)
        try:
            arguments = (spec, _Inherited(self._page.descriptor))
            self._process = _SPAWN.Process(target=_WORKER_MAIN, args=arguments, name=f"worker-{spec.engine.model}")
            self._process.start()
        except BaseException:
            self._page.close()
            raise
        self._page.handed_over()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left, and a process that nobody watches must not stay
            self._process.kill()
            self._process.join()
            self._page.close()
            raise

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
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            pass

    def condition(self) -> str:
        try:
            after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2]
        except OSError:
            return "it is gone"
        return _CONDITIONS.get(after_name[:1], "it is gone")

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


class LocalLauncher:
    """The launcher of workers on this machine, see ``launcher.Launcher``. Use it on the main thread only: workers die
    with the thread that spawned them."""

    def __init__(self, timers: Timers, orphans: Orphans, log: logging.Logger) -> None:
        self._timers = timers
        self._orphans = orphans
        self._log = log
        self._processes: dict[int, WorkerProcess] = {}
        """The workers that were not reaped yet, by pidfd."""
        self._epoll = select.epoll()
        self._guard = Guard(helper_environment(), directory_of_titles())
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
        self._check_guard()

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        process = WorkerProcess(spec)
        try:
            self._epoll.register(process.pidfd, select.EPOLLIN)
        except OSError:  # a process that nobody watches must not stay
            process.abandon()
            raise
        self._guard.watch(process.pid)
        self._orphans.record(process.pid, spec.engine.model)
        self._processes[process.pidfd] = process
        return process

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
            else:
                self._log.warning("the guard process ended; starting another")
                self._epoll.unregister(descriptor)
                self._restart_guard()
        return gone

    def reap(self, process: Launched) -> int:
        assert isinstance(process, WorkerProcess)
        self._epoll.unregister(process.pidfd)
        del self._processes[process.pidfd]
        process.end_group()
        self._guard.forget(process.pid)  # before the pid can belong to another process, which the guard would kill
        code = process.join()
        self._orphans.forget(process.pid)
        return code

    def sweep(self, holds: Mapping[int, str]) -> None:
        self._orphans.sweep(holds)

    def record_again(self) -> None:
        """Write the record of the workers into a runtime directory that was made again."""
        self._orphans.write_again()

    def close(self) -> None:
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
