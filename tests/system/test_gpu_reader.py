"""While a GPU driver hangs the supervisor goes on, and it leaves no process behind."""

import os
import signal
import time

import psutil
import pytest

from supervisor.placement.gpus import TIMEOUT_S
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import Box
from tests.serving import Serving, engine, is_alive, is_helper, wait_until
from tests.system.test_vram import load, on, wait_log


def reader(serving: Serving) -> psutil.Process | None:
    """Return the process that asks NVML, or None."""
    found = [p for p in serving.processes() if is_helper(p, "NVML reader", "nvml_child")]
    return found[0] if found else None


@pytest.mark.long
def test_a_driver_that_hangs_costs_one_pause_and_holds_up_only_who_needs_it(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0), "b": on(1), "c": on(0, vram="10GiB")})
    pid = load(serving, box, "b", 1)
    wait_until(lambda: serving.status("b")["vram_bytes"])
    pids = {model: serving.status(model)["pid"] for model in ("b", "c")}
    with serving.client() as client:
        box.driver(hangs=True)
        # Meanwhile the supervisor cannot know whether the memory is free again and whether there is room. It must not
        # guess.
        for model in ("b", "c"):
            os.kill(pids[model], signal.SIGKILL)
        wait_log(serving, f"b: waits for the VRAM of pid {pid}")
        wait_log(serving, "c: waits for the GPUs to be read")
        begun = time.monotonic()
        stream = client.generate("a", "on and on", max_tokens=400)
        assert stream.complete().text == answer("on and on", 400)
        # The supervisor looks for b's memory 40 times meanwhile. If it waited each time, that would take 40 *
        # TIMEOUT_S.
        assert time.monotonic() - begun < 30 * TIMEOUT_S
        assert all(serving.status(model)["pid"] is None for model in ("b", "c"))
        assert "cannot be read: NVML: the driver has not answered" in serving.modelctl("status").stdout
        # The driver answers again. Then the supervisor finds that b's memory is not free yet.
        box.driver(hangs=None)
        wait_log(serving, "VRAM can be read again, after")
        assert serving.overview()["gpus_unknown"] is None
        assert serving.wait_state("c", "ready")["placed"] == [0]
        assert serving.status("b")["pid"] is None
        box.gives_back(pid)
        assert serving.wait_state("b", "ready")["vram_return"] == "back"
    log = serving.log()
    assert log.count("VRAM cannot be read") == 1
    assert "without a look at the GPUs" not in log


@pytest.mark.long
def test_the_reader_is_replaced_and_leaves_with_the_supervisor(serve: Serve, box: Box) -> None:
    serving = serve({"a": on(0)})
    load(serving, box, "a")
    first = wait_until(lambda: reader(serving))
    first.kill()
    wait_until(lambda: serving.status("a")["vram_bytes"] is None, what="its end to be noticed")
    wait_until(lambda: serving.status("a")["vram_bytes"], what="another that reads")
    second = wait_until(lambda: reader(serving))
    assert second.pid != first.pid
    assert "the process that asks NVML ended (signal 9): it is started again" in serving.log()
    assert serving.log().count("VRAM can be read again, after") == 1
    box.driver(hangs=True)
    wait_until(lambda: serving.overview()["gpus_unknown"])
    serving.kill()
    wait_until(lambda: not is_alive(second), what="its end, although the driver does not let it go")
    wait_until(lambda: not serving.processes(), what="the end of all its processes")


@pytest.mark.long
def test_a_driver_that_takes_long_to_open_is_waited_for_by_those_who_need_it(serve: Serve, box: Box) -> None:
    box.driver(hangs=True)
    serving = serve({"a": on(0, vram="10GiB"), "auto": on("auto", vram="80GiB"), "cpu": engine()}, wait=False)
    serving.wait_state("cpu", "ready")
    assert serving.overview()["gpus_unknown"].startswith("NVML: the driver is still being opened, since")
    assert (serving.status("a")["pid"], serving.status("auto")["pid"]) == (None, None)
    box.driver(hangs=None)
    assert serving.wait_state("a", "ready")["placed"] == [0]
    assert serving.wait_state("auto", "ready")["placed"] == [1], "after the one that is pinned"
    box.driver(hangs=True)  # the supervisor shuts down while the driver hangs
