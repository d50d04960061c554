"""What comes before a load, such as copying, is told when it has changed, and never twice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from supervisor.config.file import ModelSpec
from supervisor.config.models import ModelConfig
from supervisor.fleet.replicas import Replica
from supervisor.workers.life import RestartPolicy


def test_each_step_is_told_once_and_again_after_another_start() -> None:
    spec = ModelSpec("a", ModelConfig(model_dir="."), Path("/m"))
    replica = Replica("a", "a", spec, RestartPolicy(), Path("/a.log"), 0.0)
    first = {"phase": "copying model", "done": 1, "total": 2, "unit": "bytes", "per_s": 1}
    further = {**first, "done": 2}
    assert replica.prepared_further() is None
    process: Any = SimpleNamespace(progress=None)
    replica.process = process
    for progress, told in (None, None), (first, first), (dict(first), None), (further, further), (None, None):
        process.progress = progress
        assert replica.prepared_further() == told
    process.progress = further
    assert replica.prepared_further() == further
