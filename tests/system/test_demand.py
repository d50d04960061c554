"""Lazy models start at the first request, unload when idle, and make room for other models."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from protocol.limits import STREAM_WINDOW
from protocol.messages import Credit
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import GIB, Box
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until


def lazy(kind: str = "DeterministicEngine", **keys: Any) -> dict[str, Any]:
    return engine(kind, **{"lazy": True, **keys})


def test_the_first_request_starts_it_once_and_is_told_how_it_loads(serve: Serve) -> None:
    serving = serve({"a": lazy("SlowLoad", load_s=0.5)}, wait=False)
    assert (serving.status("a")["state"], serving.status("a")["pid"]) == ("unloaded", None)
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "first", max_tokens=5, route={"progress": True})
        client.generate(2, "a", "second", max_tokens=5)
        client.generate(3, "a", "given up", max_tokens=5, route={"queue_ms": 50})
        client.read_until_ended(1, 2, 3)
        assert [client.heard[request].text for request in (1, 2)] == [answer("first", 5), answer("second", 5)]
        assert client.heard[3].ends == ["queue_timeout"]
        loading = [report for report in client.reports[1] if report["phase"] == "loading"]
        done = [int(str(report["done"])) for report in loading]
        assert len(done) > 1
        assert {report["part"] for report in loading} == {"loading"}
        assert done == sorted(done)
        assert 2 not in client.reports
    assert serving.status("a")["generation"] == 1


@pytest.mark.long
def test_it_leaves_when_nobody_asks_and_comes_back(serve: Serve) -> None:
    serving = serve({"a": lazy(ttl="1s"), "b": lazy(autostart=True, pinned=True)}, wait=False)
    serving.wait_state("b", "ready")
    with serving.client() as client:
        for generation in (1, 2):
            assert client.complete("a", "here", max_tokens=5).text == answer("here", 5)
            status = serving.status("a")
            assert (status["state"], status["generation"]) == ("ready", generation)
            assert status["until_s"] <= 1
            assert serving.wait_state("a", "unloaded", 30)["unloaded"] == "idle for 1 s"
        row = serving.modelctl("ps").stdout.splitlines()[1].split()
        assert row[:2] == ["a", "unloaded"]
    assert serving.status("b")["generation"] == 1


def test_what_only_a_load_can_tell_is_unknown_before(serve: Serve) -> None:
    """Before the load, the chat template and the context are unknown."""

    def reported() -> tuple[object, ...]:
        with serving.client() as client:
            (by_models,) = client.models()["models"]
        by_status = serving.status("a")
        return by_status["chat"], by_status["context"], by_models["chat"], by_models["context"]

    def shown() -> list[str]:
        lines = serving.modelctl("status", "a", "-v").stdout.splitlines()
        return next(line for line in lines if line.startswith("  chat ")).split()

    serving = serve({"a": lazy(ttl="1s")}, wait=False)
    assert reported() == (None, None, None, None)
    assert shown() == ["chat", "-"]
    with serving.client() as client:
        client.complete("a", "here", max_tokens=5)
    serving.wait_state("a", "unloaded", 30)
    assert reported() == (True, 4096, True, 4096)
    assert shown() == ["chat", "yes"]


def test_who_has_not_read_an_answer_may_still_do_so_when_it_has_left(serve: Serve) -> None:
    serving = serve({"a": lazy(ttl="100ms", step_s=0)}, wait=False)
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "held", max_tokens=600)
        serving.wait_state("a", "ready", 30)
        serving.wait_state("a", "unloaded", 30)
        client.barrier()
        assert client.heard[1].seqs == list(range(STREAM_WINDOW)), "no more than there was credit for"
        client.send(Credit(1, 600))
        client.send(Credit(1, 600))
        client.read_until_ended(1)
        assert client.heard[1].text == answer("held", 600)
        assert client.heard[1].ends == ["length"]


@pytest.mark.long
def test_a_request_that_comes_while_it_leaves_is_served(serve: Serve) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    serving = serve({"a": lazy(ttl="100ms")}, wait=False)
    with serving.client() as client:
        for number in range(4):
            assert client.complete("a", f"x {number}", max_tokens=3).text == answer(f"x {number}", 3)
            generation = serving.status("a")["generation"]

            def leaves(generation: int = generation) -> bool:
                status = serving.status("a")
                return status["state"] != "ready" or status["generation"] > generation

            wait_until(leaves, 30, "it to leave")
            time.sleep(chance.uniform(0, 0.05))  # a random moment between the order to stop and the end of the process


def test_a_load_that_fails_is_not_tried_by_every_request(serve: Serve) -> None:
    serving = serve({"a": lazy("CannotLoad")}, wait=False)
    with serving.client() as client:
        for _ in range(3):
            with pytest.raises(WireError, match="modelctl start a") as caught:
                client.complete("a", "x")
            assert caught.value.code is ErrorCode.MODEL_FAILED
        assert serving.status("a")["generation"] == 1
        serving.order("start", model="a")
        wait_until(lambda: serving.status("a")["generation"] == 2, 10, "another try")


def test_an_operators_stop_is_respected(serve: Serve) -> None:
    serving = serve({"a": lazy()}, wait=False)
    serving.order("stop", model="a")
    with serving.client() as client:
        with pytest.raises(WireError) as caught:
            client.complete("a", "x")
        assert caught.value.code is ErrorCode.MODEL_NOT_RUNNING
        assert serving.status("a")["state"] == "stopped"
        with pytest.raises(WireError, match="is stopped"):
            client.call("tokenize", model="a", prompt="x")
        serving.order("start", model="a")
        assert client.complete("a", "x", max_tokens=3).text == answer("x", 3)


def test_a_question_wakes_it(serve: Serve) -> None:
    serving = serve({"a": lazy()}, wait=False)
    with serving.client() as client, pytest.raises(WireError, match="being loaded") as caught:
        client.call("tokenize", model="a", prompt="x")
    assert caught.value.retry_after_ms
    serving.wait_state("a", "ready")


def test_reload_makes_models_lazy_and_unlazy(serve: Serve) -> None:
    serving = serve({"a": lazy(), "b": engine(autostart=False)}, wait=False)
    serving.write_models({"a": engine(autostart=False), "b": lazy(), "c": lazy()})
    serving.order("reload")
    serving.wait_state("a", "stopped")
    serving.wait_state("b", "unloaded")
    wait_until(lambda: len(serving.overview()["models"]) == 3, 10, "the third")
    with serving.client() as client:
        assert client.complete("c", "new", max_tokens=3).text == answer("new", 3)


# ---- eviction


def held(serving: Serving, box: Box, model: str, size: int) -> int:
    """Make NVML report the declared memory before the load ends. Wait until the model is ready with that memory."""
    pid: int = wait_until(lambda: serving.status(model)["pid"], 30, "a process")
    box.holds(0, pid, size * GIB)
    serving.wait_state(model, "ready", 30)
    wait_until(lambda: serving.status(model)["vram_bytes"] == size * GIB, 10, "NVML to tell of it")
    return pid


@pytest.mark.long
def test_an_idle_model_makes_room_and_a_busy_one_is_waited_for(serve: Serve, box: Box) -> None:
    models = {name: lazy("SlowLoad", load_s=1, gpu=0, vram="50GiB", step_s=0.01) for name in "ab"}
    serving = serve(models, wait=False)
    with serving.client() as client:
        busy = client.generate("a", "busy", max_tokens=400)
        first = held(serving, box, "a", 50)
        waiting = client.generate("b", "waits", max_tokens=3)
        wait_until(lambda: "b: needs 50.0 GiB" in serving.log(), 10, "the word that it waits")
        assert serving.status("a")["state"] == "ready"
        assert busy.complete().text == answer("busy", 400), "nobody is unloaded in the midst of an answer"
        wait_until(lambda: serving.status("a")["pid"] != first, 30, "the idle one to leave")
        again = client.generate("a", "again", max_tokens=3)
        assert serving.status("b")["pid"] is None, "it waits for the memory"
        box.gives_back(first)
        second = held(serving, box, "b", 50)
        assert waiting.complete().text == answer("waits", 3)
        wait_until(lambda: serving.status("b")["state"] == "unloaded", 30, "the other to be evicted in turn")
        box.gives_back(second)
        held(serving, box, "a", 50)
        assert again.complete().text == answer("again", 3)
        assert serving.status("b")["unloaded"] == "evicted for a"
    assert "a: ready -> stopping (evicted for b)" in serving.log()


@pytest.mark.long
def test_pinned_models_and_those_that_do_not_come_back_stay(serve: Serve, box: Box) -> None:
    models = {
        "pinned": lazy(gpu=0, vram="30GiB", autostart=True, pinned=True),
        "plain": engine(gpu=0, vram="30GiB"),
        "late": lazy(gpu=0, vram="50GiB"),
    }
    serving = serve(models, wait=False)
    pids = [held(serving, box, name, 30) for name in ("pinned", "plain")]
    with serving.client() as client:
        for _ in range(2):
            with pytest.raises(WireError, match=r"needs 50.0 GiB .*: pinned 30.0, plain 30.0") as caught:
                client.complete("late", "x")
            assert caught.value.code is ErrorCode.MODEL_FAILED
        assert caught.value.retry_after_ms == 10_000
        assert serving.status("late")["generation"] == 1, "the second was refused at once"
        for pid in pids:
            box.gives_back(pid)
        serving.order("stop", model="plain")
        serving.wait_state("late", "unloaded", 30)
        assert client.complete("late", "x", max_tokens=3).text == answer("x", 3)
    assert serving.status("pinned")["pid"] == pids[0]


def test_run_wakes_it(serve: Serve) -> None:
    serving = serve({"a": lazy("SlowLoad", load_s=0.3)}, wait=False)
    done = serving.modelctl("run", "a", "hello", "--set", "max_tokens=5")
    assert (done.returncode, done.stdout) == (0, answer("user: hello", 5) + "\n")
    assert "a: unloaded\n" in done.stderr
    assert "a: loading\n" in done.stderr


def test_a_load_may_take_longer_than_others_wait_for_the_idle(serve: Serve, box: Box, tmp_path: Path) -> None:
    script = tmp_path / "hurried.py"
    script.write_text(
        "from modelctl import cli\nfrom supervisor.placement import eviction\neviction.IDLE_WAIT_S = 0.3\n"
        "if __name__ == '__main__':\n    raise SystemExit(cli.main())\n"
    )
    models = {name: lazy("SlowLoad", load_s=1, gpu=0, vram="50GiB") for name in "ab"}
    serving = serve(models, wait=False, script=script)
    with serving.client() as client:
        first = client.generate("a", "first", max_tokens=3)
        serving.wait_state("a", "loading")
        second = client.generate("b", "second", max_tokens=3)
        assert first.complete().text == answer("first", 3)
        assert second.complete().text == answer("second", 3)
