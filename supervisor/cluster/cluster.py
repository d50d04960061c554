"""The parts of a supervisor that are there for workers on other machines only."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import zmq

from supervisor.attempts import ListenAttempts, ListenError
from supervisor.cluster.launchers import Launchers
from supervisor.cluster.ray_starter import RayStarter
from supervisor.cluster.remote_launcher import CHECK_S, RemoteLauncher
from supervisor.cluster.store_keeper import ModelStore
from supervisor.config_model import ModelConfig
from supervisor.config_schema import ClusterConfig
from supervisor.event_history import EventKind, noted
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import limits_elsewhere
from supervisor.placement.sizes import Limit
from supervisor.placement.vram import described_gpu
from supervisor.ports.client_port import ClientPort
from supervisor.ports.remote_port import RemotePort, remote_port
from supervisor.ports.sockets import Context, try_bind
from supervisor.requests.worker_slots import WorkerSlot
from supervisor.workers.launcher import Launcher


class Cluster:
    """The connection to a Ray cluster, the port for its machines, and the launcher of workers there.

    Raises OSError if the helper that talks to Ray cannot be started.
    """

    check_s = CHECK_S

    def __init__(self, config: ClusterConfig, log: logging.Logger) -> None:
        assert config.advertise is not None  # config_rules.cluster_problems
        self._config, self._log = config, log
        self._public, self._secret = zmq.curve_keypair()
        self._port: RemotePort | None = None
        self._attempts = ListenAttempts(config.advertise, "cluster.advertise")
        self._bound = False
        self._starter = RayStarter(config.ray, log)
        shared = config.model_store
        self._store = ModelStore(shared.listen, shared.directory, shared.size, log) if shared.listen else None
        self.launcher = RemoteLauncher(
            self._starter, config.advertise, self._public.decode(), config.lease, self._send, log, self._store
        )

    def beside(self, local: Launcher) -> Launchers:
        """Return one launcher for the workers of this machine and of others."""
        return Launchers(local, self.launcher)

    def open(self, context: Context, clients: ClientPort, slot_of: Callable[[bytes], WorkerSlot | None]) -> RemotePort:
        """Make the port, bind it if that is possible now, and return it. Arguments as for ``WorkerPort``.

        Raises ListenError if it can never be bound.
        """
        address, lease = self._attempts.address, self._config.lease
        self._port = remote_port(context, address, self._secret, clients, slot_of, lease)
        self._listen(time.monotonic())
        if not self._attempts.may_pass:
            self._port.close()
            raise ListenError(self._attempts.problem)
        return self._port

    def _listen(self, now: float) -> None:
        assert self._port is not None
        if not self._bound:
            self._bound = try_bind(self._port.socket, self._attempts, now, self._log, noted(EventKind.CLUSTER))
            self._starter.unreachable = self._attempts.problem or ""

    def _send(self, routing_id: bytes, frame: bytes) -> bool:
        return self._port is not None and self._port.send(routing_id, frame)

    def keep_spares(self, models: Collection[ModelConfig], *, starting: bool) -> None:
        """Have spare agents kept for those of these models that may run on other machines. Call this every second or
        so. ``starting``: whether a worker starts, loads or wakes."""
        self._starter.keep_spares({(model.node, model.engine) for model in models if model.node}, starting=starting)

    def check(self, now: float) -> None:
        """Give up silent machines, start the helper again that has ended, and bind the port if it is not bound yet.

        Call this every ``check_s`` seconds.
        """
        self._listen(now)
        self.launcher.check(now)
        self._starter.check(now)
        if self._store is not None:
            self._store.check(now)
        for name in self.launcher.versions.keys() - self._starter.machines.names():
            del self.launcher.versions[name]

    @property
    def trouble(self) -> str | None:
        """The reason why the cluster cannot be used; None if it can, or has not answered yet."""
        store = f"model store: {self._store.trouble}" if self._store is not None and self._store.trouble else None
        return self._attempts.problem or self._starter.trouble or store

    def describe(self, limits: Mapping[str, Limit] | Limit | None) -> dict[str, Any]:
        """Return the cluster as ``status`` shows it. ``limits`` as for ``policy.rooms``."""
        described = self._starter.machines.describe(self.launcher.heard(), self.launcher.versions, time.monotonic())
        for node in described["nodes"]:
            devices = self.launcher.devices_on(node["name"]) or node["devices"]
            node["devices"] = devices and [described_gpu(Gpu(*told), limits_elsewhere(limits)) for told in devices]
        return {
            "ray": self._config.ray,
            "advertise": self._config.advertise,
            "model_store": self._config.model_store.listen,
            "trouble": self.trouble,
            **described,
        }
