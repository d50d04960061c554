"""Start workers on other machines, through an agent for each, and watch them over the network.

A worker there counts as ended when its agent says so, when what has started the agent says that the agent is gone, or
when nothing was heard of the agent for a lease. In the last case the machine or the network may be gone, or the agent
may have been stopped. The worker may still run. Its key is taken off the list, and frames that it sends are dropped, so
another worker can take its requests at once. The agent ends the worker at the end of a lease of its own.
"""

import logging
import os
import select
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from protocol import __version__
from protocol.errors import FrameError
from protocol.process.paths import open_private
from protocol.process.worker_spec import LinkKeys, Reading, WorkerSpec, read_word
from protocol.values import pack
from supervisor.cluster.copies import directories_of
from supervisor.cluster.machines import RayStarter, is_worth_another_lease
from supervisor.cluster.messages import (
    BEAT_S,
    FROM_AGENT,
    Admitted,
    Beat,
    Copying,
    Ended,
    Gpus,
    Heard,
    Leave,
    Log,
    Order,
    Refused,
    Signal,
    Stacks,
    ToAgent,
    Up,
)
from supervisor.cluster.port import RemotePort
from supervisor.cluster.store import ModelStore
from supervisor.config.reading import is_name
from supervisor.config.server import ClusterConfig, SupervisorConfig
from supervisor.config.spelling import Limit
from supervisor.logs.events import EventKind, noted
from supervisor.logs.files import about
from supervisor.placement.gpus import EVERY, Gpu
from supervisor.placement.memory import loaded_text
from supervisor.placement.policy import needs_text
from supervisor.placement.vram import described_gpu
from supervisor.ports.client_port import ClientPort
from supervisor.ports.sockets import Context, ListenAttempts, ListenError, try_bind
from supervisor.reactor import Reactor
from supervisor.requests.queue import WorkerSlot
from supervisor.workers.launcher import Elsewhere, Launched, Launcher, NoMachineError
from supervisor.workers.life import CheckClock

# One worker on another machine, as the supervisor knows it from its agent.


SILENT_S = 4 * BEAT_S
"""Seconds without a beat after which the last one says nothing about the worker any more."""


class RemoteWorker:
    """A worker on another machine, see ``launcher.Launched``.

    spec      the specification, with the keys of its present try
    elsewhere  what it wants of the machine
    tell      sends a message to the agent; kill  ends the worker, whatever its agent does

    node      the name of the machine
    pid       the process's pid there; 0 until the agent has started it
    waits     why no agent could be started yet; "" once one was
    progress  how far its directories are copied; None at other times
    lost      why the worker counts as ended although nobody has seen its end; "" otherwise
    refusals  machine → why the worker was not started there, by this start
    passed    GPUs of the machine on which there was no room
    held      the numbers of the agents that hold the leases of these GPUs, so that Ray leases others
    """

    local_pid = None

    def __init__(
        self,
        spec: WorkerSpec,
        elsewhere: Elsewhere,
        tell: Callable[["RemoteWorker", ToAgent], None],
        kill: Callable[["RemoteWorker"], None],
    ) -> None:
        self.spec, self.elsewhere = spec, elsewhere
        self._tell, self._kill = tell, kill
        self.refusals: dict[str, Refused] = {}
        self.passed: set[int] = set()
        self.held: list[int] = []
        self.waits = self.lost = ""
        self.code: int | None = None
        self.refused: tuple[str, str, bool] | None = None
        self.admitted: Admitted | None = None
        self.gpus: Gpus | None = None
        self.begin(0, b"", spec)

    def begin(self, number: int, agent_id: bytes, spec: WorkerSpec) -> None:
        """Forget what an earlier agent has told. The next one has this number, routing id and keys."""
        self.number, self.agent_id, self.spec = number, agent_id, spec
        self.node = self.elsewhere.node if is_name(self.elsewhere.node) else ""
        self.pid = 0
        self.progress: dict[str, Any] | None = None
        self.up = False
        self.silent_s = 0.0
        """Seconds counted since the last message of the agent."""
        self.beat = Beat(_first_word(spec.leases.start_s), None, "its machine has not answered yet")

    def started(self, pid: int) -> None:
        """Take note that the agent has started the process."""
        self.pid, self.progress = pid, None
        self.beat = Beat(_first_word(self.spec.leases.start_s), None, "it was just started")

    @property
    def is_gone(self) -> bool:
        return self.code is not None

    def signal(self, number: int) -> None:
        """Send a signal to the worker. One whose agent is not up yet can only be killed."""
        if self.is_gone:
            return
        if self.up:
            self._tell(self, Signal(number))
        elif number == signal.SIGKILL or self.waits:
            self._kill(self)

    def read_lease(self) -> Reading | None:
        # A worker does not hang because its network is cut. ``RemoteLauncher.check`` counts how long it is silent. One
        # that waits for a machine, or for its directories, or whose machine sees whether it fits, has not begun.
        if self.waits or self.silent_s > SILENT_S or (self.up and not self.pid):
            return None
        return read_word(self.beat.word)

    def dump_stacks(self) -> None:
        if not self.is_gone:
            self._tell(self, Stacks())

    def condition(self) -> str:
        return self.beat.condition

    def memory(self) -> int | None:
        return self.beat.memory

    @property
    def placed_on(self) -> str:
        """The machine and the GPUs, for people."""
        gpus = ", ".join(map(str, self.admitted.gpus)) if self.admitted else ""
        return f"{self.node}: {gpus}" if gpus else self.node or "another machine"

    @property
    def leases(self) -> dict[str, int]:
        return {self.node: self.elsewhere.gpus}

    def describe(self) -> dict[str, Any]:
        """Return its machine, or ``node`` of models.yaml while it waits for one, and the fields of
        ``WorkerMemory.describe`` and ``Vram.describe`` that the machine has told."""
        told = self.admitted
        held = {} if self.gpus is None else {str(index): size for index, size in self.gpus.held}
        sizes = [size for size in held.values() if size is not None]
        return {
            "node": self.elsewhere.node if self.waits else self.node,
            "placed": told.gpus or None if told else None,
            "cpus": told.cpus if told else None,
            "numa_nodes": told.nodes if told else None,
            "vram_estimate_bytes": sum(told.parts.values()) or None if told else None,
            "vram_estimate": told.parts or None if told else None,
            "vram_loaded_bytes": self.gpus.loaded if self.gpus else None,
            "vram_bytes": sum(sizes) if sizes else None,
            "vram_by_gpu": held or None,
        }


def _first_word(start_s: float) -> int:
    """Return the word of a lease that a worker has before it writes its own: phase STARTING is 0."""
    return min(round(start_s * 1000), 0xFFFFFFF)


CHECK_S = 0.1
"""Seconds between two calls of ``RemoteLauncher.check``."""
LOST = -signal.SIGKILL
"""The exit code of a worker whose end nobody has seen."""


class RemoteLauncher:
    """Starts workers on other machines, and reports their ends, as ``launcher.Launcher`` says.

    starter   starts the agents
    endpoint  the port for workers on other machines, as they reach it
    server    the public key of that port
    lease_s   seconds after which a machine counts as lost, for both ends
    send      sends a frame to a routing id of that port, and returns whether it could
    store     the model store; None if the directories of models are on the machines
    """

    def __init__(
        self,
        starter: RayStarter,
        endpoint: str,
        server: str,
        lease_s: float,
        send: Callable[[bytes, bytes], bool],
        log: logging.Logger,
        store: ModelStore | None = None,
    ) -> None:
        self._starter, self._endpoint, self.server = starter, endpoint, server
        self._lease_s, self._send, self._log, self._store = lease_s, send, log, store
        self._leaving: set[int] = set()
        """The numbers of agents whose workers have ended. The lease of each is given back when it has left."""
        self._workers: dict[bytes, RemoteWorker] = {}
        """The workers that were not reaped yet, by the routing id of their agent."""
        self._placed: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By model, the number of its workers in ``_workers`` on each machine. Those that wait for a machine are not
        counted."""
        self._clock = CheckClock(CHECK_S)
        self._number = 0
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.keys: set[str] = set()
        """The public keys of the workers that run, for ZAP."""
        self.limits: dict[str, Limit] = {}
        """The limits of ``Order.limits`` for the next workers."""
        self.versions: dict[str, str] = {}
        """By machine, the version of modelctl that an agent there has told."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a worker has ended."""
        return self._readable

    def no_room(self, elsewhere: Elsewhere) -> NoMachineError | None:
        """See ``launcher.Launcher``."""
        try:
            self._starter.choose(elsewhere.node, elsewhere.gpus)
        except NoMachineError as e:
            return NoMachineError(str(e)) if self._leaving else e
        return None

    def start(self, spec: WorkerSpec, elsewhere: Elsewhere) -> RemoteWorker:
        """Start a worker on a machine that will do.

        If no machine has room, the worker waits: ``check`` tries again.
        """
        worker = RemoteWorker(spec, elsewhere, self.tell, self._kill)
        self._begin(worker)
        self._try(worker)
        return worker

    def _begin(self, worker: RemoteWorker) -> None:
        """Give a worker the keys and the routing id for its next agent."""
        self._number += 1
        public, secret = zmq.curve_keypair()
        keys = LinkKeys(self.server, public.decode(), secret.decode())
        agent_id = b"agent-" + os.urandom(16)
        worker.begin(self._number, agent_id, replace(worker.spec, endpoint=self._endpoint, keys=keys))
        self._workers[agent_id] = worker

    def _try(self, worker: RemoteWorker, name: str = "") -> None:
        """Start an agent for a worker. ``name`` is the machine, if it was chosen before."""
        spec, wanted, gpus = worker.spec, name or worker.elsewhere.node, worker.elsewhere.gpus
        assert spec.keys is not None
        try:
            node = self._starter.choose(wanted, gpus, self._placed.get(spec.engine.model), worker.refusals)
            store = self._store.access if self._store else None
            passed = tuple(sorted(worker.passed))
            order = Order(
                spec, worker.elsewhere, worker.agent_id, self._lease_s, __version__, self.limits, store, passed
            )
            self._starter.start(worker.number, node, gpus, spec.engine.engine, order.packed())
        except NoMachineError as e:
            if str(e) != worker.waits:
                self._log.info("%s: waits: %s", spec.name, e, extra=about(spec.name))
            worker.waits = str(e)
            return
        if worker.waits:
            self._log.info("%s: starts on %s", spec.name, node.name, extra=about(spec.name))
        worker.node, worker.waits = node.name, ""
        self._placed[spec.engine.model][node.name] += 1
        self.keys.add(spec.keys.public)
        if self._store is not None:
            self._store.admit(spec.keys.public, directories_of(spec.engine))

    def takes(self, routing_id: bytes, frame: bytes | None) -> bool:
        """Handle a frame if an agent has sent it. Return whether an agent has. None stands for a message of several
        parts, which no agent sends."""
        worker = self._workers.get(routing_id)
        if worker is not None and frame is not None and not worker.is_gone:
            self._take(worker, frame)
        return worker is not None

    def _take(self, worker: RemoteWorker, frame: bytes) -> None:
        try:
            message = FROM_AGENT.read(frame)
        except FrameError as e:
            self._give_up(worker, f"its agent sent what cannot be: {e}")
            return
        worker.silent_s, worker.up = 0.0, True
        if isinstance(message, Beat):
            worker.beat, worker.progress = message, None
            self.tell(worker, Heard())
        elif isinstance(message, Copying):
            worker.progress = {
                "phase": message.phase, "done": message.done, "total": message.total, "unit": "bytes",
                "per_s": message.rate,
            }  # fmt: skip
            self.tell(worker, Heard())
        elif isinstance(message, Log):
            _append(worker.spec.log_path, message.text)
        elif isinstance(message, Admitted):
            worker.admitted = message
            self._release(worker)
            self._say_admitted(worker, message)
        elif isinstance(message, Gpus):
            known, worker.gpus = worker.gpus, message
            if message.loaded is not None and (known is None or known.loaded is None):
                self._say_loaded(worker, message.loaded)
        elif isinstance(message, Up):
            self.versions[worker.node] = message.build
            worker.started(message.pid)
        elif isinstance(message, Refused):
            self.versions[worker.node] = message.build
            self._refused(worker, message)
        else:
            assert isinstance(message, Ended)
            self.tell(worker, Leave())
            self._end(worker, message.code)

    def _refused(self, worker: RemoteWorker, refused: Refused) -> None:
        """Try the worker on other GPUs of its machine if they have room, else on another machine if any one will do, or
        end it with the reason."""
        line = f"{worker.node}: {refused.why}"
        _append(worker.spec.log_path, line.encode() + b"\n")
        if is_worth_another_lease(worker.passed, refused):
            try:
                self._starter.choose(worker.node, worker.elsewhere.gpus)
            except NoMachineError as e:
                refused = replace(refused, why=f"{refused.why}; Ray cannot lease other GPUs there: {e}")
            else:
                worker.passed |= set(refused.gpus)
                worker.held.append(worker.number)
                self._try_again(worker, f"{line}; tries another GPU there", worker.node)
                return
        self._release(worker)
        worker.refusals[worker.node] = refused
        if not is_name(worker.elsewhere.node):
            with suppress(NoMachineError):
                node = self._starter.choose(worker.elsewhere.node, worker.elsewhere.gpus, without=worker.refusals)
                self._starter.end(worker.number)
                self._try_again(worker, f"{line}; tries {node.name}")
                return
        reasons = {one.reason for one in worker.refusals.values()}
        worker.refused = (
            reasons.pop() if len(reasons) == 1 else "no room" if "no room" in reasons else refused.reason,
            "; ".join(f"{name}: {one.why}" for name, one in worker.refusals.items()),
            any(one.retry for one in worker.refusals.values()),
        )
        if refused.elsewhere:
            self._starter.end(worker.number)  # it holds its lease, and would not leave by itself
        self._end(worker, LOST)

    def _try_again(self, worker: RemoteWorker, why: str, name: str = "") -> None:
        """Start another agent for a worker. What the one before it still sends is dropped. ``name`` as for ``_try``."""
        self._log.info("%s: %s", worker.spec.name, why, extra=noted(EventKind.PLACEMENT, worker.spec.name))
        self._leaving.add(worker.number)
        self._remove(worker)
        self._revoke(worker)
        self._begin(worker)
        self._try(worker, name)

    def _remove(self, worker: RemoteWorker) -> None:
        """Take a worker off the lists of workers."""
        del self._workers[worker.agent_id]
        if worker.waits:
            return
        model = worker.spec.engine.model
        on = self._placed[model]
        on[worker.node] -= 1
        if not on[worker.node]:
            del on[worker.node]
        if not on:
            del self._placed[model]

    def _release(self, worker: RemoteWorker) -> None:
        """Give back the leases of GPUs on which there was no room."""
        for number in worker.held:
            self._starter.end(number)
        worker.held.clear()
        worker.passed.clear()

    def _revoke(self, worker: RemoteWorker) -> None:
        """Take a worker's key off the lists."""
        assert worker.spec.keys is not None
        self.keys.discard(worker.spec.keys.public)
        if self._store is not None:
            self._store.revoke(worker.spec.keys.public)

    def _say_admitted(self, worker: RemoteWorker, told: Admitted) -> None:
        if not worker.elsewhere.gpus:
            return
        if told.parts:
            what = needs_text(told.parts)
        else:
            what = f"needs not known ({told.unknown}; `vram` in models.yaml can say it), so nothing is refused"
        where = f"GPU {', '.join(map(str, told.gpus))} of {worker.node}" if told.gpus else worker.node
        name = worker.spec.name
        self._log.info("%s: placed on %s: %s", name, where, what, extra=noted(EventKind.PLACEMENT, name))

    def _say_loaded(self, worker: RemoteWorker, measured: int) -> None:
        if worker.admitted is not None and (expected := sum(worker.admitted.parts.values())):
            name = worker.spec.name
            self._log.info("%s: %s", name, loaded_text(measured, expected), extra=about(name))

    def agents_ended(self) -> None:
        """Take note of agents that are gone. Frames that they sent before have been handled."""
        by_number = {worker.number: worker for worker in self._workers.values()}
        for end in self._starter.ended():
            self._leaving.discard(end.number)
            worker = by_number.get(end.number)
            if worker is not None and not worker.is_gone:
                self._give_up(worker, end.why or "its agent has ended", has_left=True)

    def check(self, now: float) -> None:
        """Give up workers whose machines are silent, and start those that wait for a machine. Call this every CHECK_S,
        after the frames have been read."""
        passed = self._clock.passed(now)
        for worker in self._workers.values():
            if worker.waits and not worker.is_gone:
                self._try(worker)
            if worker.is_gone or not worker.up:  # until it is up, the worker's first lease counts
                continue
            worker.silent_s += passed
            if worker.silent_s > self._lease_s:
                self._give_up(worker, f"nothing was heard of {worker.node} for {self._lease_s:g} s")

    def heard(self) -> dict[str, float]:
        """Return, by machine, the seconds since one of its agents was heard. Machines without an agent are left out."""
        silent: dict[str, float] = {}
        for worker in self._workers.values():
            if worker.up and not worker.is_gone:
                silent[worker.node] = min(worker.silent_s, silent.get(worker.node, worker.silent_s))
        return silent

    def _give_up(self, worker: RemoteWorker, why: str, *, has_left: bool = False) -> None:
        self._starter.end(worker.number)
        self._end(worker, LOST, why, has_left=has_left)

    def _end(self, worker: RemoteWorker, code: int, lost: str = "", *, has_left: bool = False) -> None:
        worker.code, worker.lost = code, lost
        self._release(worker)
        if not has_left and not worker.waits:
            self._leaving.add(worker.number)
        self._revoke(worker)
        os.eventfd_write(self._readable, 1)

    def _kill(self, worker: RemoteWorker) -> None:
        self._give_up(worker, worker.waits or f"its agent on {worker.node} did not come up")

    def tell(self, worker: RemoteWorker, message: ToAgent) -> None:
        """Send a message to the agent of a worker. An agent that cannot be reached is silent, and given up for that."""
        self._send(worker.agent_id, pack(message))

    def devices_on(self, node: str) -> list[Any] | None:
        """Return the GPUs of a machine (``Gpus.gpus``) from the worker there that was heard last. None if no worker
        there has told."""
        told = [
            (worker.silent_s, worker.gpus.gpus)
            for worker in self._workers.values()
            if worker.node == node and worker.gpus is not None and worker.silent_s <= SILENT_S
        ]
        return min(told, key=lambda one: one[0])[1] if told else None

    def ended(self) -> list[Launched]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._readable)
        return [worker for worker in self._workers.values() if worker.is_gone]

    def reap(self, process: Launched) -> int:
        assert isinstance(process, RemoteWorker)
        self._remove(process)
        return LOST if process.code is None else process.code

    def close(self) -> None:
        self._starter.close()
        if self._store is not None:
            self._store.close()
        os.close(self._readable)


def _append(path: str, text: bytes) -> None:
    """Add text to a worker's log on this machine. On a full disk it is lost."""
    with suppress(OSError):
        descriptor = open_private(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)


# The launcher of a supervisor with a cluster, for workers of this machine and, through agents, of other machines.


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
