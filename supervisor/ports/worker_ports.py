"""The ports for workers together: the one over ipc, and those that the launcher adds."""

from collections.abc import Iterator, Sequence

from supervisor.ports.worker_port import WorkerPort


class WorkerPorts:
    """The ports for workers. The first one is for workers of this machine, and takes most frames."""

    def __init__(self, ports: Sequence[WorkerPort]) -> None:
        self._ports = ports

    def __iter__(self) -> Iterator[WorkerPort]:
        return iter(self._ports)

    @property
    def relays(self) -> bool:
        """Whether compiled code passes on the frames that take the fast path."""
        return self._ports[0].relays

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Send a frame to a worker, which is connected to one of the ports. Return what ``WorkerPort.send`` returns."""
        return any(port.send(routing_id, frame) for port in self._ports)

    def close(self) -> None:
        for port in self._ports:
            port.close()
