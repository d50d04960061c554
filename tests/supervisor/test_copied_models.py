"""An agent copies the model's directories before it starts the worker, and can be told to stop meanwhile."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.messages import Ready
from protocol.process.worker_spec import EngineSpec, WorkerSpec
from supervisor.cluster.copies import COPYING
from supervisor.cluster.launcher import RemoteWorker
from supervisor.cluster.messages import CHUNK
from supervisor.cluster.store import ModelStore
from tests.cut_cable import Cable
from tests.keyed import free_port
from tests.supervisor.test_launchers import LOG, Host, agent_of, gone, log_of, lost
from tests.supervisor.test_model_store import content, write_model


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable(free_port()) as cable:
        yield cable


@pytest.fixture
def far(runtime_dir: Path, cable: Cable) -> Iterator[Host]:
    """A host whose agents reach the model store over the cable."""
    store = ModelStore(f"tcp://127.0.0.1:{cable.target}", str(runtime_dir / "copies"), 1 << 40, LOG)
    store.access = replace(store.access, endpoint=f"tcp://127.0.0.1:{cable.port}")
    host = Host("agent", runtime_dir, store)
    try:
        yield host
    finally:
        host.close()


def spec(host: Host, model: Path, draft: Path | None = None, name: str = "m") -> WorkerSpec:
    options = {} if draft is None else {"draft_model": str(draft)}
    engine = EngineSpec(name, "tests.deterministic_engine:TellsDirectories", str(model), options=options)
    return replace(host.spec(name=name), engine=engine)


def test_a_worker_gets_copies_of_its_directories(far: Host, cable: Cable) -> None:
    model, draft = write_model(far.directory / "model"), write_model(far.directory / "draft", CHUNK, 2)
    cable.limit = 8 * CHUNK
    wanted = spec(far, model, draft)
    worker = far.start(wanted)
    far.until(lambda: (p := worker.progress) and p["phase"] == COPYING and p["done"] > 2 * CHUNK, "some of it")
    assert worker.progress is not None
    assert worker.progress["unit"] == "bytes"
    assert worker.progress["total"] > worker.progress["done"]
    assert worker.read_lease() is None, "it would count as hung"
    cable.limit = None
    far.until(lambda: any(isinstance(m, Ready) for m in far.told.get(wanted.routing_id, ())), "READY")
    assert worker.progress is None
    assert worker.read_lease() is not None
    log = far.until(lambda: (text := log_of(wanted)).count("directories ") and text, "the log")
    places = [Path(word) for word in log.partition("directories ")[2].split()[:2]]
    assert [place.is_relative_to(far.directory / "copies") for place in places] == [True, True]
    assert [content(place) for place in places] == [content(model), content(draft)]
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL
    assert far.store is not None
    assert not far.store._may, "the key still counts"


def test_a_copy_can_be_stopped_and_goes_on_later(far: Host, cable: Cable) -> None:
    model = write_model(far.directory / "model")
    cable.limit = 8 * CHUNK
    worker = far.start(spec(far, model))
    far.until(lambda: (p := worker.progress) and p["done"] > 2 * CHUNK, "some of it")
    agent = agent_of(far)
    worker.signal(signal.SIGTERM)
    assert far.end(worker) == -signal.SIGTERM
    assert isinstance(worker, RemoteWorker)
    assert worker.lost == "", "its end was seen"
    gone(far, agent)
    passed = cable.passed
    cable.limit = None
    again = far.ready(spec(far, model))
    assert cable.passed - passed < sum(map(len, content(model).values())) - CHUNK, "it was copied from its start"
    again.signal(signal.SIGKILL)
    assert far.end(again) == -signal.SIGKILL


def test_an_agent_that_is_killed_while_it_copies(far: Host, cable: Cable) -> None:
    model = write_model(far.directory / "model")
    cable.limit = 8 * CHUNK
    worker = far.start(spec(far, model))
    far.until(lambda: (p := worker.progress) and p["done"] > 2 * CHUNK, "some of it")
    agent_of(far).kill()
    assert lost(far, worker) == "its agent left with -9"
    cable.limit = None
    again = far.ready(spec(far, model))
    again.signal(signal.SIGKILL)
    assert far.end(again) == -signal.SIGKILL


def test_an_agent_whose_supervisor_is_gone_stops_copying(far: Host, cable: Cable) -> None:
    model = write_model(far.directory / "model")
    cable.limit = 8 * CHUNK
    worker = far.start(spec(far, model))
    far.until(lambda: (p := worker.progress) and p["done"] > 2 * CHUNK, "some of it")
    (agent,) = far.starter.agents.values()
    assert agent.wait(60) == 1  # nobody turns the loop, so the agent hears nothing
    assert lost(far, worker) == "its agent left with 1"


def test_a_directory_that_cannot_be_copied_is_a_reason(far: Host) -> None:
    model = write_model(far.directory / "model", CHUNK)
    (model / "link").symlink_to("/etc/passwd")
    wanted = spec(far, model)
    worker = far.start(wanted)
    assert lost(far, worker) == ""
    assert worker.refused is not None
    reason, why, retry = worker.refused
    assert (reason, retry) == ("spawn", True)
    assert "is a link, and the model store sends none" in why
    assert why in log_of(wanted)


def test_two_workers_of_a_model_at_once(far: Host, cable: Cable) -> None:
    model = write_model(far.directory / "model")
    specs = [spec(far, model, name=f"m{number}") for number in range(2)]
    workers = [far.start(each) for each in specs]
    far.until(lambda: all(any(isinstance(m, Ready) for m in far.told.get(s.routing_id, ())) for s in specs), "READY")
    assert cable.passed < 1.5 * sum(map(len, content(model).values()))
    for worker in workers:
        worker.signal(signal.SIGKILL)
    left = {id(worker) for worker in workers}

    def reaped() -> bool:
        for worker in far.launcher.ended():
            left.discard(id(worker))
            far.launcher.reap(worker)
        return not left

    far.until(reaped, "both ends")
