"""Models on several GPUs, and on the machines of a cluster, in models.yaml."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.config.file import ModelSpec
from supervisor.placement.estimates import gpu_request_of
from tests.supervisor.test_config import CUSTOM, load, problems

CLUSTER = {"advertise": "tcp://192.168.1.5:5571"}


def model(cluster: dict[str, Any] | None = CLUSTER, **keys: Any) -> str:
    entry = {"model_dir": ".", "engine": CUSTOM, **keys}
    return yaml.safe_dump({"models": {"a": entry}} | ({"cluster": cluster} if cluster else {}))


def spec_of(directory: Path, **keys: Any) -> ModelSpec:
    return load(directory, model(**keys)).models["a"]


def test_several_gpus_are_chosen_by_number(tmp_path: Path) -> None:
    split = {"engine": "exllamav2", "gpu_split": [20, 22.5]}
    spec = spec_of(tmp_path, gpu="auto", gpus=2, **split)
    request = gpu_request_of(spec)
    assert request is not None
    assert (request.pins, request.count, request.split.by_hand) == (None, 2, (20 << 30, int(22.5 * 2**30)))
    assert spec.config.gpu_count == 2
    far = spec_of(tmp_path, gpu="auto", gpus=2, node="big-box", **split)
    assert gpu_request_of(far) is None
    assert (far.config.gpu_count, far.engine_spec.options["gpu_split"]) == (2, [20, 22.5])
    parallel = spec_of(tmp_path, engine="exllamav2", gpu="auto", gpus=4, tensor_parallel=True, node="big-box")
    assert parallel.engine_spec.options == {"tensor_parallel": True}
    assert [spec_of(tmp_path, gpu=gpu).config.gpu_count for gpu in ("cpu", 1, [0, 1], "auto")] == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"gpu": [0, 1], "gpus": 2}, "gpus", "list the GPUs in gpu instead, or write gpu: auto"),
        ({"gpus": 2}, "gpus", "is for gpu: auto"),
        ({"gpu": "auto", "gpus": 0}, "gpus", "from 1 to 16"),
        ({"gpu": "auto", "gpus": 2, "engine": "transformers"}, "gpus", "engine transformers uses one GPU"),
        ({"gpu": [0, 1], "node": "big-box"}, "gpu", "Ray chooses the GPUs there; write auto (and gpus: 2"),
        ({"gpu": "auto", "engine": "exllamav2", "tensor_parallel": True}, "tensor_parallel", "gpu: auto with gpus: 2"),
        ({"gpu": "auto", "engine": "exllamav2", "gpus": 3, "gpu_split": [1, 2]}, "gpu_split", "2 values for 3 GPUs"),
        ({"node": "auto", "gpu": "cpu"}, "node", "remove it, or write others"),
        ({"node": "auto", "gpu": 1}, "gpu", "Ray chooses the GPUs there"),
        ({"node": "zone="}, "node", "each with a name and a value"),
        (
            {"node": "others", "gpu": "auto", "lazy": True, "sleep_after": "2m"},
            "sleep_after",
            "would keep its lease of the GPU; remove it, or write ttl",
        ),
        ({"gpu": "auto", "gpus": 3, "vram": ["1GiB", "2GiB"]}, "vram", "2 values for 3 GPUs"),
    ],
)
def test_wrong_wishes(tmp_path: Path, keys: dict[str, Any], key: str, says: str) -> None:
    (report,) = problems(tmp_path, model(**keys))
    assert f"models.a.{key}: " in report
    assert says in report


def test_a_model_that_may_be_here_or_there_asks_for_gpus_here(tmp_path: Path) -> None:
    assert gpu_request_of(spec_of(tmp_path, gpu="auto", node="auto")) is not None
    assert gpu_request_of(spec_of(tmp_path, gpu="auto", node="others")) is None
    here, there = (spec_of(tmp_path, gpu="auto", lazy=True, node=node) for node in ("auto", "zone=a"))
    assert (here.may_sleep, here.engine_spec.sleep) == (True, True)
    assert (there.may_sleep, there.engine_spec.sleep) == (False, False)


def test_a_cluster_is_needed(tmp_path: Path) -> None:
    (report,) = problems(tmp_path, model(None, node="others"))
    assert "models.a.node: is 'others', and models.yaml has no section cluster; add one" in report
