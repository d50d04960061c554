"""A real supervisor spawns a worker only when the memory of the last worker on its GPU is back.

The stand-in for the package ``pynvml`` reads the description of a box from a file, so the tests control the readings.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import GIB, STRANGER, Box
from tests.serving import Serving, engine, wait_until


def on(gpu: int | str | list[int], kind: str = "DeterministicEngine", **keys: Any) -> dict[str, Any]:
    return engine(kind, gpu=gpu, **keys)


def load(serving: Serving, box: Box, model: str, gpu: int = 0) -> int:
    """Wait until a model is ready, let the box show its memory, and return its pid."""
    pid: int = serving.wait_state(model, "ready")["pid"]
    box.holds(gpu, pid)
    return pid


def wait_awaited(serving: Serving, model: str) -> None:
    """Wait until a model's start waits for the memory of its last worker."""
    awaited = ("starting", None, "awaited")
    wait_until(lambda: tuple(map(serving.status(model).get, ("state", "pid", "vram_return"))) == awaited)


def wait_log(serving: Serving, text: str) -> None:
    wait_until(lambda: text in serving.log(), what=f"{text!r} in the log")


def stays(condition: Callable[[], bool], polls: int = 10) -> bool:
    """Return whether a condition holds for ``polls`` status answers, 20 ms apart. Each needs a turn of the supervisor's
    loop."""
    for _ in range(polls):
        if not condition():
            return False
        time.sleep(0.02)
    return True


def test_the_next_worker_waits_for_the_memory_of_the_killed_one(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0)})
    pid = load(serving, box, "a")
    assert wait_until(lambda: serving.status("a")["vram_bytes"]) == 12 * GIB
    shown = " ".join(serving.modelctl("status", "--verbose").stdout.split())
    assert "gpu 0 12.0 GiB of 80.0 GiB in use, 68.0 GiB free GPU-0a2b3c4d-0000" in shown
    assert "vram_by_gpu GPU 0: 12.0 GiB" in shown
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    assert stays(lambda: serving.status("a")["pid"] is None)
    with serving.client() as client:
        waiting = client.generate("a", "patience", max_tokens=5)  # accepted now, and served when the memory is back
        box.gives_back(pid)
        assert waiting.complete().text == answer("patience", 5)
    status = serving.wait_state("a", "ready")
    assert (status["generation"], status["vram_return"]) == (2, "back")
    assert 150 < status["vram_returned_ms"] < 10_000
    assert f"a: VRAM back after {status['vram_returned_ms']} ms (GPU 0, pid {pid})" in serving.log()


def stop_command(serving: Serving, model: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "supervisor", "stop", model, "--runtime-dir", str(serving.runtime_dir)],
        env=serving.environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_stop_returns_when_the_memory_is_back(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0)})
    pid = load(serving, box, "a")
    command = stop_command(serving, "a")
    try:
        serving.wait_state("a", "stopped")
        assert serving.status("a")["vram_return"] == "awaited"
        assert serving.status("a")["vram_returned_ms"] is None
        assert stays(lambda: command.poll() is None)
        box.gives_back(pid)
        _, reported = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 0
    assert "not back" not in reported
    status = serving.status("a")
    assert (status["vram_return"], status["vram_bytes"]) == ("back", None)
    assert status["vram_returned_ms"] > 150
    assert "vram_returned_ms" in serving.modelctl("status", "a", "--json").stdout


def test_stop_says_that_the_memory_is_not_back(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0)})
    load(serving, box, "a")
    command = stop_command(serving, "a")
    try:
        serving.wait_state("a", "stopped")
        box.fails("GPU is lost")  # otherwise the wait would end at its deadline of ten seconds
        _, reported = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 0
    assert "a is stopped, but its VRAM is not back yet" in reported
    assert (serving.status("a")["vram_return"], serving.status("a")["vram_returned_ms"]) == ("not back", None)


def test_a_model_waits_for_another_ones_memory_only_on_its_own_gpu(serve: Serve, box: Box) -> None:
    models = {
        "a": on(0),
        "same": on("GPU-0A2B3C4D", autostart=False),  # the same GPU, named by the beginning of its UUID
        "both": on([0, 1], autostart=False),
        "other": on(1, autostart=False),
    }
    serving = serve(models)
    pid = load(serving, box, "a")
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    for model in ("same", "both", "other"):
        serving.order("start", model=model)
    serving.wait_state("other", "ready")
    for model in ("same", "both"):
        assert f"{model}: waits for the VRAM of pid {pid}" in serving.log()
        assert serving.status(model)["pid"] is None
    assert "other: waits" not in serving.log()
    assert serving.status("a")["vram_return"] == "awaited"
    box.gives_back(pid)
    for model in ("same", "both"):
        assert serving.wait_state(model, "ready")["generation"] == 1


@pytest.mark.long
def test_two_dead_workers_are_waited_for_each_by_its_own(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0), "b": on(1)})
    pids = {model: load(serving, box, model, gpu) for gpu, model in enumerate("ab")}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for model in pids:
        wait_awaited(serving, model)
    box.gives_back(pids["b"])
    serving.wait_state("b", "ready")
    assert serving.status("a")["pid"] is None
    box.gives_back(pids["a"])
    serving.wait_state("a", "ready")


def test_stop_during_the_wait(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0), "b": on(1)})
    pid = load(serving, box, "a")
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    serving.order("stop", model="a")
    status = serving.wait_state("a", "stopped")
    assert (status["last_exit"]["reason"], status["vram_return"]) == ("asked", "awaited")
    box.gives_back(pid)
    wait_until(lambda: serving.status("a")["vram_return"] == "back")
    assert stays(lambda: (serving.status("a")["state"], serving.status("a")["pid"]) == ("stopped", None))
    # again, with a start while the memory is not back yet: exactly one worker starts
    serving.order("start", model="a")
    pid = load(serving, box, "a")
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    serving.order("restart", model="a")
    assert stays(lambda: serving.status("a")["pid"] is None)
    box.gives_back(pid)
    generation = serving.wait_state("a", "ready")["generation"]
    assert len([p for p in serving.processes() if p.pid == serving.status("a")["pid"]]) == 1
    assert stays(lambda: serving.status("a")["generation"] == generation)


def test_shutdown_waits_for_the_memory_too(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0)})
    pid = load(serving, box, "a")
    serving.order("shutdown")
    wait_until(lambda: serving.status("a")["vram_return"] == "awaited")
    assert stays(lambda: serving.process.poll() is None)
    box.gives_back(pid)
    assert serving.process.wait(60) == 0


@pytest.mark.long
def test_a_failing_nvml_is_said_once_and_stops_nothing(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0), "b": on(1)}, restart={"limit": 50, "initial": "10ms", "max": "20ms"})
    pid = load(serving, box, "a")
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    box.fails("GPU is lost")  # in the middle of the wait, which then cannot go on
    assert serving.wait_state("a", "ready")["vram_return"] == "not back"
    wait_log(serving, "is not back after")
    for _ in range(3):
        before = serving.status("a")
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda before=before: serving.status("a")["generation"] > before["generation"])  # type: ignore[misc]
        assert serving.wait_state("a", "ready")["vram_return"] == "not watched"
    overview = serving.overview()
    assert (overview["gpus"], overview["models"][0]["vram_bytes"]) == ([], None)
    assert serving.log().count("VRAM cannot be read: NVML: GPU is lost") == 1
    with serving.client() as client:
        assert client.complete("b", "still here", max_tokens=5).text == answer("still here", 5)
    # NVML answers again, so the supervisor waits for memory again
    box.fails(None)
    pid = load(serving, box, "a")
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    box.gives_back(pid)
    assert serving.wait_state("a", "ready")["vram_return"] == "back"


def test_an_nvml_that_fails_at_first_is_used_when_it_answers(serve: Serve, box: Box) -> None:
    """Regression: a model with a pin that could not be looked up at the start never got a GPU."""
    box.fails("Unknown Error")
    serving = serve({"a": on("GPU-0a2b3c4d")})
    assert "VRAM cannot be read: NVML: Unknown Error" in serving.log()
    box.fails(None)
    pid = load(serving, box, "a")
    wait_until(lambda: serving.status("a")["vram_bytes"])
    os.kill(pid, signal.SIGKILL)
    wait_awaited(serving, "a")
    box.gives_back(pid)
    assert serving.wait_state("a", "ready")["vram_return"] == "back"


def test_without_a_driver_it_says_so_and_serves(serve: Serve, box: Box) -> None:
    box.fails("Driver Not Loaded", at_init=True)
    serving = serve({"a": on(0)})
    assert serving.log().count("VRAM is not watched: NVML: Driver Not Loaded") == 1
    os.kill(serving.status("a")["pid"], signal.SIGKILL)
    wait_until(lambda: serving.status("a")["generation"] == 2)
    assert serving.wait_state("a", "ready")["vram_return"] == "not watched"


def test_sensors_of_the_gpus_are_shown_as_far_as_the_driver_offers_them(serve: Serve, box: Box) -> None:
    box.becomes(
        [80, 80], utilization=[87, None], temperature=[71, None], power=[412_250, None], power_limit=[None, 350_000]
    )
    serving = serve({"a": on(0)})
    shown = serving.modelctl("status").stdout
    assert "GPU-0a2b3c4d-0000\n  87 % busy, 71 °C, 412 W\n" in shown
    assert "GPU-1a2b3c4d-0000\na" in shown, "no line for nothing"
    first, second = json.loads(serving.modelctl("status", "--json").stdout)["gpus"]
    keys = "utilization_percent", "temperature_celsius", "power_watts", "power_limit_watts"
    assert [first[key] for key in keys] == [87, 71, 412.25, None]
    assert [second[key] for key in keys] == [None, None, None, 350.0]
    metrics = [line for line in serving.modelctl("metrics").stdout.splitlines() if re.match("modelctl_gpu_[ptu]", line)]
    assert metrics == [
        'modelctl_gpu_utilization_ratio{gpu="0"} 0.87',
        'modelctl_gpu_temperature_celsius{gpu="0"} 71.0',
        'modelctl_gpu_power_watts{gpu="0"} 412.25',
        'modelctl_gpu_power_limit_watts{gpu="1"} 350.0',
    ]


def test_memory_of_others_is_not_waited_for(serve: Serve, box: Box) -> None:
    box.holds(0, STRANGER, 60 * GIB)
    box.holds(1, os.getpid(), None)  # some drivers report no sizes
    serving = serve({"a": on(0, "SlowLoad", load_s=0.5)}, wait=False)
    pid = serving.wait_state("a", "loading")["pid"]
    box.holds(0, pid)
    serving.wait_state("a", "ready")
    assert serving.overview()["gpus"][0]["used_bytes"] == 72 * GIB
    box.gives_back(pid)  # before the process ends, so that there is nothing to wait for
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: serving.status("a")["generation"] == 2)
    status = serving.wait_state("a", "ready")
    assert (status["vram_return"], status["vram_returned_ms"]) == ("back", 0.0)
    log = serving.log()
    assert "waits for the VRAM" not in log
    assert f"pid {STRANGER} (?) holds 60.0 GiB of GPU 0, and is none of ours: left alone" in log
    assert "of GPU 1" not in log, "no model is to use it"


def test_a_box_that_knows_other_pids_is_not_waited_for_and_that_is_said_once(serve: Serve, box: Box) -> None:
    """In a container, NVML lists the pids of the host."""
    box.holds(0, STRANGER)
    serving = serve({"a": on(0)})
    for generation in (2, 3):
        os.kill(serving.status("a")["pid"], signal.SIGKILL)
        wait_until(lambda generation=generation: serving.status("a")["generation"] == generation)  # type: ignore[misc]
        assert serving.wait_state("a", "ready")["vram_return"] == "not watched"
    assert serving.log().count("NVML never listed its worker pid") == 1
