"""Idle workers on other machines leave for a worker that needs the GPUs that they have leased."""

from types import SimpleNamespace
from typing import Any

from supervisor.fleet.machine_room import as_memory, who_leaves
from supervisor.placement.eviction import Eviction, NoRoom, who_yields
from supervisor.workers.lifecycle import WorkerState


def replica(name: str, node: str | None, gpus: int = 1, **changes: Any) -> Any:
    """Return the facts about a worker that are read: a lazy one that is idle, unless ``changes`` say otherwise."""
    return SimpleNamespace(
        **{
            "name": name, "model": name, "state": WorkerState.READY, "may_be_evicted": True, "last_active": 0.0,
            "spec": SimpleNamespace(config=SimpleNamespace(gpu_count=gpus, priority=changes.pop("priority", 0))),
            "stays_s": lambda now: 0.0, "yields_to": "",
            "process": None if node is None else SimpleNamespace(node=node), "info": {"load_seconds": 1.0},
            **changes,
        }
    )  # fmt: skip


def leave(missing: dict[str, int], *replicas: Any, busy: str = "") -> list[str] | NoRoom:
    chosen = who_leaves("new", missing, replicas, lambda replica: replica.name not in busy, 10.0)
    if isinstance(chosen, NoRoom):
        return chosen
    assert all(eviction == Eviction(eviction.worker) for eviction in chosen), "nobody sleeps there"
    return [eviction.worker for eviction in chosen]


def test_one_machine_is_freed() -> None:
    a, b, c = replica("a", "one"), replica("b", "one"), replica("c", "two", priority=-1)
    assert leave({"one": 2}, a, b, c) == ["a", "b"]
    assert leave({"one": 2, "two": 1}, a, b, c) == ["c"], "the lowest priority, and the fewest"
    assert leave({"one": 1}, a, replica("b", "one", last_active=5.0)) == ["a"], "the one that is idle for longer"
    assert leave({"one": 2}, replica("a", "one", gpus=2), b) == ["a"]


def test_some_stay() -> None:
    assert leave({"one": 1}, replica("a", "one", may_be_evicted=False)) is NoRoom.NEVER
    assert leave({"one": 1}, replica("new", "one")) is NoRoom.NEVER, "workers of the same model"
    assert leave({"one": 1}, replica("a", "two"), replica("b", ""), replica("c", None)) is NoRoom.NEVER
    assert leave({"one": 1}, replica("a", "one"), busy="a") is NoRoom.WAIT
    assert leave({"one": 1}, replica("a", "one", state=WorkerState.STOPPING), busy="a") is NoRoom.WAIT
    assert leave({}, replica("a", "one")) is NoRoom.NEVER


def test_a_busy_one_yields() -> None:
    a, b = replica("a", "one"), replica("b", "two", stays_s=lambda now: 3.0)
    for there, expected in ({"one": 1}, ("a",)), ({"two": 1}, ()), ({"one": 1, "two": 1}, ("a",)):
        wanted, candidates = as_memory("new", there, (a, b), lambda replica: False, 10.0)
        assert who_yields(wanted, candidates, one_suffices=True) == expected
