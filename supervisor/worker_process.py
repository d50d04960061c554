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
from supervisor.guard import kill_group

_SPAWN = multiprocessing.get_context("spawn")


class WorkerProcess:
    """A running worker. ``pidfd`` becomes readable when it is gone, whatever its children do.

    ``Process.sentinel`` would not do: a surviving grandchild keeps it silent. The constructor raises OSError if the
    system has no process or descriptor left.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        # PR_SET_PDEATHSIG fires when the *thread* that spawned ends.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be spawned from the main thread")
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

    @property
    def is_gone(self) -> bool:
        """Dead, though perhaps not reaped yet."""
        poll = select.poll()  # not select(): there may be more descriptors than it can count
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> None:
        """Signal the worker and everything in its group. Harmless once it is gone."""
        kill_group(self.pid, number)

    def abandon(self) -> None:
        """End a process that has only just been started, and wait for that."""
        self._process.kill()
        self._process.join()
        os.close(self.pidfd)

    def end_group(self) -> None:
        """End what a worker that is gone left behind, before ``join``: as long as it is a zombie its number cannot be
        given to anybody else."""
        kill_group(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Collect the exit status and free the pidfd, once that is readable.

        Returns the exit code, or minus the number of the signal that ended the process. Only ``join`` reaps; a
        ``waitpid`` of our own would leave multiprocessing believing in a living child for ever.
        """
        self._process.join(0)
        code = self._process.exitcode
        os.close(self.pidfd)
        self._process.close()
        return code if code is not None else -signal.SIGKILL
