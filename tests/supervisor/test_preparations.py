"""What a machine does before a load is told when it has changed, and never twice."""

from types import SimpleNamespace
from typing import Any

from supervisor.fleet.preparations import Preparations


def replica(name: str, progress: dict[str, Any] | None) -> Any:
    return SimpleNamespace(name=name, model=name.partition(":")[0], process=SimpleNamespace(progress=progress))


def test_each_step_is_told_once_and_again_after_another_start() -> None:
    preparations = Preparations()
    first = {"phase": "copying model", "done": 1, "total": 2, "unit": "bytes", "per_s": 1}
    further = {**first, "done": 2}
    local: Any = SimpleNamespace(name="b", model="b", process=None)
    assert list(preparations.news([replica("a:1", first), replica("a:2", None), local])) == [("a", first)]
    assert list(preparations.news([replica("a:1", dict(first)), local])) == []
    assert list(preparations.news([replica("a:1", further), local])) == [("a", further)]
    assert list(preparations.news([replica("a:1", None), local])) == []
    assert list(preparations.news([replica("a:1", further), local])) == [("a", further)]
