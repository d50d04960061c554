"""Agents see whether workers fit on the GPUs of their machines, which a file describes, and report what these hold."""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import pack_body
from protocol.errors import FrameError
from protocol.process.worker_spec import EngineSpec
from protocol.values import pack
from supervisor.cluster.agent import ROOM_WAIT_S
from supervisor.cluster.launcher import RemoteWorker, limits_elsewhere
from supervisor.cluster.messages import FROM_AGENT, Admitted, Gpus, Refused
from supervisor.config.spelling import Limit
from supervisor.workers.launcher import Elsewhere
from tests.hanging_files import hanging_file
from tests.hidden_packages import Hidden
from tests.nvml_box import GIB, STRANGER, Box
from tests.serving import ROOT
from tests.supervisor.test_launchers import Host, agent_of, gone, log_of
from tools.demo_models import directory

DEMO = directory("letters")


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setenv("MODELCTL_TEST_BOX", str(tmp_path / "box.json"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_in_nvml"))
    return Box(tmp_path / "box.json", (24, 48))


@pytest.fixture
def far(box: Box, runtime_dir: Path) -> Iterator[Host]:
    host = Host("agent", runtime_dir)
    host.starter.devices = "1"
    host.starter.path = [str(ROOT / "tests" / "stand_in_nvml")]
    try:
        yield host
    finally:
        host.close()


def start(far: Host, size: int | None = 30 * GIB, **changes: Any) -> RemoteWorker:
    """Order a worker that needs so many bytes of one GPU."""
    vram = None if size is None else (size,)
    wanted = {name: changes.pop(name) for name in ("node", "gpus", "vram") if name in changes}
    elsewhere = Elsewhere(**{"node": "far", "gpus": 1, "vram": vram, **wanted})
    worker = far.launcher.start(replace(far.spec(), **changes), elsewhere)
    assert isinstance(worker, RemoteWorker)
    return worker


def refused(far: Host, worker: RemoteWorker) -> tuple[str, str, bool]:
    far.end(worker)
    assert worker.refused is not None, log_of(worker.spec)
    assert worker.lost == ""
    return worker.refused


def kill(far: Host, worker: RemoteWorker) -> None:
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL


def test_a_worker_that_fits_starts_and_its_memory_is_reported(far: Host, box: Box) -> None:
    worker = start(far)
    far.until(lambda: worker.pid, "the process")
    assert worker.describe()["placed"] == [1]
    assert worker.placed_on == "far: 1"
    assert worker.describe()["vram_estimate"] == {"declared": 30 * GIB}
    box.holds(1, worker.pid, 31 * GIB)
    far.until(lambda: worker.describe()["vram_bytes"] == 31 * GIB, "its memory")
    assert worker.describe()["vram_by_gpu"] == {"1": 31 * GIB}
    assert worker.gpus is not None
    assert worker.gpus.gpus[1] == [1, "GPU-1a2b3c4d-0000", 48 * GIB, 31 * GIB, 17 * GIB]
    assert worker.gpus.gpus[0][2:] == [24 * GIB, 0, 24 * GIB]
    assert far.remote is not None
    assert far.remote.devices_on("far") == worker.gpus.gpus
    kill(far, worker)
    assert far.remote.devices_on("far") is None


def test_the_memory_after_the_load_is_reported(far: Host, box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """What the worker holds while it loads, and what it holds later, does not count."""
    caplog.set_level(logging.INFO)
    engine = EngineSpec("m", "tests.deterministic_engine:SlowLoad", str(far.directory), options={"load_s": 5})
    worker = start(far, engine=engine, name="m:1")
    far.until(lambda: worker.pid, "the process")
    box.holds(1, worker.pid, 33 * GIB)
    far.until(lambda: worker.describe()["vram_bytes"], "its memory")
    assert worker.describe()["vram_loaded_bytes"] is None
    loaded = far.until(lambda: worker.describe()["vram_loaded_bytes"], "its memory after the load")
    assert loaded == 33 * GIB
    assert "m:1: holds 33.0 GiB, estimated were 30.0 (+10.0 %)" in caplog.text
    box.holds(1, worker.pid, 40 * GIB)
    far.until(lambda: worker.describe()["vram_bytes"] == 40 * GIB, "its memory")
    assert worker.describe()["vram_loaded_bytes"] == 33 * GIB
    kill(far, worker)


def test_the_numa_nodes_next_to_its_gpus_are_reported(far: Host, box: Box) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    box.becomes((24, 48), cpus=[allowed, allowed[:1]], nodes=[[0], [1]])
    worker = start(far)
    far.until(lambda: worker.pid, "the process")
    shown = (str(allowed[0]), "1") if len(allowed) > 1 else (None, None)
    assert (worker.describe()["cpus"], worker.describe()["numa_nodes"]) == shown
    kill(far, worker)


def test_one_that_does_not_fit_is_refused_with_the_arithmetic(far: Host, box: Box) -> None:
    box.holds(1, STRANGER, 20 * GIB)
    worker = start(far)
    assert refused(far, worker) == (
        "no room",
        "far: needs 30.0 GiB (vram in models.yaml), GPU 1 has 28.0 of 48.0 free: other processes 20.0",
        False,
    )
    assert "GPU 1 has 28.0 of 48.0 free" in log_of(worker.spec)


@pytest.mark.parametrize("limits", [Limit(share=0.5), {"GPU-1A2B3C4D": Limit(bytes=24 * GIB), "1": Limit(bytes=1)}])
def test_vram_limit_holds_there(far: Host, limits: Any) -> None:
    assert far.remote is not None
    far.remote.limits = limits_elsewhere(limits)
    reason, why, retry = refused(far, start(far))
    assert (reason, retry) == ("no room", False)
    assert "needs 30.0 GiB (vram in models.yaml), GPU 1 has 24.0 left of its vram_limit, 24.0" in why


def test_memory_that_comes_back_is_waited_for(far: Host, box: Box) -> None:
    box.holds(1, STRANGER, 20 * GIB)
    worker = start(far)
    far.until(lambda: worker.up, "its agent")
    assert worker.pid == 0
    assert worker.read_lease() is None, "a worker that has not begun cannot hang"
    box.gives_back(STRANGER)
    far.until(lambda: worker.pid, "the process")
    assert worker.read_lease() is not None
    kill(far, worker)


def test_a_worker_can_be_stopped_while_its_machine_waits_for_room(far: Host, box: Box) -> None:
    box.holds(1, STRANGER, 20 * GIB)
    worker = start(far)
    far.until(lambda: worker.up, "its agent")
    agent = agent_of(far)
    worker.signal(signal.SIGTERM)
    assert far.end(worker) == -signal.SIGTERM
    gone(far, agent)


def test_an_engine_that_is_not_installed_there_is_named(far: Host, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    Hidden(tmp_path / "without", "exllamav2")
    far.starter.path.append(str(tmp_path / "without"))
    reason, why, retry = refused(far, start(far, engine=EngineSpec("m", "exllamav2", str(DEMO), device="cuda")))
    assert (reason, retry) == ("config", False)
    assert why.startswith("far: cannot load: engine exllamav2 needs the package exllamav2: run ")


def test_the_estimate_is_made_there(far: Host, box: Box) -> None:
    box.holds(0, STRANGER, 24 * GIB)
    far.starter.devices = "0,1"
    options = {"cache_size": 1 << 20, "tensor_parallel": False, "gpu_split": [20.0, 20.0]}
    engine = EngineSpec("m", "exllamav2", str(DEMO), device="cuda", options=options)
    reason, why, retry = refused(far, start(far, None, engine=engine, gpus=2))
    assert (reason, retry) == ("no room", False)
    assert why.startswith("far: needs ")
    assert "weights 0.0" in why
    assert "GPU 0 has 0.00 of 24.0 free: other processes 24.0; GPU 1 has 48.0 of 48.0 free" in why


def test_a_model_that_cannot_be_read_is_refused(far: Host, tmp_path: Path) -> None:
    engine = EngineSpec("m", "exllamav2", str(tmp_path / "none"), device="cuda")
    reason, why, retry = refused(far, start(far, None, engine=engine))
    assert (reason, retry) == ("away", True)
    assert why == f"far: cannot load: model_dir {tmp_path / 'none'} is no directory"
    (tmp_path / "notes.txt").write_text("no model")
    engine = EngineSpec("m", "exllamav2", str(tmp_path), device="cuda")
    assert refused(far, start(far, None, engine=engine))[0::2] == ("config", False)


def test_the_agent_is_heard_while_a_directory_is_read(far: Host, tmp_path: Path) -> None:
    """Its file system hangs for longer than the lease."""
    shutil.copytree(DEMO, tmp_path / "model")
    with hanging_file(tmp_path / "model" / "model.safetensors"):
        worker = start(far, None, engine=EngineSpec("m", "exllamav2", str(tmp_path / "model"), device="cuda"))
        far.until(lambda: worker.up, "its agent")
        for _ in range(60):
            far.turn()
        assert not worker.is_gone
        worker.signal(signal.SIGKILL)
        assert far.end(worker) == -signal.SIGKILL


def test_without_nvml_nothing_is_refused(far: Host, box: Box) -> None:
    box.fails("the driver is gone", at_init=True)
    worker = start(far, 100 * GIB)
    far.until(lambda: worker.pid, "the process")
    assert worker.describe()["placed"] is None
    assert worker.describe()["vram_estimate_bytes"] == 100 * GIB
    kill(far, worker)


def test_a_lease_without_devices_is_refused(far: Host) -> None:
    far.starter.devices = ""
    assert refused(far, start(far))[1] == "far: Ray leased GPUs and set no CUDA_VISIBLE_DEVICES: let it do so"


def test_a_gpu_that_does_not_exist_is_refused(far: Host) -> None:
    far.starter.devices = "5"
    assert refused(far, start(far)) == ("config", "far: GPU 5 does not exist: there is 0, 1", False)


def test_any_machine_means_that_the_next_one_is_tried(far: Host, box: Box) -> None:
    box.holds(1, STRANGER, 20 * GIB)
    far.starter.nodes = ["one", "two"]
    worker = start(far, node="others")
    assert far.remote is not None
    first = worker.spec.keys
    far.until(lambda: worker.node == "two", "the next machine")
    assert far.remote.keys == {worker.spec.keys.public}  # type: ignore[union-attr]
    assert first != worker.spec.keys
    box.gives_back(STRANGER)
    far.until(lambda: worker.pid, "the process")
    kill(far, worker)
    assert far.remote.keys == set()


def test_all_machines_may_refuse(far: Host) -> None:
    far.starter.nodes = ["one", "two"]
    reason, why, retry = refused(far, start(far, 60 * GIB, node="others"))
    assert (reason, retry) == ("no room", False)
    short = "needs 60.0 GiB (vram in models.yaml), GPU 1 has 48.0 of 48.0 free"
    assert why == f"one: {short}; two: {short}"


def leased(far: Host) -> list[int]:
    return [gpu for _, gpus in far.starter.leases.values() for gpu in gpus]


def test_another_gpu_of_the_machine_is_leased_when_the_first_ones_are_full(far: Host, box: Box) -> None:
    """They are full of what Ray does not know of. The refused leases are held until the worker has its GPU."""
    box.becomes((24, 24, 48, 48))
    for gpu in (0, 1):
        box.holds(gpu, STRANGER, 20 * GIB)
    far.starter.gpus = 4
    begun = time.monotonic()
    worker = start(far)
    far.until(lambda: worker.passed == {0}, "another lease")
    assert leased(far) == [0, 1]
    far.until(lambda: worker.pid, "the process")
    assert time.monotonic() - begun < 2 * ROOM_WAIT_S, "only the first one waits for room"
    assert worker.describe()["placed"] == [2]
    far.until(lambda: leased(far) == [2], "the end of the other leases")
    assert far.remote is not None
    assert far.remote.keys == {worker.spec.keys.public}  # type: ignore[union-attr]
    kill(far, worker)
    far.until(lambda: not leased(far), "the end of the lease")


def test_several_other_gpus_are_leased_when_one_of_the_first_is_full(far: Host, box: Box) -> None:
    box.becomes((24, 24, 24, 24))
    box.holds(1, STRANGER, 20 * GIB)
    far.starter.gpus = 4
    worker = start(far, gpus=2, vram=(20 * GIB, 20 * GIB))
    far.until(lambda: worker.pid, "the process")
    assert worker.describe()["placed"] == [2, 3]
    kill(far, worker)


def test_gpus_with_room_that_cannot_be_leased_are_named(far: Host, box: Box) -> None:
    box.holds(0, STRANGER, 20 * GIB)
    far.starter.gpus = 1
    assert refused(far, start(far))[1] == (
        "far: needs 30.0 GiB (vram in models.yaml), GPU 0 has 4.0 of 24.0 free: other processes 20.0; GPU 1 has room; "
        "Ray cannot lease other GPUs there: far has 0 of 1 GPUs free, and 1 are needed"
    )
    far.until(lambda: not leased(far), "the end of the lease")


def test_a_gpu_that_is_leased_again_ends_the_tries(far: Host, box: Box) -> None:
    box.holds(0, STRANGER, 20 * GIB)
    far.starter.devices = "0"
    assert refused(far, start(far))[1].endswith("GPU 0 has 4.0 of 24.0 free: other processes 20.0; GPU 1 has room")
    far.until(lambda: not far.starter.agents, "the end of the agents")


def test_a_worker_that_is_ended_while_it_holds_a_lease_gives_it_back(far: Host, box: Box) -> None:
    box.holds(0, STRANGER, 20 * GIB)
    far.starter.gpus = 2
    worker = start(far)
    far.until(lambda: worker.held, "another lease")
    worker.signal(signal.SIGKILL)
    assert far.end(worker) == -signal.SIGKILL
    far.until(lambda: not leased(far), "the end of the leases")


@pytest.mark.parametrize(
    "message",
    [
        Admitted([-1], {}, None, None, None),
        Admitted([True], {}, None, None, None),
        Admitted([0], {"weights": -1}, None, None, None),
        Admitted([0], {"a b": 1}, None, None, None),
        Gpus([[0, "GPU-1", 1, 1]], [], None),
        Gpus([[0, "GPU\n", 1, 1, 0]], [], None),
        Gpus([[0, 5, 1, 1, 0]], [], None),
        Gpus([], [[0, -5]], None),
        Gpus([], [[0]], None),
        Gpus([], [], -1),
        Gpus([], [], True),
        Refused("because", "why", False),
        Refused("no room", "why", False, [-1]),
        replace(Refused("config", "why", False), retry=1),  # type: ignore[arg-type]
    ],
)
def test_what_an_agent_cannot_have_said_is_refused(message: Any) -> None:
    with pytest.raises(FrameError):
        FROM_AGENT.read(pack(message))


def test_sound_messages_are_read() -> None:
    for message in (
        Admitted([0, 1], {"weights": 5}, None, "0-3", "0"),
        Admitted([], {}, "no estimate", None, None),
        Gpus([[0, "GPU-1", 5, 3, 2]], [[0, None], [1, 7]], 7),
        Refused("no room", "why", True),
        Refused("no room", "why", False, [0], True),
    ):
        assert FROM_AGENT.read(pack(message)) == message
    with pytest.raises(FrameError):
        FROM_AGENT.read(pack_body({"kind": "Refused", "why": json.dumps({})}))
