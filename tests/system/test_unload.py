"""``unload`` ends a model's process, and the model's next request starts it again, whatever models.yaml says."""

import signal
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import GIB, Box
from tests.serving import engine, wait_until

KINDS: dict[str, dict[str, Any]] = {
    "lazy": {"lazy": True, "autostart": True},
    "not lazy": {},
    "pinned": {"lazy": True, "autostart": True, "pinned": True},
    "two workers": {"replicas": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_request_starts_it_again(serve: Serve, kind: str) -> None:
    serving = serve({"a": engine(**KINDS[kind])})
    done = serving.modelctl("unload", "a")
    assert done.returncode == 0
    assert "started again meanwhile" not in done.stderr
    workers = serving.overview()["models"]
    assert {(w["state"], w["pid"], w["unloaded"]) for w in workers} == {("unloaded", None, "unload ordered")}
    assert serving.modelctl("ps").stdout.count("unloaded") == len(workers)
    with serving.client() as client:
        assert client.complete("a", "again", max_tokens=3).text == answer("again", 3)
    assert {w["generation"] for w in serving.overview()["models"]} == {2}


def test_a_model_on_two_gpus_that_cannot_sleep_is_unloaded(serve: Serve, box: Box) -> None:
    box.becomes([24, 24])
    serving = serve({"wide": engine(gpu=[0, 1], vram="30GiB")})
    assert serving.modelctl("unload", "wide").returncode == 0
    assert serving.status("wide")["state"] == "unloaded"
    with serving.client() as client:
        assert client.complete("wide", "x", max_tokens=3).text == answer("x", 3)


def test_running_requests_finish_and_later_ones_wait_for_the_next_process(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.01)})
    with serving.client() as client:
        running = client.generate("a", "runs", max_tokens=100)
        next(running)
        assert serving.order("unload", model="a")["state"] == "draining"
        later = client.generate("a", "later", max_tokens=3)
        assert running.complete().text == answer("runs", 100)
        assert later.complete().text == answer("later", 3)
    assert (serving.status("a")["state"], serving.status("a")["generation"]) == ("ready", 2)
    assert serving.status("a")["totals"]["errors"] == 0


def test_it_may_be_ordered_in_every_state(serve: Serve) -> None:
    serving = serve(
        {
            "off": engine(autostart=False),
            "loading": engine("SlowLoad", load_s=60),
            "crashing": engine("CrashesInLoad", autostart=False),
            "killed": engine(),
            "stopping": engine("HangsDeaf"),
        },
        restart={"initial": "5m", "max": "5m"},
        stop={"drain": "100ms", "shutdown": "100ms", "sigterm": "100ms"},
        wait=False,
    )
    serving.wait_state("loading", "loading")
    serving.wait_state("killed", "ready")
    serving.wait_state("stopping", "ready")
    serving.order("start", model="crashing")
    serving.wait_state("crashing", "backoff")
    serving.order("stop", model="stopping")
    serving.worker("killed").send_signal(signal.SIGKILL)
    for name in ("off", "loading", "crashing", "killed", "stopping"):
        for _ in range(2):
            serving.order("unload", model=name)
        serving.wait_state(name, "unloaded")
    with serving.client() as client:
        for name in ("off", "killed", "stopping"):
            assert client.complete(name, "x", max_tokens=3).text == answer("x", 3)
    serving.order("unload", model="off")
    serving.wait_state("off", "unloaded")
    serving.order("stop", model="off")
    with serving.client() as client, pytest.raises(WireError) as refused:
        client.complete("off", "x", max_tokens=3)
    assert refused.value.code is ErrorCode.MODEL_NOT_RUNNING


def test_a_reload_leaves_it_to_the_next_request(serve: Serve) -> None:
    """A model that is not lazy stays unloaded when its keys change, and while its successor is being started."""
    serving = serve({"a": engine(), "b": engine()})
    serving.order("unload", model="a")
    serving.wait_state("a", "unloaded")
    serving.write_models({"a": engine(max_queue=7), "b": engine("SlowLoad", load_s=60)})
    serving.order("reload")
    wait_until(lambda: any(m["name"] == "b~2" for m in serving.overview()["models"]), what="the successor of b")
    assert serving.status("a")["state"] == "unloaded"
    serving.order("unload", model="b")
    serving.wait_state("b", "unloaded")
    wait_until(lambda: [m["name"] for m in serving.overview()["models"]] == ["a", "b"], what="the end of the successor")
    with serving.client() as client:
        assert client.complete("a", "x", max_tokens=3).text == answer("x", 3)


@pytest.mark.long
def test_a_request_that_finds_no_room_may_try_again(serve: Serve, box: Box) -> None:
    """As for a lazy model: what has taken the memory meanwhile may leave."""
    box.becomes([24])
    serving = serve({"a": engine(gpu=0, vram="15GiB"), "b": engine(gpu=0, vram="15GiB", autostart=False)})
    serving.order("unload", model="a")
    serving.wait_state("a", "unloaded")
    serving.order("start", model="b")
    box.holds(0, serving.wait_state("b", "ready")["pid"], 15 * GIB)
    with serving.client() as client:
        with pytest.raises(WireError, match="cannot be loaded now") as refused:
            client.complete("a", "x", max_tokens=3)
        assert refused.value.retry_after_ms is not None
        box.gives_back(serving.status("b")["pid"])
        serving.order("stop", model="b")
        serving.wait_state("b", "stopped")
        serving.wait_state("a", "unloaded")
        assert client.complete("a", "x", max_tokens=3).text == answer("x", 3)
