"""What comes from workers: their frames over each port, and the ends of their processes."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from supervisor.fleet.fleet import Fleet
from supervisor.ports.worker_port import WorkerPort
from supervisor.ports.worker_ports import WorkerPorts
from supervisor.reactor import Reactor
from supervisor.worker_frames import WorkerFrames
from supervisor.workers.launcher import Launcher

if TYPE_CHECKING:  # without a cluster nothing of it is imported
    from supervisor.cluster.cluster import Cluster

LAST_FRAMES_TURNS = 16
"""How many times the frames of workers are drained before the requests of a dead worker are handled."""


class WorkerTraffic:
    """Passes the frames and the ends of workers to the parts that handle them.

    launcher  the launcher of all workers
    run       carries out what the handlers have decided
    cluster   the parts for workers on other machines; None without a cluster
    """

    def __init__(
        self,
        launcher: Launcher,
        ports: WorkerPorts,
        frames: WorkerFrames,
        fleet: Fleet,
        run: Callable[[], None],
        cluster: "Cluster | None",
    ) -> None:
        self._launcher, self._ports, self._frames = launcher, ports, frames
        self._fleet, self._run, self._cluster = fleet, run, cluster

    def watch(self, reactor: Reactor) -> None:
        """Name a handler for each socket and descriptor that the loop waits for, and begin what is done repeatedly."""
        reactor.watch(self._ports.local.socket, self._on_workers, busy=True)
        reactor.watch(self._launcher.descriptor, self._on_ends)
        if self._cluster is not None and (remote := self._ports.remote) is not None:
            cluster = self._cluster
            reactor.watch(remote.socket, partial(self._on_machines, cluster, remote), busy=True)
            reactor.watch(remote.monitor, remote.read_monitor)
            reactor.watch(cluster.launcher.starter_descriptor, cluster.launcher.agents_ended)
            reactor.every(cluster.check_s, lambda: cluster.check(time.monotonic()))

    def _on_workers(self) -> bool:
        """Handle the frames that workers have sent. Return whether there may be more."""
        port = self._ports.local
        for routing_id, frame in port.receive():
            self._frames.handle(routing_id, frame)
            self._run()  # before compiled code passes on what this worker has sent next
        return port.more

    def _on_machines(self, cluster: "Cluster", port: WorkerPort) -> bool:
        """Handle the frames of workers on other machines and of their agents. Return whether there may be more."""
        for routing_id, frame in port.receive():
            if cluster.launcher.knows(routing_id):
                cluster.launcher.on_frame(routing_id, frame)
            else:
                self._frames.handle(routing_id, frame)
                self._run()
        return port.more

    def _on_ends(self) -> None:
        """Handle the ends of workers, after the last frames that they sent.

        A complete answer may lie in the socket. It must not turn into ``worker_died`` because the pidfd was read first.
        """
        if ended := self._launcher.ended():
            for _ in range(LAST_FRAMES_TURNS):
                more = self._on_workers()
                if self._cluster is not None and self._ports.remote is not None:
                    more |= self._on_machines(self._cluster, self._ports.remote)
                if not more:
                    break
        for process in ended:
            self._frames.note_end(self._fleet.registry.worker_of(process))
            self._fleet.on_exit(process)
            self._run()
