"""What is counted of the agents that were started on a cluster. The helper process is a stand-in, without Ray."""

import cProfile
import logging
import os
import pstats
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from protocol.process.worker_spec import EngineSpec, WorkerSpec
from supervisor.cluster import machines as ray_starter
from supervisor.cluster.launcher import RemoteLauncher
from supervisor.cluster.machines import RayStarter
from supervisor.workers.launcher import Elsewhere, NoMachineError
from tests.plain_agents import ROOT

DRIVER = """
import sys
from protocol.process.helper_link import become_helper, serve
from protocol.values import pack
from supervisor.cluster.messages import *
machines, gpus = map(int, sys.argv[1].split("x"))
link = become_helper("driver of Ray")
nodes = [Node(str(n), f"machine-{n}", "127.0.0.1", gpus, gpus, 0.0, False) for n in range(machines)]
link.send(pack(Nodes(nodes)))
def take(record):
    if isinstance(message := TO_DRIVER.read(record), EndAgent):
        link.send(pack(AgentLeft(message.number, "")))
serve(link, take)
"""
WITHIN = 30.0
LOG = logging.getLogger("test")


@contextmanager
def started(machines: int, gpus: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayStarter]:
    """Return a starter whose cluster has these machines, each with this number of GPUs."""
    monkeypatch.setattr(
        ray_starter, "_COMMAND", (sys.executable, "-c", f"import sys\nsys.path[:0] = [{ROOT!r}]{DRIVER}")
    )
    starter = RayStarter(f"{machines}x{gpus}", LOG)
    try:
        until(starter, lambda: starter.nodes)
        yield starter
    finally:
        starter.close()


def until(starter: RayStarter, reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN
    while not reached():
        assert time.monotonic() < deadline
        select.select([starter.descriptor], [], [], 1.0)
        starter.ended()


def test_gpus_are_leased_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(2, 2, monkeypatch) as starter:
        for number in range(4):
            starter.start(number, starter.choose("others", 1), 1, "exllamav2", b"")
        with pytest.raises(NoMachineError):
            starter.choose("others", 1)
        starter.end(1)
        until(starter, lambda: starter._leased["machine-1"] == 1)
        assert starter.choose("others", 1).name == "machine-1"
        starter.end(3)
        until(starter, lambda: "machine-1" not in starter._held)
        assert starter.choose("others", 2).name == "machine-1"
        assert starter._helper.process is not None
        starter._helper.process.kill()
        until(starter, lambda: starter.trouble)
        assert [starter._started, starter._held, starter._leased] == [{}, {}, {}]


def calls_of(workers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many function calls the starts of these workers take."""
    with started(4, workers, monkeypatch) as starter:
        launcher = RemoteLauncher(starter, "tcp://127.0.0.1:5", zmq.curve_keypair()[0].decode(), 10.0, sent, LOG)
        profile = cProfile.Profile()
        for number in range(workers):
            spec = WorkerSpec(EngineSpec("m", "x:y", "/"), 1, "", "", b"%d" % number, os.devnull, 1)
            worker = profile.runcall(launcher.start, spec, Elsewhere("others", 1))
            assert not worker.waits
            assert worker.node == f"machine-{number % 4}", "workers are spread"
        os.close(launcher.descriptor)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def sent(routing_id: bytes, frame: bytes) -> bool:
    return True


def test_a_start_among_many_costs_no_more_than_one_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = calls_of(50, monkeypatch), calls_of(400, monkeypatch)
    assert many / 400 < 1.2 * few / 50
