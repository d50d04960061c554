"""One worker process as the operating system sees it: spawned, watched by pidfd, signalled as a group, reaped by join.

This is the one place where supervisor and model_worker meet.
"""

import multiprocessing
import os
import select
import signal
import threading

from model_worker import entry
from protocol.worker_spec import WorkerSpec
from supervisor.guard import Guard, kill_group

_SPAWN = multiprocessing.get_context("spawn")


class WorkerProcess:
    """A running worker. ``pidfd`` becomes readable when it is gone, whatever its children do.

    ``Process.sentinel`` would not do: a surviving grandchild keeps it silent. The constructor raises OSError if the
    system has no process or descriptor left.
    """

    def __init__(self, spec: WorkerSpec, guard: Guard) -> None:
        # PR_SET_PDEATHSIG fires when the *thread* that spawned ends.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be spawned from the main thread")
        self._guard = guard
        self._process = _SPAWN.Process(target=entry.main, args=(spec,), name=f"worker-{spec.engine.model}")
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # out of descriptors: a process that nobody watches must not stay
            self._process.kill()
            self._process.join()
            raise
        guard.watch(self.pid)

    @property
    def is_gone(self) -> bool:
        """Dead, though perhaps not reaped yet."""
        poll = select.poll()  # not select(): there may be more descriptors than it can count
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> None:
        """Signal the worker and everything in its group. Harmless once it is gone."""
        kill_group(self.pid, number)

    def reap(self) -> int:
        """Call when ``pidfd`` is readable: end what the worker left behind, collect the exit status, free the pidfd.

        Returns the exit code, or minus the number of the signal that ended the process. The group is killed before the
        leader is reaped: as long as it is a zombie its number cannot be given to anybody else. Only ``join`` reaps; a
        ``waitpid`` of our own would leave multiprocessing believing in a living child for ever.
        """
        kill_group(self.pid, signal.SIGKILL)
        self._guard.forget(self.pid)  # while the number is still ours, or the guard could kill its next owner
        self._process.join(0)
        code = self._process.exitcode
        os.close(self.pidfd)
        self._process.close()
        return code if code is not None else -signal.SIGKILL
