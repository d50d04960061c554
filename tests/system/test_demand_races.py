"""Lazy models behave correctly when several things happen at once."""

from typing import Any

import pytest

from protocol.errors import ErrorCode
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import GIB, Box
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until


def lazy(kind: str = "DeterministicEngine", **keys: Any) -> dict[str, Any]:
    return engine(kind, **{"lazy": True, **keys})


def holds(serving: Serving, box: Box, model: str, state: str = "ready") -> int:
    """Wait until the model is in this state, and let NVML list its worker. Return the worker's pid."""
    pid: int = serving.wait_state(model, state, 30)["pid"]
    box.holds(0, pid, 50 * GIB)
    return pid


def leaves(serving: Serving, box: Box, model: str, pid: int) -> None:
    """Wait until the model's worker is evicted, and give its memory back."""
    wait_until(lambda: serving.status(model)["pid"] != pid, 30, f"{model} to leave")
    box.gives_back(pid)


def test_two_models_in_one_place_take_turns(serve: Serve, box: Box) -> None:
    """Model a was evicted for b. A request for a that comes while b loads waits until b is idle."""
    models = {"a": lazy(gpu=0, vram="50GiB"), "b": lazy("SlowLoad", gpu=0, vram="50GiB", load_s=1.0)}
    serving = serve(models, wait=False)
    with serving.client() as client:
        client.complete("a", "x", max_tokens=2)
        first = holds(serving, box, "a")
        b = client.generate("b", "b", max_tokens=3)
        leaves(serving, box, "a", first)
        second = holds(serving, box, "b", "loading")  # as soon as it is ready, only NVML counts
        a = client.generate("a", "a", max_tokens=3)
        assert b.complete().text == answer("b", 3)
        leaves(serving, box, "b", second)
        assert a.complete().text == answer("a", 3)


@pytest.mark.long
def test_a_request_that_waits_wakes_the_other_worker(serve: Serve) -> None:
    serving = serve({"a": lazy(replicas=2, max_batch_size=1, step_s=0.01)}, wait=False)
    serving.order("start", model="a:1")
    serving.wait_state("a:1", "ready")
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "x", max_tokens=2)
        client.read_until_ended(1)
        assert serving.status("a:2")["state"] == "unloaded", "one is enough for one"
        for request in range(2, 8):
            client.generate(request, "a", f"x {request}", max_tokens=200)
        serving.wait_state("a:2", "ready", 30)
        client.read_until_ended(*range(2, 8), within=60)
        assert {client.heard[request].text for request in range(2, 8)} == {answer(f"x {r}", 200) for r in range(2, 8)}


def test_those_that_wait_for_room_are_not_told_of_another_workers_load(serve: Serve) -> None:
    entry = engine("SlowLoad", load_s=0.3, replicas=2, max_batch_size=1, autostart=False, step_s=0.01)
    serving = serve({"a": entry}, wait=False)
    serving.order("start", model="a:1")
    serving.wait_state("a:1", "ready")
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 6):
            client.generate(request, "a", f"x {request}", max_tokens=100, route={"progress": True})
        serving.order("start", model="a:2")
        client.read_until_ended(*range(1, 6), within=60)
        assert "loading" not in {report["phase"] for reports in client.reports.values() for report in reports}
    assert serving.status("a:2")["state"] == "ready"


def test_a_client_that_leaves_while_the_model_loads(serve: Serve) -> None:
    """The load goes on, and requests that were cancelled, timed out or lost their client are not computed."""
    serving = serve({"a": lazy("SlowLoad", load_s=0.5)}, wait=False)
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "gone", max_tokens=5)
        serving.wait_state("a", "loading", 30)
    status = serving.wait_state("a", "ready", 30)
    assert (status["queued"], status["active"], status["totals"]["tokens"]) == (0, 0, 0)


def test_run_wakes_it(serve: Serve) -> None:
    serving = serve({"a": lazy("SlowLoad", load_s=0.5)}, wait=False)
    done = serving.modelctl("run", "a", "x", "--max-tokens", "4")
    assert (done.returncode, done.stdout) == (0, answer("user: x", 4) + "\n")
    assert "a: loading\n" in done.stderr


def test_a_load_that_keeps_crashing_is_given_up_once(serve: Serve) -> None:
    serving = serve({"a": lazy("CrashesInLoad")}, wait=False, restart={"limit": 2})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "x")
        client.read_until_ended(1, within=30)
        assert client.heard[1].ends == ["model_failed"]
        assert "the disk hiccupped" in str(client.heard[1].error["message"])
        client.generate(2, "a", "x")
        client.barrier()
        assert client.errors[0][1]["code"] == ErrorCode.MODEL_FAILED
    assert serving.status("a")["generation"] == 2
