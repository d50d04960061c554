"""Spawn one worker process, watch it by its pidfd, send signals to its group, and collect its exit status."""

import multiprocessing
import multiprocessing.reduction
import operator
import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

from protocol.process.progress_lease import Reading, WatchedPage
from protocol.process.worker_spec import WorkerSpec
from supervisor.worker_modules import worker_main
from supervisor.workers.guard import kill_group

_SPAWN = multiprocessing.get_context("spawn")
_WORKER_MAIN = worker_main()  # now: at a start there may be no descriptor left for an import
_CONDITIONS = {
    "R": "it is computing",
    "S": "it sleeps",
    "D": "it waits in the kernel (a disk or a driver)",
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped (a debugger)",
}
"""By the state of its main thread, see proc(5)."""


class _Inherited:
    """A descriptor that a process to be spawned gets a copy of: there, an argument like this is that copy's number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (multiprocessing.reduction.DupFd(self._descriptor),)


class WorkerProcess:
    """A running worker. ``pidfd`` becomes readable when it is gone, whatever its children do.

    ``Process.sentinel`` would not do: a surviving grandchild keeps it silent. The constructor raises OSError if the
    system has no process or descriptor left.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        # PR_SET_PDEATHSIG fires when the *thread* that spawned ends.
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
        except OSError:  # out of descriptors: a process that nobody watches must not stay
            self._process.kill()
            self._process.join()
            self._page.close()
            raise

    @property
    def is_gone(self) -> bool:
        """Dead, though perhaps not reaped yet."""
        poll = select.poll()  # not select(): there may be more descriptors than it can count
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> None:
        """Signal the worker and everything in its group. Harmless once it is gone."""
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
        """End a process that has only just been started, and wait for that."""
        self._process.kill()
        self._process.join()
        self._page.close()
        os.close(self.pidfd)

    def end_group(self) -> None:
        """End what a worker that is gone left behind, before ``join``: as long as it is a zombie its number cannot be
        given to anybody else."""
        kill_group(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Collect the exit status and free the pidfd, once that is readable.

        Returns the exit code, or minus the number of the signal that ended the process. Only ``join`` reaps; a
        ``waitpid`` of our own would leave multiprocessing believing in a living child for ever. ``exitcode`` does what
        ``Process.join(0)`` would, which imports a module for it: where no descriptor is left, that fails.
        """
        code = self._process.exitcode
        self._page.close()
        os.close(self.pidfd)
        self._process.close()
        return code if code is not None else -signal.SIGKILL
