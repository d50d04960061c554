"""Workers as processes of this box: spawned, watched through their pidfds, guarded, reaped."""

import logging
import select
import time
from collections.abc import Mapping

from protocol.process.helper_environment import helper_environment
from protocol.process.worker_spec import WorkerSpec
from supervisor.packages import directory_of_titles
from supervisor.timers import Timers
from supervisor.workers.guard import Guard
from supervisor.workers.launcher import Launched
from supervisor.workers.orphans import Orphans
from supervisor.workers.processes import is_stopped
from supervisor.workers.worker_process import WorkerProcess

GUARD_RETRY_S = 1.0
GUARD_CHECK_S = 1.0
"""Seconds between looks whether the guard still runs. A guard that was stopped (SIGSTOP) could not act when the
supervisor dies, and nothing else tells of it."""


class LocalLauncher:
    """See ``launcher.Launcher``. Lives on the main thread: workers die with the thread that spawned them."""

    def __init__(self, timers: Timers, orphans: Orphans, log: logging.Logger) -> None:
        self._timers = timers
        self._orphans = orphans
        self._log = log
        self._workers: dict[int, WorkerProcess] = {}
        """By pidfd."""
        self._epoll = select.epoll()
        self._guard = Guard(helper_environment(), directory_of_titles())
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
        self._check_guard()

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        worker = WorkerProcess(spec)
        try:
            self._epoll.register(worker.pidfd, select.EPOLLIN)
        except OSError:  # a process that nobody watches must not stay
            worker.abandon()
            raise
        self._guard.watch(worker.pid)
        self._orphans.record(worker.pid, spec.engine.model)
        self._workers[worker.pidfd] = worker
        return worker

    def is_worker(self, pid: int) -> bool:
        """Whether this process is a worker that was started here and has not been reaped."""
        return any(worker.pid == pid for worker in self._workers.values())

    def ended(self) -> list[Launched]:
        # before the workers, one of whose successors may need it
        ready = sorted(self._epoll.poll(0), key=lambda event: event[0] != self._guard.pidfd)
        gone: list[Launched] = []
        for descriptor, _ in ready:
            if descriptor in self._workers:
                gone.append(self._workers[descriptor])
            else:
                self._log.warning("the guard process ended; starting another")
                self._epoll.unregister(descriptor)
                self._restart_guard()
        return gone

    def reap(self, worker: Launched) -> int:
        assert isinstance(worker, WorkerProcess)
        self._epoll.unregister(worker.pidfd)
        del self._workers[worker.pidfd]
        worker.end_group()
        self._guard.forget(worker.pid)  # while the number is still ours, or the guard could kill its next owner
        code = worker.join()
        self._orphans.forget(worker.pid)
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
        """Kill a guard that was stopped. Its end is noticed as any other, and another one takes its place."""
        if is_stopped(self._guard.pid):
            self._log.warning("the guard process (pid %d) was stopped: replacing it", self._guard.pid)
            self._guard.kill()
        self._timers.at(time.monotonic() + GUARD_CHECK_S, self._check_guard)

    def _restart_guard(self) -> None:
        try:
            self._guard.restart()
        except OSError as e:  # no processes or descriptors left; the kernel's own SIGKILL still protects meanwhile
            self._log.error("no guard process: %s; trying again", e)
            self._timers.at(time.monotonic() + GUARD_RETRY_S, self._restart_guard)
            return
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
