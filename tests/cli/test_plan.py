"""modelctl plan shows which models fit on a box, also on boxes other than this one."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import modelctl
from tools.demo_models import directory

DEMO = directory("letters")
NO_ROOM, FAILED, CONFIG = 3, 1, 78


def write(directory: Path, models: dict[str, dict[str, object]], **supervisor: object) -> Path:
    file = directory / "models.yaml"
    entries = {name: {"model_dir": str(DEMO), "engine": "x:Y", **entry} for name, entry in models.items()}
    file.write_text(yaml.safe_dump({"models": entries, "supervisor": supervisor}, sort_keys=False))
    return file


def test_a_plan_shows_every_gpu_and_part(tmp_path: Path) -> None:
    models: dict[str, dict[str, object]] = {
        "anywhere": {"gpu": "auto", "vram": "20GiB", "replicas": 2},
        "letters": {"engine": "exllamav2", "gpu": 0, "draft_model": "demo:letters", "cache_size": 1 << 20},
        "wide": {"engine": "exllamav2", "gpu": [1, 2]},
        "unsaid": {"gpu": 1},
        "processor": {},
        "later": {"gpu": 0, "vram": "23GiB", "autostart": False},
    }
    done = modelctl("plan", write(tmp_path, models), "--gpus", "24G,24G,48G", "--runtime-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    assert ["MODEL", "WEIGHTS", "CACHE", "DRAFT", "WORKSPACE", "CONTEXT", "SUM"] in words
    # pinned models are placed first, then each worker of "anywhere" on the GPU with the most free memory
    assert [line[-1] for line in words if line and line[0].startswith("anywhere:")] == ["20.0", "20.0"]
    assert [line[:2] for line in words if line[:1] == ["GPU"]] == [["GPU", "0:"], ["GPU", "1:"], ["GPU", "2:"]]
    assert sum(line[:1] == ["wide"] for line in words) == 2
    assert "unsaid: on GPU 1, its needs not known: there is no estimate for engine x:Y" in done.stdout
    assert "processor: on the CPU" in done.stdout
    assert "later: does not start with the supervisor; would not start: needs 23.0 GiB" in done.stdout
    assert "all 6 workers would start" in done.stdout


def test_models_on_other_machines_are_listed_with_their_machine(tmp_path: Path) -> None:
    models: dict[str, dict[str, object]] = {
        "near": {"gpu": 0, "vram": "20GiB"},
        "far": {"gpu": "auto", "node": "big-box", "replicas": 2},
        "anywhere": {"node": "others", "lazy": True},
        "labelled": {"node": "zone=a", "lazy": True},
        "here": {"gpu": "auto", "node": "auto", "vram": "3GiB"},
        "there": {"gpu": "auto", "node": "auto", "vram": "22GiB"},
    }
    file = write(tmp_path, models)
    file.write_text(file.read_text() + "cluster: {advertise: 'tcp://192.168.1.5:5571'}\n")
    command = ("plan", file, "--gpus", "24G", "--runtime-dir", tmp_path)
    done = modelctl(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "GPU 0: 24.0 GiB; 1.0 left" in lines
    assert "there: on another machine, with a GPU that Ray chooses when it starts" in lines, "here is no room"
    assert "labelled: lazy; on another machine with zone=a, on the CPU" in lines
    for worker in ("far:1", "far:2"):
        assert f"{worker}: on machine big-box, with a GPU that Ray chooses when it starts" in lines
    assert "anywhere: lazy; on another machine, on the CPU" in lines
    workers = json.loads(modelctl(*command, "--json").stdout)["workers"]
    assert {each["name"]: each["node"] for each in workers} == {
        "near": None, "far:1": "big-box", "far:2": "big-box", "anywhere": "others",
        "labelled": "zone=a", "here": "auto", "there": "auto",
    }  # fmt: skip


def test_a_plan_counts_the_host_memory_of_models_that_sleep(tmp_path: Path) -> None:
    lazy: dict[str, object] = {"lazy": True, "engine": "exllamav2", "gpu": 0}
    models: dict[str, dict[str, object]] = {
        "a": {**lazy, "sleep_cache": "1GiB", "replicas": 2}, "b": {**lazy, "sleep_cache": "3GiB"},
        "other": {"lazy": True},
        "off": {**lazy, "sleep": "off"}, "pinned": {**lazy, "pinned": True}, "wide": {**lazy, "gpu": [0, 1]}, "up": {},
    }  # fmt: skip
    command = ("--gpus", "80G,80G", "--runtime-dir", tmp_path)
    done = modelctl("plan", write(tmp_path, models, host_memory="2GiB"), *command)
    assert done.returncode == 0, done.stderr
    says = done.stdout
    assert (
        "host memory of models that sleep: a:1 1.0 GiB, a:2 1.0 GiB, b 3.0 GiB, other not known; 5.0 GiB in all, "
        in says
    )
    assert "of 2.0 GiB allowed (supervisor.host_memory)" in says
    assert "b: is unloaded instead of put to sleep, because it takes more host memory than is allowed" in says
    assert "not all of them can sleep at once: those that have slept longest are unloaded" in says
    del models["other"]
    report = json.loads(modelctl("plan", write(tmp_path, models, host_memory="20GiB"), "--json", *command).stdout)
    memory = report["host_memory"]
    assert (memory["fits"], memory["limit_bytes"], list(memory["workers"])) == (True, 20 << 30, ["a:1", "a:2", "b"])
    assert memory["bytes"] == sum(memory["workers"].values()) > 5 << 30
    assert (
        "half of the free host memory of that box is allowed"
        in modelctl("plan", write(tmp_path, models), *command).stdout
    )
    assert "host memory" not in modelctl("plan", write(tmp_path, {"up": {}}), *command).stdout


def test_a_plan_that_does_not_fit_has_its_own_exit_code(tmp_path: Path) -> None:
    models: dict[str, dict[str, object]] = {
        "a": {"gpu": "auto", "vram": "20GiB"}, "b": {"gpu": 0, "vram": "20GiB"}, "c": {"gpu": 1, "vram": "5GiB"},
    }  # fmt: skip
    file = write(tmp_path, models, vram_limit={"1": "4GiB"})
    done = modelctl("plan", file, "--gpus", "24G,24G", "--json", "--runtime-dir", tmp_path)
    assert done.returncode == NO_ROOM
    report = json.loads(done.stdout)
    assert not report["fits"]
    assert [(w["name"], w["starts"], w["gpus"]) for w in report["workers"]] == [
        ("b", True, [0]), ("c", False, []), ("a", False, []),
    ]  # fmt: skip
    assert report["gpus"][0]["left_bytes"] == 4 << 30
    assert "GPU 1 has 4.0 left of its vram_limit, 4.0" in report["workers"][1]["why_not"]


def test_a_directory_that_cannot_be_loaded_is_no_lack_of_room(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    file = write(tmp_path, {"a": {"engine": "exllamav2", "gpu": 0, "model_dir": "broken"}})
    done = modelctl("plan", file, "--gpus", "24G")
    assert done.returncode == FAILED
    assert "a: would not start: " in done.stdout
    assert "has no tokenizer.json" in done.stdout


@pytest.mark.parametrize(
    ("sizes", "code", "says"), [("24X", 2, "'24X': each must be a size such as 20GiB"), ("", 2, "must be a size")]
)
def test_sizes_that_are_none(tmp_path: Path, sizes: str, code: int, says: str) -> None:
    done = modelctl("plan", write(tmp_path, {"a": {"gpu": 0}}), "--gpus", sizes)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def test_a_file_that_is_wrong_is_refused_with_its_lines(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": {"vram": "5GiB"}, "b": {"gpu": [0, 1], "vram": ["1GiB", "2GiB", "3GiB"]}})
    done = modelctl("plan", file, "--gpus", "24G")
    assert done.returncode == CONFIG
    assert "models.a.vram: is for a model on a GPU" in done.stderr
    assert "models.b.vram: has 3 values for 2 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("models", "code", "says"),
    [
        ({"a": {}}, 0, ["a: on the CPU", "1 worker would start"]),
        ({"a": {"gpu": 0, "vram": "30GiB"}}, NO_ROOM, ["1 worker would not start"]),
        (
            {"a": {"lazy": True}, "b": {"lazy": True, "gpu": 0, "vram": "30GiB"}},
            0,
            [
                "a: lazy; on the CPU",
                "no worker starts with the supervisor",
                "started by the first request (lazy): a, b; would not start: b",
            ],
        ),
        (
            {"a": {}, "b": {}, "c": {"lazy": True, "gpu": 0, "vram": "20GiB"}, "d": {"autostart": False}},
            0,
            [
                "c: lazy; needs 20.0 GiB (vram in models.yaml), would fit beside the others on GPU 0",
                "d: does not start with the supervisor; on the CPU",
                "all 2 workers would start",
                "started by the first request (lazy): c",
                "started by `modelctl start` only: d",
            ],
        ),
        ({"a": {"lazy": True, "autostart": True}}, 0, ["a: on the CPU", "1 worker would start"]),
    ],
)
def test_a_plan_says_what_starts_when(
    tmp_path: Path, models: dict[str, dict[str, object]], code: int, says: list[str]
) -> None:
    done = modelctl("plan", write(tmp_path, models), "--gpus", "24G", "--runtime-dir", tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in says] == says
    assert not any("0 workers" in line or "1 workers" in line or "1 of 1" in line for line in lines)
