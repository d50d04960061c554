"""While the driver hangs no model is placed for a while, and then only models that are pinned to a GPU."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.process.worker_spec import WorkerSpec
from supervisor.config.file import Config, ModelSpec
from supervisor.config.models import ModelConfig
from supervisor.config.server import SupervisorConfig
from supervisor.fleet import starts
from supervisor.fleet.replicas import Replica, ReplicaRegistry
from supervisor.fleet.sleepers import Sleepers
from supervisor.fleet.starts import Starts
from supervisor.placement import gpus
from supervisor.placement import vram as vram_module
from supervisor.placement.estimates import watched_pins
from supervisor.placement.vram import Vram
from supervisor.reactor import Timers
from supervisor.requests.request import EffectQueue
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.exits import ExitReport
from tests.nvml_box import Box
from tests.serving import ROOT, wait_until


class Process:
    """A process that was never started, since these tests check decisions only."""

    pid = 4_000_000
    placed_on = ""


class Placing:
    """A ``Starts`` with a loop of its own and a process that asks the NVML stand-in. It launches nothing."""

    def __init__(self, directory: Path) -> None:
        self._timers = Timers()
        log = logging.getLogger("placing")
        self.vram = Vram(self._timers, log)
        self._scheduler = Scheduler()
        self._registry = ReplicaRegistry(
            Config(directory / "models.yaml", {}, SupervisorConfig()), self._scheduler, self.vram, directory
        )
        effects = EffectQueue()
        sleepers = Sleepers(self.unload, lambda replica, transition: None, self._registry, self.vram, log)
        self._starts = Starts(
            self.not_started, self._registry, self._scheduler, self.vram, self, sleepers, effects, self._timers, "",
            None, range(4), log,
        )  # type: ignore[arg-type]  # fmt: skip
        self.placed: list[tuple[str, str]] = []
        self.refused: dict[str, ExitReport] = {}

    def watch(self, name: str, gpu: Any) -> ModelSpec:
        spec = ModelSpec(name, ModelConfig(model_dir=".", engine="x:Y", gpu=gpu, vram=(10 << 30,)), Path("/models"))
        self.vram.watch(name, watched_pins(spec))
        return spec

    def admit(self, spec: ModelSpec, *, last: bool = True) -> None:
        self._scheduler.add_model(spec.name)
        replica = self._registry.add(spec.name, spec)
        if not last:
            replica.life.history.failed(time.monotonic(), 0.0)
        self._starts.begin(replica)

    def cancel(self, name: str) -> bool:
        return self._starts.cancel(self._registry.replicas[name])

    def start(self, spec: WorkerSpec, elsewhere: None) -> Process:
        """Record a start instead of launching a process."""
        self.placed.append((spec.engine.model, spec.visible_devices))
        return Process()

    def unload(self, replica: Replica, cause: str) -> None:
        """Fail, since no model may be unloaded."""
        raise AssertionError(f"{replica.name} is unloaded: {cause}")

    def not_started(self, replica: Replica, report: ExitReport) -> None:
        assert replica.name not in self.refused, "a start ends once"
        self.refused[replica.name] = report

    def turn(self) -> None:
        for timer in self._timers.due(time.monotonic()):
            if not timer.cancelled:
                timer.callback()


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setenv("MODELCTL_TEST_BOX", str(tmp_path / "box.json"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_in_nvml"))
    return Box(tmp_path / "box.json")


@pytest.fixture
def placing(box: Box, tmp_path: Path) -> Iterator[Placing]:
    """Make a placement whose driver hangs after one reading."""
    placing = Placing(tmp_path)
    placing.watch("first", 0)
    wait_until(placing.vram.reading)
    box.driver(hangs=True)
    yield placing
    placing.vram.close()


def test_they_wait_and_the_pinned_go_first(placing: Placing, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "QUIET_S", 0.1)
    auto, pinned = placing.watch("auto", "auto"), placing.watch("pinned", 0)
    placing.admit(auto)
    placing.admit(pinned)
    for _ in range(20):
        placing.turn()
    assert (placing.placed, placing.refused) == ([], {})
    assert placing.vram.late
    box.becomes([12, 11])  # the box that the driver then reports
    box.driver(hangs=None)
    wait_until(lambda: placing.turn() or len(placing.placed) == 2)
    assert placing.placed == [("pinned", "0"), ("auto", "GPU-1a2b3c4d-0000")]
    assert placing.vram.trouble is None


def test_after_a_while_pins_are_obeyed_and_auto_is_refused(
    placing: Placing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(starts, "READING_WAIT_S", 0.05)
    for name, gpu, last in (("pinned", 1, True), ("ordered", "auto", True), ("crashed", "auto", False)):
        placing.admit(placing.watch(name, gpu), last=last)
    wait_until(lambda: placing.turn() or len(placing.refused) == 2)
    assert placing.placed == [("pinned", "1")]
    assert "pinned: waits for the GPUs to be read: NVML: the driver has not answered" in caplog.text
    assert caplog.text.count("without a look at the GPUs") == 1
    for name, retry in (("ordered", False), ("crashed", True)):
        report = placing.refused[name]
        assert (report.reason, report.retry) == ("unreadable", retry)
        assert "gpu: auto needs NVML, which does not answer here" in report.message


def test_whoever_asks_for_the_status_again_and_again_waits_for_no_reading(
    placing: Placing, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vram_module, "FRESH_S", 0.0)
    monkeypatch.setattr(vram_module, "AHEAD_S", 3600.0)
    for _ in range(50):  # a query that waited would give up and show no GPUs
        assert len(placing.vram.describe_gpus(None)) == 2
    assert placing.vram.trouble is None
    box.becomes([12, 11])
    box.driver(hangs=None)
    wait_until(lambda: placing.vram.describe_gpus(None)[0]["total_bytes"] == 12 << 30, what="a newer reading")
    monkeypatch.setattr(vram_module, "AHEAD_S", 0.0)
    box.driver(hangs=True)
    assert placing.vram.describe_gpus(None) == [], "the first question for long waits for its answer"


def test_a_start_that_waits_is_cancelled_once_and_places_nothing_later(placing: Placing, box: Box) -> None:
    for name in ("ordered", "other"):
        placing.admit(placing.watch(name, 0))
    placing.turn()
    assert placing.cancel("ordered")
    assert placing.cancel("ordered"), "it ends in the next turn"
    assert placing.refused == {}
    wait_until(lambda: placing.turn() or placing.refused)
    assert [(name, report.reason, report.retry) for name, report in placing.refused.items()] == [
        ("ordered", "asked", False)
    ]
    assert not placing.cancel("ordered"), "it is over"
    box.driver(hangs=None)
    wait_until(lambda: placing.turn() or placing.placed)
    for _ in range(20):
        placing.turn()
    assert placing.placed == [("other", "0")]


def test_a_driver_that_is_opened_while_others_are_served_is_not_waited_for(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload has brought the first model on a GPU. Tokens of other models must not wait for the driver."""
    monkeypatch.setattr(vram_module, "START_S", 20.0)
    box.driver(hangs=True)
    vram = Vram(Timers(), logging.getLogger("vram"))
    vram.serves()
    vram.watch("later", ["0"])
    try:
        begun = time.monotonic()
        assert (vram.reading(), vram.late) == (None, True)
        assert time.monotonic() - begun < 10.0
        box.driver(hangs=False)
        wait_until(vram.reading)
    finally:
        vram.close()
