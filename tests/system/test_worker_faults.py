"""After faults like those of torch and CUDA in real workers, `status` names the fault and the remedy."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import Serving, engine, wait_until
from tests.system.test_service_manager import Manager, managed


def faulty(kind: str, **keys: Any) -> dict[str, Any]:
    return {**engine(**keys), "engine": f"tests.faulty_engines:{kind}"}


def exit_after(serving: Serving, restarts: int) -> dict[str, Any]:
    """Wait until model ``a`` has more than ``restarts`` restarts. Return its last exit."""
    wait_until(lambda: serving.status("a")["restarts"] > restarts, what="another worker")
    reported: dict[str, Any] = serving.status("a")["last_exit"]
    return reported


@pytest.mark.long
def test_the_fault_of_a_step_is_told_apart(serve: Serve) -> None:
    """The faults occur one after the other in one model, so its log also holds the tracebacks of former workers."""
    serving = serve({"a": faulty("RaisesInStep")}, restart={"limit": 50, "initial": "10ms", "max": "20ms"})
    wanted = {
        "other": ("engine fault", "ValueError: the cache is inconsistent"),
        "vram": ("out of VRAM", "2.00 GiB more were wanted, 512.06 MiB of 23.69 GiB were free"),
        "access": ("CUDA error", "an illegal memory access was encountered"),
        "ram": ("out of memory", "RAM, not VRAM"),
        "assert": ("CUDA error", "device-side assert triggered"),
    }
    for restarts, (fault, (reason, says)) in enumerate(wanted.items()):
        before = serving.wait_state("a", "ready")
        with serving.client() as client, pytest.raises(WireError):
            client.complete("a", f"bad {fault}", max_tokens=50)
        report = exit_after(serving, restarts)
        assert (report["code"], report["reason"]) == (70, reason), report
        assert says in report["message"]
        assert "CUDA_DSA" not in report["message"]
        assert f"a: pid {before['pid']}: {report['message']}" in serving.log()
    serving.wait_state("a", "ready")
    with serving.client() as client:
        assert client.complete("a", "good", max_tokens=10).text == answer("good", 10)


def test_a_worker_ends_with_a_thread_of_ours_and_not_with_one_of_a_package(serve: Serve) -> None:
    serving = serve({"a": faulty("FailsInThread")}, restart={"initial": "10ms", "max": "20ms"})
    before = serving.wait_state("a", "ready")
    with serving.client() as client:
        assert client.complete("a", "package", max_tokens=10).text == answer("package", 10)
        assert serving.status("a")["pid"] == before["pid"]
        with suppress(WireError):  # if no token came before the end, the next worker ends at the same place
            client.complete("a", "ours", max_tokens=100)
        report = exit_after(serving, 0)
        assert (report["code"], report["reason"]) == (70, "engine fault"), report
        assert "ValueError: the cache is inconsistent" in report["message"]


def test_what_does_not_fit_says_so_to_whoever_starts_it(serve: Serve) -> None:
    serving = serve(
        {"a": faulty("RunsOutInLoad", autostart=False)}, restart={"limit": 2, "initial": "10ms", "max": "20ms"}
    )
    done = serving.modelctl("start", "a")
    assert done.returncode == 1
    assert "the GPU's memory is used up" in done.stderr
    assert serving.status("a")["last_exit"]["reason"] == "out of VRAM"
    shown = serving.modelctl("status", "a").stdout
    assert "out of VRAM" in shown
    assert "smaller cache_size" in shown
    with serving.client() as client, pytest.raises(WireError, match="memory is used up") as caught:
        client.complete("a", "x", max_tokens=1)
    assert caught.value.code is ErrorCode.MODEL_FAILED


def test_files_that_are_away_are_tried_again_until_they_are_there(tmp_path: Path) -> None:
    """The share of the model is not mounted when the supervisor starts, and later does not answer for a while."""
    (mount := tmp_path / "share").mkdir()
    models = {"a": faulty("ReadsItsDirectory", model_dir=str(mount / "m")), "b": engine()}
    manager = Manager(str(tmp_path / "notify"))
    with managed(manager, models) as serving:
        status = serving.wait_state("a", "backoff")
        assert (status["last_exit"]["reason"], status["last_exit"]["retry"]) == ("away", True)
        assert f"cannot load: {mount}/m has no file state; next try in " in serving.log(), "5 s and a little, drawn"
        manager.wait_for("READY=1")
        done = serving.modelctl("start", "a")
        assert done.returncode == 1
        assert f"{mount}/m has no file state; it is tried again by itself" in done.stderr
        (mount / "m").mkdir()
        (mount / "m" / "state").write_text("fine")
        serving.wait_state("a", "ready")
        (mount / "m" / "state").write_text("ESTALE")
        serving.order("restart", model="a")
        assert "Stale file handle" in serving.wait_state("a", "backoff")["reason"]
        (mount / "m" / "state").write_text("fine")
        serving.wait_state("a", "ready")


def test_a_directory_that_is_there_and_wrong_is_not_tried_again(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    serving = serve({"a": faulty("ReadsItsDirectory", model_dir=str(tmp_path))}, wait=False)
    status = serving.wait_state("a", "failed")
    assert (status["last_exit"]["reason"], status["restarts"]) == ("config", 0)
