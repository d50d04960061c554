"""Idle workers on other machines leave for a worker that needs the GPUs that they have leased."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from supervisor.config.file import ModelSpec
from supervisor.config.models import ModelConfig
from supervisor.fleet.starts import Stage, Start
from supervisor.placement.eviction import EvictionCandidate, who_yields
from supervisor.workers.launcher import Elsewhere, NoMachineError
from supervisor.workers.life import WorkerState


def replica(name: str, node: str | None, gpus: int = 1, **changes: Any) -> Any:
    """Return the facts about a worker that are read: a lazy one that is idle, unless ``changes`` say otherwise."""
    return SimpleNamespace(
        **{
            "name": name, "model": name, "state": WorkerState.READY, "may_be_evicted": True, "last_active": 0.0,
            "spec": SimpleNamespace(config=SimpleNamespace(priority=changes.pop("priority", 0))),
            "stays_s": lambda now: 0.0, "yields_to": "", "can_sleep": False, "sleep_bytes": 0, "host_bytes": 0,
            "memory": SimpleNamespace(comes_back=lambda reading: {0: 5 << 30}, left_asleep={}),
            "process": None if node is None else SimpleNamespace(leases={node: gpus} if node else {}),
            "info": {"load_seconds": 1.0}, **changes,
        }
    )  # fmt: skip


class Fleet:
    """A start of the model ``new``, whose launcher has no room, among other workers."""

    def __init__(self, missing: dict[str, int], *replicas: Any, busy: str = "") -> None:
        self.unloaded: list[str] = []
        self.asked: list[Elsewhere] = []
        self.missing = missing
        config = ModelConfig(model_dir=".", engine="x:Y", gpu="auto", gpus=2, node="zone=a", vram=(1 << 30,))
        spec = ModelSpec("new", config, Path("/m"))
        registry = SimpleNamespace(
            replicas={each.name: each for each in replicas}, may_leave=lambda each: each.name not in busy,
            new_generation=lambda each: None,
        )  # fmt: skip
        everything: Any = SimpleNamespace(
            registry=registry, launcher=self, scheduler=SimpleNamespace(lacks_worker=lambda model: True),
            sleepers=SimpleNamespace(seconds=lambda each: 0.0, evict=self.evict),
            timers=SimpleNamespace(at=lambda when, call: None), log=logging.getLogger("test"),
            let_yield=lambda start, workers: None,
        )  # fmt: skip
        life = SimpleNamespace(history=SimpleNamespace(recent=[]))
        starts: Any = SimpleNamespace(
            spec=spec,
            name="new",
            model="new",
            label="new",
            life=life,
            waits="",
            memory=None,
            state=WorkerState.STARTING,
        )
        self.start = Start(everything, starts, 1)

    def no_room(self, elsewhere: Elsewhere) -> NoMachineError:
        self.asked.append(elsewhere)
        return NoMachineError("no room there", self.missing)

    def evict(self, worker: str, cause: str, *, sleeps: bool) -> None:
        assert not sleeps
        self.unloaded.append(worker)

    def candidates(self) -> list[EvictionCandidate]:
        return self.start._candidates([], 10.0)


def leave(missing: dict[str, int], *replicas: Any, busy: str = "") -> list[str]:
    """Return the workers that leave."""
    fleet = Fleet(missing, *replicas, busy=busy)
    fleet.start._wait_for_memory()
    assert fleet.asked == [Elsewhere("zone=a", 2, (1 << 30,))]
    assert fleet.start.replica.waits == "no room there"
    assert fleet.start.stage is Stage.ROOM
    assert fleet.start.leaving == {*fleet.unloaded}
    return fleet.unloaded


def test_one_machine_is_freed() -> None:
    a, b, c = replica("a", "one"), replica("b", "one"), replica("c", "two", priority=-1)
    assert leave({"one": 2}, a, b, c) == ["a", "b"]
    assert leave({"one": 2, "two": 1}, a, b, c) == ["c"], "the lowest priority, and the fewest"
    assert leave({"one": 1}, a, replica("b", "one", last_active=5.0)) == ["a"], "the one that is idle for longer"
    assert leave({"one": 2}, replica("a", "one", gpus=2), b) == ["a"]


def test_some_stay() -> None:
    assert leave({"one": 1}, replica("a", "one", may_be_evicted=False)) == []
    assert leave({"one": 1}, replica("new", "one")) == [], "workers of the same model"
    assert leave({"one": 1}, replica("a", "two"), replica("b", ""), replica("c", None)) == []
    assert leave({"one": 1}, replica("a", "one"), busy="a") == []
    assert leave({"one": 1}, replica("a", "one", state=WorkerState.STOPPING), busy="a") == []
    assert leave({}, replica("a", "one")) == []


def test_a_busy_one_yields() -> None:
    a, b = replica("a", "one"), replica("b", "two", stays_s=lambda now: 3.0)
    for missing, expected in ({"one": 1}, ("a",)), ({"two": 1}, ()), ({"one": 1, "two": 1}, ("a",)):
        assert who_yields(missing, Fleet(missing, a, b, busy="ab").candidates(), one_suffices=True) == expected
