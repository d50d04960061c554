"""A new models.yaml leads to the right changes of each model."""

from pathlib import Path
from typing import Any

from supervisor.config.file import ModelSpec
from supervisor.config.models import ModelConfig
from supervisor.fleet.turnovers import Change, changes


def model(name: str = "a", **keys: Any) -> ModelSpec:
    return ModelSpec(name, ModelConfig(model_dir=".", engine="transformers", **keys), Path("/models/a"))


def test_what_a_worker_is_told_changes_workers_and_the_rest_does_not() -> None:
    before = {"a": [model()]}
    assert changes(before, {"a": model()}) == {"a": Change.UNCHANGED}
    for keys in ({"max_queue": 3}, {"autostart": False}, {"max_queue_tokens": 8}):
        assert changes(before, {"a": model(**keys)}) == {"a": Change.SETTINGS}, keys
    for keys in (
        {"max_seq_len": 64},
        {"threads": 2},
        {"sampling": {"temperature": 0.5}},
        {"limits": {"max_tokens": 9}},
    ):
        assert changes(before, {"a": model(**keys)}) == {"a": Change.WORKERS}, keys
    assert changes(before, {"a": model(replicas=2)}) == {"a": Change.WORKERS}
    assert changes(before, {"a": model()}, forced=("a",)) == {"a": Change.WORKERS}


def test_models_come_and_go() -> None:
    assert changes({"a": [model()]}, {"b": model("b")}) == {"b": Change.ADDED, "a": Change.REMOVED}


def test_a_worker_that_a_failed_reload_left_as_it_was_is_another_change() -> None:
    new = model(max_seq_len=64, replicas=2)
    assert changes({"a": [new, model(replicas=2)]}, {"a": new}) == {"a": Change.WORKERS}
    assert changes({"a": [new, new]}, {"a": new}) == {"a": Change.UNCHANGED}
