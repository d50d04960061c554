"""The interface between the supervisor's decisions and the machine on which worker processes are started and ended.

``supervisor.workers.local_launcher`` starts workers on this machine. A launcher for several machines would be a second
implementation. Health checks, restarts, draining and routing do not depend on the implementation.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from protocol.process.progress_lease import Reading
from protocol.process.worker_spec import WorkerSpec
from supervisor.workers.machines import NoMachine


class Launched(Protocol):
    """A worker's process. Its methods may be called after the process has ended, and do nothing then."""

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str:
        """Return the name of the machine on which the process runs; "" for this one."""

    @property
    def waits(self) -> str:
        """Return why the process was not started yet; "" once it was."""

    @property
    def progress(self) -> dict[str, Any] | None:
        """Return how far the machine is that prepares the start, as ``status`` shows it; None if there is nothing to
        prepare, or nothing left."""

    @property
    def lost(self) -> str:
        """Return why the process counts as ended although nobody has seen its end; "" if that is not so."""

    @property
    def refused(self) -> tuple[str, str, bool] | None:
        """Return (reason, message, retry) of ``exits.ExitReport`` if the process was not started, because its machine
        has refused it; else None."""

    @property
    def placed_on(self) -> str:
        """Return the machine and its GPUs, for people; "" for a process on this machine."""

    def gpu_memory(self) -> dict[str, Any] | None:
        """Return what ``status`` shows about the GPU memory of a process on another machine; None for this machine."""

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, even if it was not reaped yet."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its process group."""

    def read_lease(self) -> Reading | None:
        """Return the worker's lease from its page of ``protocol.process.progress_lease``; None if there is no page."""

    def dump_stacks(self) -> None:
        """Ask the worker, not its children, to write the stacks of all its threads into its log.

        Call this only for a worker that has renewed its lease once. Before that, the signal would end the worker.
        """

    def condition(self) -> str:
        """Return the state of the process, for people, for example "it is stopped (SIGSTOP)"."""

    def memory(self) -> int | None:
        """Return the bytes of RAM that the process holds; None if that is not known."""


def local_pid(process: Launched) -> int | None:
    """Return the pid of a process on this machine. None for one on another machine, where the number means another
    process than here."""
    return process.pid if process.gpu_memory() is None else None


class Launcher(Protocol):
    """The interface that starts workers and reports their ends. No method blocks, except ``sweep``."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a worker has ended."""

    def no_machine(self, node: str, gpus: int) -> NoMachine | None:
        """Return why no other machine that ``node`` of models.yaml means has so many GPUs to lease; None if one has."""

    def start(self, spec: WorkerSpec) -> Launched:
        """Start a worker. Raises OSError if the system has no process or descriptor left."""

    def ended(self) -> list[Launched]:
        """Return the workers that have ended and were not reaped yet."""

    def reap(self, process: Launched) -> int:
        """End the rest of the group of a worker that has ended. Return its exit code, or minus the signal's number."""

    def sweep(self, holds: Mapping[int, str]) -> None:
        """End the processes that a former supervisor's workers have left behind, and name them in the log.

        Call this once, before the first ``start``. It may take some seconds if processes are left.

        holds  pid → the GPU memory that this process holds, in words. Processes that are not ours are named only
        """

    def close(self) -> None:
        """Free the launcher's descriptors and end its guard. Call this when no worker is left."""
