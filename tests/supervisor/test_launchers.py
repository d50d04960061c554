"""One contract for all launchers: a worker starts, is watched, is ended, and its end is told once."""

import dataclasses
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from protocol import __version__
from protocol.codec import decode, encode, pack_body, unpack_body
from protocol.messages import WORKER_TO_SUPERVISOR, Hello, Ready, Shutdown
from protocol.process.sockets import monitor_event
from protocol.process.worker_spec import EXIT_ASKED, EXIT_CONFIG, EngineSpec, Leases, WorkerPhase, WorkerSpec, pack_spec
from supervisor.cluster.agent import MOST_LOGGED, keep_small
from supervisor.cluster.launcher import CHECK_S, RemoteLauncher, RemoteWorker
from supervisor.cluster.port import RemotePort
from supervisor.cluster.store import ModelStore
from supervisor.ports.worker_port import WorkerPort, open_local_port
from supervisor.ports.zap import ZapHandler
from supervisor.reactor import Timers
from supervisor.workers.launcher import Elsewhere, Launched
from supervisor.workers.local import LocalLauncher
from supervisor.workers.orphans import Orphans
from tests.plain_agents import PlainStarter
from tests.serving import is_alive, wait_until

WITHIN = 60.0
LEASE_S = 2.0
LOG = logging.getLogger("test")
ESCAPES = "tests.orphan_engines:EscapesBySession"


class Host:
    """What the supervisor's loop does for its workers, around one launcher."""

    def __init__(self, kind: str, directory: Path, store: ModelStore | None = None, port_lease_s: float = 60.0) -> None:
        self.directory = directory
        self.context = zmq.Context()
        public, secret = zmq.curve_keypair()
        self.local = LocalLauncher(Timers(), Orphans(directory, LOG), LOG, directory / "spare.log")
        self.remote: RemoteLauncher | None = None
        self.starter = PlainStarter()
        self.store = store
        self.launcher: Any = self.local
        self.endpoint = f"ipc://{directory}/back"
        self.told: dict[bytes, list[Any]] = {}
        self.paused = False
        self._check_at = 0.0
        clients: Any = SimpleNamespace(socket=self.context.socket(zmq.ROUTER), connections_by_channel={})
        self._clients = clients.socket
        keys: set[str] = set()
        self.zap = ZapHandler(self.context, os.getuid(), is_worker=self.local.is_worker, worker_keys=keys)
        self.port: WorkerPort
        if kind == "local":
            self.port, _ = open_local_port(self.context, self.endpoint, clients, lambda routing_id: None)
            return
        endpoint = "tcp://127.0.0.1:*"
        self.port = RemotePort(
            self.context, endpoint, secret, clients, lambda routing_id: None,
            lambda *sent: self.remote is not None and self.remote.takes(*sent), port_lease_s,
        )  # fmt: skip
        self.port.socket.bind(endpoint)
        self.endpoint = self.port.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.remote = RemoteLauncher(self.starter, self.endpoint, public.decode(), LEASE_S, self.port.send, LOG, store)
        self.remote.keys = keys
        self.launcher = self.remote

    def spec(self, engine: str = "DeterministicEngine", name: str = "m", **changes: Any) -> WorkerSpec:
        return WorkerSpec(
            **{
                "engine": EngineSpec(name, f"tests.deterministic_engine:{engine}", str(self.directory)),
                "generation": 1,
                "visible_devices": "",
                "endpoint": self.endpoint,
                "routing_id": os.urandom(8),
                "log_path": str(self.directory / f"{name}.log"),
                "supervisor_pid": os.getpid(),
                "leases": Leases(start_s=30, load_s=30, idle_s=1, step_s=1),
                **changes,
            }
        )

    def turn(self) -> None:
        """Do one turn of the loop."""
        poller = zmq.Poller()
        for source in (self.zap.socket, self.port.socket, self.launcher.descriptor, self.starter.descriptor):
            poller.register(source, zmq.POLLIN)
        poller.poll(50)
        self.zap.handle()
        for routing_id, frame in self.port.receive():
            if frame is not None:
                self.told.setdefault(routing_id, []).append(decode(frame, WORKER_TO_SUPERVISOR))
        if self.remote is not None:
            self.remote.agents_ended()
            if time.monotonic() > self._check_at:
                self._check_at = time.monotonic() + CHECK_S
                self.remote.check(time.monotonic())
                if self.store is not None:
                    self.store.check(time.monotonic())

    def until(self, reached: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WITHIN
        while not (value := reached()):
            assert time.monotonic() < deadline, f"not within {WITHIN:g} s: {what}"
            self.turn()
        return value

    def start(self, spec: WorkerSpec, gpus: int = 0) -> Launched:
        """Start a worker, on the machine ``far`` if it is not to be on this one, with so many GPUs there."""
        return self.launcher.start(spec, Elsewhere("far", gpus) if self.remote else None)

    def ready(self, spec: WorkerSpec, gpus: int = 0) -> Launched:
        """Start a worker, and wait until it is ready."""
        worker = self.start(spec, gpus)
        self.until(lambda: any(isinstance(m, Ready) for m in self.told.get(spec.routing_id, ())), "READY")
        assert isinstance(self.told[spec.routing_id][0], Hello)
        return worker

    def end(self, worker: Launched) -> int:
        """Wait for the end of a worker, and return its exit code. See that it ends once."""
        ended = self.until(self.launcher.ended, "an end")
        assert ended == [worker]
        assert worker.is_gone
        code = self.launcher.reap(worker)
        for _ in range(5):
            self.turn()
            assert self.launcher.ended() == []
        worker.signal(signal.SIGKILL)  # does nothing
        worker.dump_stacks()
        return code

    def close(self) -> None:
        self.launcher.close()
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # else it lives as long as the tests
        if self.remote is not None:
            self.local.close()
        self.port.close()
        for socket in (self._clients, self.zap.socket):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture(params=["local", "agent"])
def host(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[Host]:
    host = Host(request.param, runtime_dir)
    try:
        yield host
    finally:
        host.close()


def gone(host: Host, *processes: psutil.Process) -> None:
    host.until(lambda: not any(map(is_alive, processes)), "the end of the processes")


def family(worker: Launched) -> list[psutil.Process]:
    process = psutil.Process(worker.pid)
    return [process, *process.children(recursive=True)]


def log_of(spec: WorkerSpec) -> str:
    path = Path(spec.log_path)
    return path.read_text() if path.exists() else ""


def test_a_worker_starts_shows_its_lease_and_leaves_when_asked(host: Host) -> None:
    spec = host.spec()
    worker = host.ready(spec)
    reading = worker.read_lease()
    assert reading is not None
    host.until(lambda: worker.read_lease() != reading, "progress")
    host.until(lambda: (r := worker.read_lease()) is not None and r.phase is WorkerPhase.IDLE, "idle")
    host.until(worker.memory, "its memory")
    assert worker.memory() > 10 << 20  # type: ignore[operator]
    assert not worker.is_gone
    assert host.port.send(spec.routing_id, encode(Shutdown()))
    assert host.end(worker) == EXIT_ASKED


def test_the_exit_code_and_the_log_come_back(host: Host) -> None:
    spec = host.spec("CannotLoad")
    (host.directory / "config.json").write_text("{}")  # a model whose directory is empty may be there later
    worker = host.start(spec)
    assert host.end(worker) == EXIT_CONFIG
    assert "made of cheese" in log_of(spec)


def test_the_devices_are_pinned(host: Host) -> None:
    spec = host.spec("ListsModules", visible_devices="GPU-11111111,GPU-22222222")
    worker = host.ready(spec)
    log = host.until(lambda: (text := log_of(spec)).count("modules ") and text, "the log")
    assert "devices 'GPU-11111111,GPU-22222222'" in log
    modules = log.partition("modules ")[2].split()
    assert not [name for name in modules if name.startswith(("supervisor.cluster", "supervisor.ports", "ray"))]
    worker.signal(signal.SIGKILL)
    assert host.end(worker) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_ends_it_and_its_children(host: Host, number: signal.Signals) -> None:
    worker = host.ready(host.spec("ForksChild"))
    processes = family(worker)
    assert len(processes) == 2
    worker.signal(number)
    worker.signal(number)
    assert host.end(worker) == -number
    gone(host, *processes)


def test_a_worker_that_is_stopped_is_seen_and_killed(host: Host) -> None:
    worker = host.ready(host.spec())
    os.kill(worker.pid, signal.SIGSTOP)
    host.until(lambda: "stopped" in worker.condition(), "its condition")
    host.turn()
    reading = worker.read_lease()
    for _ in range(20):
        host.turn()
    assert worker.read_lease() == reading, "the lease of a stopped worker goes on"
    worker.signal(signal.SIGKILL)
    assert host.end(worker) == -signal.SIGKILL


def test_it_writes_its_stacks(host: Host) -> None:
    spec = host.spec()
    worker = host.ready(spec)
    worker.dump_stacks()
    host.until(lambda: "most recent call first" in log_of(spec), "the stacks")
    worker.signal(signal.SIGKILL)
    assert host.end(worker) == -signal.SIGKILL


def test_several_at_once_each_end_once(host: Host) -> None:
    specs = [host.spec(name=f"m{number}") for number in range(3)]
    workers = [host.start(spec) for spec in specs]
    host.until(lambda: all(any(isinstance(m, Ready) for m in host.told.get(s.routing_id, ())) for s in specs), "READY")
    for worker in workers:
        worker.signal(signal.SIGKILL)
    left = {id(worker): worker for worker in workers}

    def reaped() -> bool:
        for worker in host.launcher.ended():
            assert left.pop(id(worker)) is worker, "it ended twice"
            assert host.launcher.reap(worker) == -signal.SIGKILL
        return not left

    host.until(reaped, "three ends")
    assert host.remote is None or not host.remote._placed, "they still count when a machine is chosen"


def test_one_that_is_killed_before_it_is_up(host: Host) -> None:
    worker = host.start(host.spec())
    worker.signal(signal.SIGKILL)
    assert host.end(worker) == -signal.SIGKILL


# --- only over the network


@pytest.fixture
def far(runtime_dir: Path) -> Iterator[Host]:
    host = Host("agent", runtime_dir)
    try:
        yield host
    finally:
        host.close()


def agent_of(host: Host) -> psutil.Process:
    (agent,) = host.starter.agents.values()
    return psutil.Process(agent.pid)


def directories() -> list[Path]:
    return [path for path in Path("/tmp").glob("modelctl-agent-*") if path.owner() == Path("/proc/self").owner()]


def lost(host: Host, worker: Launched) -> str:
    """Wait until a worker is given up, and return why."""
    assert host.end(worker) == -signal.SIGKILL
    assert isinstance(worker, RemoteWorker)
    return worker.lost


def test_the_worker_has_the_gpus_that_were_leased(far: Host) -> None:
    far.starter.devices = "5,2"
    spec = far.spec("ListsModules")
    worker = far.ready(spec, gpus=2)
    far.until(lambda: "devices '5,2'" in log_of(spec), "the log")
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL


def test_agents_tell_their_version_and_when_they_were_heard(far: Host) -> None:
    worker = far.ready(far.spec())
    assert far.remote is not None
    assert far.remote.versions == {"far": __version__}
    assert 0.0 <= far.remote.heard()["far"] < LEASE_S
    agent_of(far).suspend()
    far.until(lambda: far.remote is not None and far.remote.heard().get("far", 0.0) > LEASE_S / 2, "silence")
    lost(far, worker)
    assert far.remote.heard() == {}


def test_an_agent_that_is_killed_takes_its_worker_along(far: Host) -> None:
    worker = far.ready(far.spec("ForksChild"))
    processes = [*family(worker), agent_of(far)]
    agent_of(far).kill()
    assert lost(far, worker) == "its agent left with -9"
    gone(far, *processes)


@pytest.mark.parametrize("whose", ["worker", "agent"])
def test_what_has_left_the_workers_session_ends_with_it(far: Host, whose: str) -> None:
    """The agent is a subreaper, as the supervisor is. If the agent is killed, its guard finds the processes."""
    spec = far.spec()
    spec = dataclasses.replace(spec, engine=dataclasses.replace(spec.engine, engine=ESCAPES))
    worker = far.ready(spec)
    pids = far.until(lambda: len(found := re.findall(r" pid (\d+)\.", log_of(spec))) == 3 and found, "the pids")
    processes = [psutil.Process(int(pid)) for pid in pids]
    assert all(map(is_alive, processes))
    (psutil.Process(worker.pid) if whose == "worker" else agent_of(far)).kill()
    assert far.end(worker) == -signal.SIGKILL
    gone(far, *processes)


def test_a_log_that_grows_faster_than_it_is_sent_fills_no_disk(far: Host) -> None:
    spec = far.spec("Floods")
    worker = far.ready(spec)
    far.until(lambda: "bytes are left out here: the log grew too fast" in log_of(spec), "the note of what is missing")
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL


def test_a_log_that_was_sent_is_emptied(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with open(log, "ab") as worker:
        worker.write(bytes(MOST_LOGGED))
        worker.flush()
        assert keep_small(log, MOST_LOGGED) == MOST_LOGGED
        worker.write(b"1")
        worker.flush()
        assert keep_small(log, MOST_LOGGED) == MOST_LOGGED
        assert keep_small(log, MOST_LOGGED + 1) == 0
        worker.write(b"2")  # the worker goes on in the same file
    assert log.read_bytes() == b"2"


def test_an_agent_that_is_stopped_is_lost(far: Host) -> None:
    """A machine that is silent without a goodbye looks like that."""
    worker = far.ready(far.spec())
    processes = [*family(worker), agent_of(far)]
    processes[-1].suspend()
    assert lost(far, worker) == f"nothing was heard of far for {LEASE_S:g} s"
    gone(far, *processes)  # the starter can reach this agent


def test_a_worker_without_supervisor_ends_within_its_lease(far: Host) -> None:
    worker = far.ready(far.spec("ForksChild"))
    processes = [*family(worker), agent_of(far)]
    wait_until(lambda: not any(map(is_alive, processes)), WITHIN)  # nobody turns the loop, so the agent hears nothing
    assert lost(far, worker).startswith("its agent left with 1")
    assert not [path for path in directories() if str(processes[-1].pid) in path.name]


def test_a_worker_of_a_former_generation_is_fenced(far: Host) -> None:
    spec = far.spec()
    worker = far.ready(spec)
    assert isinstance(worker, RemoteWorker)
    assert far.remote is not None
    agent_of(far).suspend()
    lost(far, worker)
    assert worker.spec.keys is not None
    assert worker.spec.keys.public not in far.remote.keys
    assert not far.remote.takes(worker.agent_id, None)


def test_a_wrong_key_is_refused(far: Host) -> None:
    far.ready(far.spec())
    public, secret = zmq.curve_keypair()
    stranger = far.context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert far.remote is not None
    stranger.curve_serverkey = far.remote.server.encode()
    stranger.curve_publickey, stranger.curve_secretkey = public, secret
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(far.endpoint)
    far.until(lambda: monitor.poll(0), "an answer")
    assert monitor_event(monitor)[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert far.zap.denied == 1
    stranger.disable_monitor()
    monitor.close(linger=0)
    stranger.close()


def test_another_version_is_refused_by_name(far: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose specification of a worker has a field that this version does not know."""
    monkeypatch.setattr("supervisor.cluster.launcher.__version__", "9.9.9")
    packing = "supervisor.cluster.messages.pack_spec"
    monkeypatch.setattr(packing, lambda spec: pack_body({**unpack_body(pack_spec(spec)), "new": 1}))
    spec = far.spec()
    worker = far.start(spec)
    assert lost(far, worker) == ""
    assert worker.refused is not None
    reason, why, retry = worker.refused
    assert why.startswith("far: modelctl ")
    assert why.endswith("and the supervisor is 9.9.9: install the same version")
    assert (reason, retry) == ("config", False)
    assert why in log_of(spec)


def test_a_machine_that_does_not_exist(far: Host) -> None:
    far.starter.lost_nodes.add("far")
    spec = far.spec()
    worker = far.start(spec)
    assert worker.waits == "no machine far"
    assert worker.read_lease() is None, "it would count as hung"
    for _ in range(20):
        far.turn()
    assert not worker.is_gone
    far.starter.lost_nodes.clear()
    far.until(lambda: any(isinstance(m, Ready) for m in far.told.get(spec.routing_id, ())), "READY")
    assert worker.waits == ""
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL


def test_one_that_waits_for_a_machine_can_be_stopped(far: Host) -> None:
    far.starter.lost_nodes.add("far")
    worker = far.start(far.spec())
    worker.signal(signal.SIGTERM)
    assert lost(far, worker) == "no machine far"
