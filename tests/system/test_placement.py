"""Real supervisors place workers correctly, or refuse them, on GPUs that a file describes."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Serve
from tests.hanging_files import hanging_file
from tests.nvml_box import GIB, STRANGER, Box
from tests.serving import Serving, engine, is_alive, is_helper, wait_until
from tools.demo_models import directory

DEMO = directory("letters")
LATER = {"autostart": False}


def on(gpu: int | str | list[int], size: str | None = "30GiB", kind: str = "DeterministicEngine", **keys: Any) -> Any:
    """Return an entry of models.yaml for a model on a GPU with declared memory."""
    return engine(kind, gpu=gpu, **({"vram": size} if size else {}), **keys)


def placed(serving: Serving, model: str) -> list[int]:
    gpus: list[int] = serving.status(model)["placed"]
    return gpus


def exl2(directory: Path | str, gpu: int | str, **keys: Any) -> dict[str, Any]:
    return {"model_dir": str(directory), "engine": "exllamav2", "gpu": gpu, **keys}


def refused(serving: Serving, model: str) -> str:
    """Wait until a model is refused, and return the line that says why."""
    status = serving.wait_state(model, "failed", 40)
    assert status["pid"] is None
    message: str = status["last_exit"]["message"]
    return message


def test_auto_takes_the_most_free_and_the_worker_sees_only_that(serve: Serve, box: Box) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    box.becomes([24, 80, 80], cpus=[allowed, allowed[:1], allowed], nodes=[[0], [0], [1]])
    box.holds(2, STRANGER, 1 * GIB)
    serving = serve({"a": on("auto", kind="ListsModules")})
    status = serving.status("a")
    assert (status["placed"], status["gpu"]) == ([1], "auto")
    assert "devices 'GPU-1a2b3c4d-0000'" in serving.log("a")
    box.holds(1, status["pid"], 31 * GIB)
    if len(allowed) > 1:
        assert psutil.Process(status["pid"]).cpu_affinity() == allowed[:1]
        assert (status["cpus"], status["numa_nodes"]) == (str(allowed[0]), "0")
    wait_until(lambda: serving.status("a")["vram_bytes"], 5)
    row = serving.modelctl("ps").stdout.splitlines()[1]
    assert "auto:1" in row
    assert "31.0 GiB (30.0 GiB)" in row
    shown = " ".join(serving.modelctl("status", "a", "-v").stdout.split())
    assert "placed on GPU 1" in shown
    assert "vram estimated 30.0 GiB vram estimated of declared 30.0 GiB" in shown
    shown = " ".join(serving.modelctl("status", "a").stdout.split())
    assert "on GPU 1 (" in shown
    assert "vram 31.0 GiB held, 30.0 GiB estimated" in shown


def test_two_that_load_at_once_do_not_share_what_one_takes(serve: Serve, box: Box) -> None:
    box.becomes([40, 80])
    models = {name: on("auto", kind="SlowLoad", load_s=60) for name in "abc"}
    models |= {"pinned": on(1, "45GiB", kind="SlowLoad", load_s=60), "d": on("auto", **LATER)}
    serving = serve(models, wait=False)
    for name in ("pinned", "a", "b"):
        serving.wait_state(name, "loading")
    # the pinned model is first although it is last in the file, then the others in the order of the file
    assert [placed(serving, name) for name in ("pinned", "a", "b")] == [[1], [0], [1]]
    reported = refused(serving, "c")
    assert reported == (
        "needs 30.0 GiB (vram in models.yaml), no GPU has that much: GPU 0 has 10.0 of 40.0 free: "
        "a about to load 30.0, 20.0 missing"
    )
    # memory that a loading worker already holds is not counted twice
    box.holds(0, serving.status("a")["pid"], 12 * GIB)
    serving.order("start", model="d")
    assert "GPU 0 has 10.0 of 40.0 free: a 12.0, a about to load 18.0" in refused(serving, "d")


def test_a_refusal_says_who_holds_the_rest_and_ends_when_they_go(serve: Serve, box: Box) -> None:
    box.becomes([24])
    box.holds(0, STRANGER, 3 * GIB)
    serving = serve({"qwen": on(0, "12GiB"), "big": on(0, "16GiB", **LATER)})
    box.holds(0, pid := serving.status("qwen")["pid"], 12 * GIB)
    done = serving.modelctl("start", "big")
    line = (
        "needs 16.0 GiB (vram in models.yaml), GPU 0 has 9.0 of 24.0 free: qwen 12.0, other processes 3.0; "
        "without qwen it would fit"
    )
    assert done.returncode == 1
    assert f"big: {line}" in done.stderr
    status = serving.status("big")
    assert (status["state"], status["pid"], status["restarts"], status["last_exit"]["reason"]) == (
        "failed", None, 0, "no room",
    )  # fmt: skip
    assert line in serving.log("big")
    assert "spawned" not in serving.log("big")
    plan = serving.modelctl("plan", str(serving.config))  # for this box, without the memory of running models
    assert plan.returncode == 0, plan.stderr
    assert "GPU 0: 24.0 GiB, 3.0 in use by others; 9.0 left" in plan.stdout
    assert f"would not start: {line}" in plan.stdout
    with serving.client() as client, pytest.raises(Exception, match="needs 16"):
        client.complete("big", "hello", max_tokens=1)
    serving.order("stop", model="qwen")
    serving.wait_state("qwen", "stopped")
    serving.order("start", model="big")
    box.gives_back(pid)
    assert serving.wait_state("big", "ready")["generation"] == 2


def test_after_a_crash_room_is_waited_for(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0, "60GiB")}, restart={"limit": 50, "initial": "20ms", "max": "50ms"})
    box.holds(0, STRANGER, 30 * GIB)
    os.kill(serving.status("a")["pid"], signal.SIGKILL)
    wait_until(lambda: (serving.status("a")["last_exit"] or {}).get("reason") == "no room", 10)
    assert serving.status("a")["state"] in ("backoff", "starting")
    box.gives_back(STRANGER)
    serving.wait_state("a", "ready", 30)


def test_several_share_a_gpu_within_the_limits(serve: Serve, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.becomes([80, 80, 80])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    models = {"a": on(0, "20GiB"), "b": on(0, "20GiB"), "c": on(0, "20GiB", **LATER), "d": on("auto", "41GiB")}
    models["e"] = on(2, "1GiB", **LATER)
    serving = serve(models, vram_limit={0: "50%", "GPU-1a2b3c4d": "41GiB"})
    assert placed(serving, "d") == [1]  # GPU 2 is not in CUDA_VISIBLE_DEVICES
    for name, reported in (
        ("c", "GPU 0 has 0.00 left of its vram_limit, 40.0: a 20.0, b 20.0"),
        ("e", "CUDA_VISIBLE_DEVICES=1,0 of the supervisor does not leave GPU 2: it leaves 1, 0"),
    ):
        serving.order("start", model=name)
        assert reported in refused(serving, name)


def readers(serving: Serving) -> list[psutil.Process]:
    """Return the processes that read models' directories."""
    return [p for p in serving.processes() if is_helper(p, "model-directory reader", "model_worker.estimating")]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_directories_are_read_by_others_before_anything_is_spawned(
    serve: Serve, box: Box, tmp_path: Path, closing: ExitStack
) -> None:
    box.holds(0, STRANGER, 79 * GIB + GIB // 2)
    for name in ("cut", "hanging"):
        shutil.copytree(DEMO, tmp_path / name)
    (tmp_path / "cut" / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:5000])
    closing.enter_context(hanging_file(tmp_path / "hanging" / "model.safetensors"))
    models = {"cut": exl2(tmp_path / "cut", 0), "full": exl2("demo:letters", 0)}
    models["declared"] = exl2(tmp_path / "cut", 1, vram="1GiB")
    serving = serve(
        models | {"hanging": exl2(tmp_path / "hanging", 0), "other": on(1)}, wait=False, options=["--no-compile"]
    )
    assert refused(serving, "full") == (
        "needs 0.9 GiB (weights 0.0, cache 0.0, workspace 0.3, context 0.6), "
        "GPU 0 has 0.5 of 80.0 free: other processes 79.5; GPU 1 has room"
    )
    assert refused(serving, "cut").startswith("cannot load: ")
    assert serving.status("cut")["last_exit"]["reason"] == "config"
    assert refused(serving, "declared") == serving.status("cut")["last_exit"]["message"]
    assert serving.status("full")["vram_estimate"]["context"] == 612 << 20
    assert "spawned" not in serving.log("full") + serving.log("cut") + serving.log("declared")
    # a hanging directory delays no other model
    serving.wait_state("other", "ready")
    assert serving.status("hanging")["state"] == "starting"
    (reader,) = wait_until(lambda: readers(serving), 10)
    wait_until(lambda: " ".join(reader.cmdline()).strip() == "modelctl: model-directory reader", what="its name")
    serving.order("stop", model="hanging")
    assert serving.wait_state("hanging", "stopped")["last_exit"]["reason"] == "asked"
    wait_until(lambda: not is_alive(reader), 10)
    serving.order("start", model="hanging")
    (reader,) = wait_until(lambda: readers(serving), 10)
    serving.kill()  # the reader ends with the supervisor, although its read hangs
    wait_until(lambda: not is_alive(reader), 10)


def test_without_nvml_pins_are_obeyed_and_auto_is_refused(serve: Serve, box: Box) -> None:
    box.fails("Driver Not Loaded", at_init=True)
    serving = serve({"a": on(1, kind="ListsModules"), "b": on("auto", **LATER), "c": on(0, None)})
    assert "devices '1'" in serving.log("a")
    assert serving.log().count("without a look at the GPUs") == 1
    serving.order("start", model="b")
    assert "gpu: auto needs NVML" in refused(serving, "b")
    assert serving.status("a")["placed"] is None
    assert serving.status("a")["vram_estimate_bytes"] == 30 * GIB


@pytest.mark.long
@pytest.mark.parametrize(("size", "how"), [(80, "beside"), (50, "exchange")])
def test_a_reload_is_beside_where_there_is_room(serve: Serve, box: Box, size: int, how: str) -> None:
    box.becomes([size])
    serving = serve({"a": on(0)})
    pid = serving.status("a")["pid"]
    box.holds(0, pid, 30 * GIB)
    number = serving.order("reload", model="a")["turnover"]
    if how == "exchange":  # with --beside, nothing waits for the old worker's memory
        wait_until(lambda: f"a: waits for the VRAM of pid {pid}" in serving.log(), 30)
        box.gives_back(pid)
    (report,) = wait_until(lambda: [t for t in serving.overview()["supervisor"]["turnovers"] if not t["running"]], 30)
    assert (report["number"], report["models"][0]["state"], report["models"][0]["how"]) == (number, "done", how)
    assert serving.status("a")["generation"] == 2
    box.gives_back(pid)
