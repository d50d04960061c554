"""The ports for workers together: the one of this machine, and in a cluster the one for other machines."""

from typing import TYPE_CHECKING

from supervisor.ports.worker_port import WorkerPort

if TYPE_CHECKING:  # without a cluster nothing of it is imported
    from supervisor.ports.remote_port import RemotePort


class WorkerPorts:
    """The ports for workers. ``remote`` is None without a cluster."""

    def __init__(self, local: WorkerPort, remote: "RemotePort | None" = None) -> None:
        self.local = local
        self.remote = remote

    @property
    def relays(self) -> bool:
        """Whether compiled code passes on the frames that take the fast path."""
        return self.local.relays

    def send(self, routing_id: bytes, frame: bytes, *, remote: bool) -> bool:
        """Send a frame to a worker of this machine or of another one. Return what ``WorkerPort.send`` returns."""
        port = self.remote if remote else self.local
        return port is not None and port.send(routing_id, frame)

    def close(self) -> None:
        self.local.close()
        if self.remote is not None:
            self.remote.close()
