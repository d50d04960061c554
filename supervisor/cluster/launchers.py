"""One launcher made of two: workers of this machine are started here, and those of other machines through agents."""

import select
from collections.abc import Mapping

from protocol.process.worker_spec import WorkerSpec
from supervisor.cluster.remote_launcher import RemoteLauncher
from supervisor.cluster.remote_worker import RemoteWorker
from supervisor.workers.launcher import Launched, Launcher
from supervisor.workers.machines import NoMachine


class Launchers:
    """Both launchers behind the interface of one, see ``launcher.Launcher``. ``spec.node`` says which one starts a
    worker."""

    def __init__(self, local: Launcher, remote: RemoteLauncher) -> None:
        self._local, self._remote = local, remote
        self._epoll = select.epoll()
        for launcher in (local, remote):
            self._epoll.register(launcher.descriptor, select.EPOLLIN)

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def no_machine(self, node: str, gpus: int) -> NoMachine | None:
        return self._remote.no_machine(node, gpus)

    def start(self, spec: WorkerSpec) -> Launched:
        return self._remote.start(spec) if spec.node else self._local.start(spec)

    def ended(self) -> list[Launched]:
        return self._local.ended() + self._remote.ended()

    def reap(self, process: Launched) -> int:
        return (self._remote if isinstance(process, RemoteWorker) else self._local).reap(process)

    def sweep(self, holds: Mapping[int, str]) -> None:
        self._local.sweep(holds)

    def close(self) -> None:
        self._epoll.close()
        self._remote.close()
        self._local.close()
