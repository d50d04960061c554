"""What comes from workers: their frames over each port, and the ends of their processes."""

from collections.abc import Callable
from functools import partial

from supervisor.fleet.fleet import Fleet
from supervisor.ports.worker_port import WorkerPort
from supervisor.ports.worker_ports import WorkerPorts
from supervisor.reactor import Reactor
from supervisor.worker_frames import WorkerFrames
from supervisor.workers.launcher import Launcher

LAST_FRAMES_TURNS = 16
"""How many times the frames of workers are drained before the requests of a dead worker are handled."""


class WorkerTraffic:
    """Passes the frames and the ends of workers to the parts that handle them.

    run  carries out what the handlers have decided
    """

    def __init__(
        self, launcher: Launcher, ports: WorkerPorts, frames: WorkerFrames, fleet: Fleet, run: Callable[[], None]
    ) -> None:
        self._launcher, self._ports, self._frames = launcher, ports, frames
        self._fleet, self._run = fleet, run

    def watch(self, reactor: Reactor) -> None:
        """Name a handler for each socket and descriptor that the loop waits for, and begin what is done repeatedly."""
        for port in self._ports:
            reactor.watch(port.socket, partial(self._on_workers, port), busy=True)
        reactor.watch(self._launcher.descriptor, self._on_ends)
        self._launcher.watch(reactor)

    def _on_workers(self, port: WorkerPort) -> bool:
        """Handle the frames that workers have sent to a port. Return whether there may be more."""
        for routing_id, frame in port.receive():
            self._frames.handle(routing_id, frame)
            self._run()  # before compiled code passes on what this worker has sent next
        return port.more

    def _on_ends(self) -> None:
        """Handle the ends of workers, after the last frames that they sent.

        A complete answer may lie in the socket. It must not turn into ``worker_died`` because the pidfd was read first.
        """
        if ended := self._launcher.ended():
            for _ in range(LAST_FRAMES_TURNS):
                more = [self._on_workers(port) for port in self._ports]
                if not any(more):
                    break
        for process in ended:
            self._frames.note_end(self._fleet.registry.worker_of(process))
            self._fleet.on_exit(process)
            self._run()
