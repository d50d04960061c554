"""Where worker processes are started and ended: the one seam between the supervisor's decisions and a machine.

``supervisor.workers.local_launcher`` is this box. A launcher for several boxes would be a second implementation;
health, restarts, draining and routing never ask which one it is.
"""

from collections.abc import Mapping
from typing import Protocol

from protocol.process.progress_lease import Reading
from protocol.process.worker_spec import WorkerSpec


class Launched(Protocol):
    """A worker that was started. Every method is harmless once it is gone."""

    @property
    def pid(self) -> int: ...

    @property
    def is_gone(self) -> bool:
        """Dead, though perhaps not reaped yet."""

    def signal(self, number: int) -> None:
        """Signal the worker and everything that it has started."""

    def read_lease(self) -> Reading | None:
        """Return what the worker's page of ``protocol.process.progress_lease`` holds; None if it has no such page."""

    def dump_stacks(self) -> None:
        """Ask the worker, not its children, to write the stacks of all its threads into its log.

        Only for a worker that has renewed its lease once: before that, the signal would end it.
        """

    def condition(self) -> str:
        """What the system says of it, for people: "it is stopped (SIGSTOP)"."""

    def memory(self) -> int | None:
        """Bytes of RAM that it holds; None where that is not known."""


class Launcher(Protocol):
    """Starts workers, and tells of the end of each exactly once. Nothing here blocks."""

    @property
    def descriptor(self) -> int:
        """Readable when ``ended`` has something to tell."""

    def start(self, spec: WorkerSpec) -> Launched:
        """Start a worker of this generation. Raises OSError where there is no process or descriptor left."""

    def ended(self) -> list[Launched]:
        """The workers that are gone and were not reaped yet."""

    def reap(self, process: Launched) -> int:
        """End what a worker that is gone has left behind. Its exit code, or minus the signal's number."""

    def sweep(self, holds: Mapping[int, str]) -> None:
        """End what a former supervisor's launcher has left behind, and say in the log what that was. Called once,
        before the first ``start``; may take some seconds if something is there.

        holds  pid → what it holds of the GPUs, in words: whoever is no leftover is named, and left alone
        """

    def close(self) -> None:
        """Call when no worker is left."""
