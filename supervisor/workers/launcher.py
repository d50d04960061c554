"""The interface between the supervisor's decisions and the machines on which worker processes are started and ended.

There are two implementations. ``supervisor.workers.local`` starts workers on this machine. The one in
``supervisor.cluster.launcher`` starts workers on other machines, too; a supervisor with a section ``cluster`` in
models.yaml uses it. Health checks, restarts, draining and routing do not depend on the implementation.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from protocol.process.worker_spec import Reading, WorkerSpec

if TYPE_CHECKING:
    from supervisor.config.server import SupervisorConfig
    from supervisor.ports.client_port import ClientPort
    from supervisor.ports.sockets import Context
    from supervisor.ports.worker_port import WorkerPort
    from supervisor.reactor import Reactor
    from supervisor.requests.queue import WorkerSlot


@dataclass(frozen=True)
class Elsewhere:
    """What a worker wants of other machines than the supervisor's own. The launcher reads it, and nothing else does.

    node  the machines that will do, as models.yaml names them
    gpus  the number of their GPUs that the worker needs, which the cluster chooses; 0 for a worker on the CPU
    vram  the bytes that the worker takes, if models.yaml says so: one size, or one for each GPU; else None
    """

    node: str
    gpus: int = 0
    vram: tuple[int, ...] | None = None


class NoMachineError(Exception):
    """No other machine can take a worker now. The message is one line for people.

    missing  machine → GPUs that would have to become free there; empty if that would not help, or if GPUs become free
             anyway
    """

    def __init__(self, why: str, missing: Mapping[str, int] | None = None) -> None:
        super().__init__(why)
        self.missing = missing or {}


class Launched(Protocol):
    """A worker's process. Its methods may be called after the process has ended, and do nothing then."""

    @property
    def pid(self) -> int: ...

    @property
    def local_pid(self) -> int | None:
        """Return the pid of a process on this machine. None for one on another machine, where the number means another
        process than here."""

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

    @property
    def leases(self) -> Mapping[str, int]:
        """Return the GPUs on other machines that are free again after the process has ended: machine → number."""

    def describe(self) -> dict[str, Any]:
        """Return what ``status`` shows about the place and the GPU memory of a process on another machine. Empty for
        this machine, where the supervisor sees that itself."""

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, even if it was not reaped yet."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its process group."""

    def read_lease(self) -> Reading | None:
        """Return the worker's lease from its page of ``protocol.process.worker_spec``; None if there is no page."""

    def dump_stacks(self) -> None:
        """Ask the worker, not its children, to write the stacks of all its threads into its log.

        Call this only for a worker that has renewed its lease once. Before that, the signal would end the worker.
        """

    def condition(self) -> str:
        """Return the state of the process, for people, for example "it is stopped (SIGSTOP)"."""

    def memory(self) -> int | None:
        """Return the bytes of RAM that the process holds; None if that is not known."""


class Launcher(Protocol):
    """The interface that starts workers and reports their ends. No method blocks, except ``sweep``."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a worker has ended."""

    def start(self, spec: WorkerSpec, elsewhere: Elsewhere | None = None) -> Launched:
        """Start a worker, on this machine or elsewhere. Raises OSError if the system has no process or descriptor
        left."""

    def ended(self) -> list[Launched]:
        """Return the workers that have ended and were not reaped yet."""

    def reap(self, process: Launched) -> int:
        """End the rest of the group of a worker that has ended. Return its exit code, or minus the signal's number."""

    def sweep(self, holds: Mapping[int, str]) -> None:
        """End the processes that a former supervisor's workers have left behind, and name them in the log.

        Call this once, before the first ``start``. It may take some seconds if processes are left.

        holds  pid → the GPU memory that this process holds, in words. Processes that are not ours are named only
        """

    def keep_spares(
        self, wanted: Collection[tuple[str, Elsewhere | None]], now: float, *, starting: bool, free: Callable[[], int]
    ) -> None:
        """Make the spares that are wanted and missing, and end those that are not wanted. The loop calls this again and
        again.

        wanted    engine and ``ModelSpec.elsewhere`` of each model; empty for no spares
        starting  whether a worker starts, loads or wakes
        free      returns the bytes of host memory that are free; 0 if that is not known
        """

    def close(self) -> None:
        """Free the launcher's descriptors and end its guard. Call this when no worker is left."""

    # --- for workers on other machines. Without a cluster there are none --------------------------------------------

    def no_room(self, elsewhere: Elsewhere) -> NoMachineError | None:
        """Return why no other machine has room for a worker; None if one has."""
        return NoMachineError("models.yaml has no section cluster")

    def adopt(self, settings: "SupervisorConfig") -> None:
        """Apply the settings of models.yaml, when the supervisor starts and whenever it has read the file again."""
        return

    @property
    def worker_keys(self) -> Collection[str]:
        """The public keys, as Z85 text, with which workers may connect over TCP now."""
        return ()

    def open_ports(
        self, context: "Context", clients: "ClientPort", slot_of: "Callable[[bytes], WorkerSlot | None]"
    ) -> "Sequence[WorkerPort]":
        """Open the ports for these workers. Arguments as for ``WorkerPort``. Raises ListenError."""
        return ()

    def watch(self, reactor: "Reactor") -> None:
        """Name a handler for each other descriptor of the launcher, and begin what it does again and again."""
        return

    @property
    def troubles(self) -> Mapping[str, str | None]:
        """What is wrong with these workers as a whole, see ``supervisor.status``: name → words, None for nothing."""
        return {}

    def describe(self) -> dict[str, Any] | None:
        """Return what ``status`` shows of these workers as a whole; None without a cluster."""
        return None
