"""Connections to machines that are lost without a goodbye, and workers whose network is cut, end by themselves."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import zmq

from protocol.process.sockets import MARGIN_S, monitor_event
from protocol.process.worker_spec import EngineSpec
from supervisor.cluster.agent import PREFIX
from supervisor.ports.connections import borrow
from supervisor.ports.listeners import _SO_ATTACH_FILTER, _drop_everything
from tests.serving import is_alive, wait_until
from tests.supervisor.test_launchers import Host

WITHIN = 60.0
PORT_LEASE_S = 1.0


@pytest.fixture
def far(runtime_dir: Path) -> Iterator[Host]:
    host = Host("agent", runtime_dir)
    try:
        yield host
    finally:
        host.close()


def cut(descriptor: int) -> None:
    """Have the kernel drop all packets that come for a connection of this process, and ask no questions over it."""

    def change(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _drop_everything())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)

    borrow(descriptor, change)


def accepted(endpoint: str) -> dict[int, int]:
    """Return the descriptors of the connections to a port of this process, by the port number of the other end."""
    port = int(endpoint.rpartition(":")[2])
    return {
        each.raddr.port: each.fd
        for each in psutil.Process().net_connections("tcp")
        if each.laddr.port == port and each.raddr and each.fd >= 0
    }


@pytest.mark.parametrize("sends", [False, True])
def test_the_port_ends_a_connection_to_a_machine_that_is_lost(runtime_dir: Path, sends: bool) -> None:
    far = Host("agent", runtime_dir, port_lease_s=PORT_LEASE_S)
    peer = far.context.socket(zmq.DEALER)
    monitor = peer.get_monitor_socket(zmq.EVENT_CONNECTED)
    try:
        public, secret = zmq.curve_keypair()
        assert far.remote is not None
        far.remote.keys.add(public.decode())
        peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = far.remote.server.encode(), public, secret
        peer.setsockopt(zmq.ROUTING_ID, b"peer")
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(far.endpoint)
        far.until(lambda: far.port.send(b"peer", b""), "its connection")
        _, descriptor = monitor_event(monitor)
        assert len(accepted(far.endpoint)) == 1
        cut(descriptor)
        begun = time.monotonic()

        def is_gone() -> bool:
            return not (far.port.send(b"peer", b"?") if sends else accepted(far.endpoint))

        far.until(is_gone, "the end of the connection")
        assert time.monotonic() - begun > PORT_LEASE_S + MARGIN_S - 2.5, "a short cut must change nothing"
        assert not accepted(far.endpoint)
    finally:
        peer.disable_monitor()
        monitor.close(linger=0)
        peer.close()
        far.close()


@pytest.mark.parametrize("engine", ["deterministic_engine:DeterministicEngine", "hanging_engines:HangsInLoad"])
def test_a_worker_ends_although_its_agent_is_stopped_while_the_network_is_cut(far: Host, engine: str) -> None:
    """Also a worker whose engine hangs."""
    spec = replace(far.spec(), engine=EngineSpec("m", f"tests.{engine}", str(far.directory)))
    hangs = engine.startswith("hanging")
    worker = far.start(spec) if hangs else far.ready(spec)
    if hangs:
        far.until((far.directory / "hung-m-load").exists, "its engine hangs")
    far.until(lambda: worker.pid, "its pid")
    process, (agent,) = psutil.Process(worker.pid), far.starter.agents.values()
    os.kill(agent.pid, signal.SIGSTOP)
    own = {each.laddr.port for each in process.net_connections("tcp")}
    (connection,) = (fd for number, fd in accepted(far.endpoint).items() if number in own)
    cut(connection)
    assert is_alive(process)
    wait_until(lambda: not is_alive(process), WITHIN)  # nobody turns the loop: the supervisor ends nothing
    (log,) = Path("/tmp").glob(f"{PREFIX}{agent.pid}-*/worker.log")
    assert "the connection to the supervisor was lost" in log.read_text()
