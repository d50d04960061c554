"""The launcher of a supervisor with a cluster, for workers of this machine and, through agents, of other machines."""

import logging
import select
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import zmq

from protocol.process.worker_spec import WorkerSpec
from supervisor.attempts import ListenAttempts, ListenError
from supervisor.cluster.port import RemotePort
from supervisor.cluster.ray_starter import RayStarter
from supervisor.cluster.remote_launcher import CHECK_S, RemoteLauncher
from supervisor.cluster.remote_worker import RemoteWorker
from supervisor.cluster.store_keeper import ModelStore
from supervisor.config_schema import ClusterConfig, SupervisorConfig
from supervisor.event_history import EventKind, noted
from supervisor.placement.gpus import EVERY, Gpu
from supervisor.placement.vram import described_gpu
from supervisor.ports.client_port import ClientPort
from supervisor.ports.sockets import Context, try_bind
from supervisor.reactor import Reactor
from supervisor.requests.worker_slots import WorkerSlot
from supervisor.spelling import Limit
from supervisor.workers.launcher import Launched, Launcher
from supervisor.workers.machines import Elsewhere, NoMachineError


class Cluster(Launcher):
    """The connection to a Ray cluster, the port for its machines, and one launcher for all workers, see
    ``launcher.Launcher``.

    local  the launcher of the workers of this machine

    Raises OSError if the helper that talks to Ray cannot be started.
    """

    def __init__(self, config: ClusterConfig, local: Launcher, log: logging.Logger) -> None:
        assert config.advertise is not None  # config_rules.cluster_problems
        self._config, self._local, self._log = config, local, log
        self._public, self._secret = zmq.curve_keypair()
        self._port: RemotePort | None = None
        self._attempts = ListenAttempts(config.advertise, "cluster.advertise")
        self._bound = False
        self._starter = RayStarter(config.ray, log)
        shared = config.model_store
        self._store = ModelStore(shared.listen, shared.directory, shared.size, log) if shared.listen else None
        self._remote = RemoteLauncher(
            self._starter, config.advertise, self._public.decode(), config.lease, self._send, log, self._store
        )
        self._epoll = select.epoll()
        for launcher in (local, self._remote):
            self._epoll.register(launcher.descriptor, select.EPOLLIN)

    # --- the workers ----------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def no_room(self, elsewhere: Elsewhere) -> NoMachineError | None:
        return self._remote.no_room(elsewhere)

    def start(self, spec: WorkerSpec, elsewhere: Elsewhere | None = None) -> Launched:
        return self._local.start(spec) if elsewhere is None else self._remote.start(spec, elsewhere)

    def ended(self) -> list[Launched]:
        return self._local.ended() + self._remote.ended()

    def reap(self, process: Launched) -> int:
        return (self._remote if isinstance(process, RemoteWorker) else self._local).reap(process)

    def keep_spares(
        self, wanted: Collection[tuple[str, Elsewhere | None]], now: float, *, starting: bool, free: Callable[[], int]
    ) -> None:
        self._local.keep_spares(wanted, now, starting=starting, free=free)
        self._starter.keep_spares({(there.node, engine) for engine, there in wanted if there}, starting=starting)

    def sweep(self, holds: Mapping[int, str]) -> None:
        # agents of a former supervisor have ended their workers, or do so at the end of their lease
        self._local.sweep(holds)

    def close(self) -> None:
        self._epoll.close()
        self._remote.close()
        self._local.close()

    def adopt(self, settings: SupervisorConfig) -> None:
        self._remote.limits = limits_elsewhere(settings.vram_limit)

    # --- the connection -------------------------------------------------------------------------------------------

    @property
    def worker_keys(self) -> Collection[str]:
        return self._remote.keys

    def open_ports(
        self, context: Context, clients: ClientPort, slot_of: Callable[[bytes], WorkerSlot | None]
    ) -> list[RemotePort]:
        address, lease = self._attempts.address, self._config.lease
        self._port = RemotePort(context, address, self._secret, clients, slot_of, self._remote.takes, lease)
        self._listen(time.monotonic())
        if not self._attempts.may_pass:
            self._port.close()
            raise ListenError(self._attempts.problem)
        return [self._port]

    def _listen(self, now: float) -> None:
        assert self._port is not None
        if not self._bound:
            self._bound = try_bind(self._port.socket, self._attempts, now, self._log, noted(EventKind.CLUSTER))
            self._starter.unreachable = self._attempts.problem or ""

    def _send(self, routing_id: bytes, frame: bytes) -> bool:
        return self._port is not None and self._port.send(routing_id, frame)

    def watch(self, reactor: Reactor) -> None:
        assert self._port is not None
        reactor.watch(self._port.monitor, self._port.read_monitor)
        reactor.watch(self._starter.descriptor, self._remote.agents_ended)
        reactor.every(CHECK_S, self._check)

    def _check(self) -> None:
        """Give up silent machines, start the helper again that has ended, and bind the port if it is not bound yet."""
        now = time.monotonic()
        self._listen(now)
        self._remote.check(now)
        self._starter.check(now)
        if self._store is not None:
            self._store.check(now)
        for name in self._remote.versions.keys() - self._starter.machines.names():
            del self._remote.versions[name]

    # --- what status shows ----------------------------------------------------------------------------------------

    @property
    def _trouble(self) -> str | None:
        """The reason why the cluster cannot be used; None if it can, or has not answered yet."""
        store = f"model store: {self._store.trouble}" if self._store is not None and self._store.trouble else None
        return self._attempts.problem or self._starter.trouble or store

    @property
    def troubles(self) -> dict[str, str | None]:
        return {"cluster": self._trouble}

    def describe(self) -> dict[str, Any]:
        described = self._starter.machines.describe(self._remote.heard(), self._remote.versions, time.monotonic())
        for node in described["nodes"]:
            devices = self._remote.devices_on(node["name"]) or node["devices"]
            node["devices"] = devices and [described_gpu(Gpu(*told), self._remote.limits) for told in devices]
        return {
            "ray": self._config.ray,
            "advertise": self._config.advertise,
            "model_store": self._config.model_store.listen,
            "trouble": self._trouble,
            **described,
        }


def limits_elsewhere(limits: Mapping[str, Limit] | Limit | None) -> dict[str, Limit]:
    """Return the limits that hold on other machines: one for every GPU, and those of GPUs named by their UUID. An index
    means a GPU of the supervisor's own machine. ``limits`` as for ``policy.rooms``, and so is the result."""
    if isinstance(limits, Limit):
        return {EVERY: limits}
    return {gpu: limit for gpu, limit in (limits or {}).items() if gpu.startswith(EVERY)}
