"""The interface between the supervisor's decisions and the machine on which worker processes are started and ended.

``supervisor.workers.local_launcher`` starts them on this machine. A launcher for several machines would be a second
implementation. Health checks, restarts, draining and routing do not depend on which one it is.
"""

from collections.abc import Mapping
from typing import Protocol

from protocol.process.progress_lease import Reading
from protocol.process.worker_spec import WorkerSpec


class Launched(Protocol):
    """A worker's process. Its methods may be called when it has ended, and do nothing then."""

    @property
    def pid(self) -> int: ...

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, even if it was not reaped yet."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker and everything that it has started."""

    def read_lease(self) -> Reading | None:
        """Return what the worker's page of ``protocol.process.progress_lease`` holds; None if it has no such page."""

    def dump_stacks(self) -> None:
        """Ask the worker, not its children, to write the stacks of all its threads into its log.

        Only for a worker that has renewed its lease once: before that, the signal would end it.
        """

    def condition(self) -> str:
        """Return what the system says about the process, for people: "it is stopped (SIGSTOP)"."""

    def memory(self) -> int | None:
        """Return the bytes of RAM that the process holds; None if that is not known."""


class Launcher(Protocol):
    """Starts workers, and reports the end of each exactly once. No method blocks, except ``sweep``."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a worker has ended."""

    def start(self, spec: WorkerSpec) -> Launched:
        """Start a worker. Raises OSError if the system has no process or descriptor left."""

    def ended(self) -> list[Launched]:
        """Return the workers that have ended and were not reaped yet."""

    def reap(self, process: Launched) -> int:
        """End what a worker that has ended left behind. Return its exit code, or minus the signal's number."""

    def sweep(self, holds: Mapping[int, str]) -> None:
        """End what a former supervisor's workers have left behind, and name it in the log. Call this once, before the
        first ``start``. It may take some seconds if something is left.

        holds  pid → what that process holds of the GPUs, in words. Processes that are not ours are named only
        """

    def close(self) -> None:
        """Free what the launcher holds. Call this when no worker is left."""
