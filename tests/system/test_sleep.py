"""Lazy models go to sleep in host memory, and their next request wakes them."""

import os
import random
import signal
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.nvml_box import GIB, Box
from tests.serving import Serving, engine, wait_until

SLEEPER = "tests.sleeping_engine:Sleeper"


def sleeper(gib: int = 0, **keys: Any) -> dict[str, Any]:
    options = keys.pop("options", {})
    on_gpu = {"gpu": 0, "vram": f"{gib}GiB"} if gib else {}
    options = {"step_s": 0.002, **({"gib": gib} if gib else {}), **options}
    return {"model_dir": ".", "engine": SLEEPER, "lazy": True, "options": options, **on_gpu, **keys}


def asleep(serving: Serving, model: str) -> dict[str, Any]:
    return serving.wait_state(model, "asleep", 30)


def test_an_idle_model_sleeps_and_a_request_wakes_it(serve: Serve) -> None:
    serving = serve({"a": sleeper(sleep_after="1s", autostart=True)})
    before = serving.status("a")
    pid = before["pid"]
    assert before["can_sleep"]
    status = asleep(serving, "a")
    assert (status["pid"], status["host_bytes"], status["reason"]) == (pid, GIB, "idle for 1 s")
    with serving.client() as client:
        assert client.call("tokenize", model="a", prompt="abc")["count"] == 3, "its tokenizer is awake"
        assert serving.status("a")["state"] == "asleep"
        assert client.complete("a", "here", max_tokens=5).text == answer("here", 5)
    status = serving.status("a")
    assert (status["pid"], status["generation"]) == (pid, 1)
    assert status["wake_s"] is not None


def test_orders_put_it_to_sleep_and_wake_it(serve: Serve) -> None:
    serving = serve({"a": sleeper(autostart=True, ttl="1h")})
    for turn in range(3):
        done = serving.modelctl("sleep", "a")
        assert (done.returncode, serving.status("a")["state"]) == (0, "asleep"), done.stderr
        assert serving.modelctl("ps").stdout.splitlines()[1].split()[:2] == ["a", "asleep"]
        if turn < 2:
            done = serving.modelctl("wake", "a")
            assert (done.returncode, serving.status("a")["state"]) == (0, "ready"), done.stderr
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    with pytest.raises(WireError, match="only a model that is ready can be put to sleep"):
        serving.order("sleep", model="a")
    with pytest.raises(WireError, match="not asleep: start it with `modelctl start a`"):
        serving.order("wake", model="a")
    serving.order("start", model="a")
    serving.wait_state("a", "ready")
    serving.order("sleep", model="a")
    asleep(serving, "a")
    serving.order("restart", model="a")
    assert serving.wait_state("a", "ready", 30)["generation"] == 3


def test_a_busy_model_sleeps_when_its_answers_are_whole(serve: Serve) -> None:
    serving = serve({"a": sleeper(autostart=True, options={"step_s": 0.01})})
    with serving.client() as client:
        stream = client.generate("a", "long", max_tokens=150)
        wait_until(lambda: serving.status("a")["active"], 10, "it to begin")
        serving.order("sleep", model="a")
        assert stream.complete().text == answer("long", 150)
        asleep(serving, "a")
    assert "a: ready -> falling_asleep (sleep ordered)" in serving.log()


def test_who_cannot_sleep_says_why(serve: Serve) -> None:
    models = {
        "plain": engine(),
        "pinned": sleeper(autostart=True, pinned=True),
        "off": sleeper(autostart=True, sleep="off"),
        "other": engine(lazy=True, autostart=True),
    }
    serving = serve(models)
    assert not any(serving.status(name)["can_sleep"] for name in models)
    reasons = {"plain": "lazy: true", "pinned": "pins it", "off": "sleep: off", "other": "its engine does not offer it"}
    for name, reason in reasons.items():
        with pytest.raises(WireError, match=reason) as caught:
            serving.order("sleep", model=name)
        assert caught.value.code is ErrorCode.UNSUPPORTED


def test_requests_at_every_moment_of_its_sleep_are_answered(serve: Serve) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    serving = serve({"a": sleeper(autostart=True, options={"sleep_s": 0.05, "wake_s": 0.05})})
    with serving.client() as client:
        for number in range(12):
            serving.order("sleep", model="a")
            wait_until(lambda: serving.status("a")["state"] != "ready", 10, "it to begin")
            streams = [client.generate("a", f"{number} {k}", max_tokens=5) for k in range(chance.randint(1, 3))]
            if chance.random() < 0.5:
                serving.order(chance.choice(["sleep", "wake", "start"]), model="a")
            for k, stream in enumerate(streams):
                assert stream.complete().text == answer(f"{number} {k}", 5)
            serving.wait_idle("a")
    assert serving.status("a")["generation"] == 1


# ---- faults


@pytest.mark.long
@pytest.mark.parametrize("moment", ["sleep", "wake"])
def test_a_worker_that_dies_on_the_way_costs_no_request(serve: Serve, moment: str) -> None:
    serving = serve({"a": sleeper(autostart=True, options={"faults": {moment: "kill"}})})
    serving.order("sleep", model="a")
    status = serving.wait_state("a", "unloaded" if moment == "sleep" else "asleep", 30)
    if moment == "sleep":
        assert "its process ended while it slept" in status["reason"]
    with serving.client() as client:
        assert client.complete("a", "after it", max_tokens=5).text == answer("after it", 5)
    assert serving.status("a")["generation"] == 2


def test_a_worker_that_is_killed_asleep_is_started_by_the_next_request(serve: Serve) -> None:
    serving = serve({"a": sleeper(autostart=True)})
    serving.order("sleep", model="a")
    os.kill(asleep(serving, "a")["pid"], signal.SIGKILL)
    status = serving.wait_state("a", "unloaded", 30)
    assert "its process ended while it slept" in status["reason"]
    with serving.client() as client:
        assert client.complete("a", "again", max_tokens=5).text == answer("again", 5)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["sleep", "wake"])
def test_a_move_that_hangs_has_a_lease_of_its_own(serve: Serve, moment: str) -> None:
    watch = {"move": "1s", "step": "60s", "load": "60s"}
    serving = serve({"a": sleeper(autostart=True, options={"faults": {moment: "hang"}})}, watch=watch)
    serving.order("sleep", model="a")
    with serving.client() as client:
        assert client.complete("a", "x", max_tokens=5, timeout=60).text == answer("x", 5)
    assert "while going to sleep or waking (lease 1 s)" in serving.log()


def test_a_model_that_cannot_sleep_now_is_unloaded(serve: Serve) -> None:
    serving = serve({"a": sleeper(autostart=True, options={"refuses": "host memory is exhausted"})})
    serving.order("sleep", model="a")
    status = serving.wait_state("a", "unloaded", 30)
    assert status["unloaded"] == "sleep ordered; it cannot sleep: host memory is exhausted"
    with serving.client() as client:
        assert client.complete("a", "x", max_tokens=5).text == answer("x", 5)


def test_a_reload_that_changes_a_sleeping_model_ends_it(serve: Serve) -> None:
    serving = serve({"a": sleeper(autostart=True), "b": sleeper(autostart=True)})
    for name in "ab":
        serving.order("sleep", model=name)
        asleep(serving, name)
    serving.write_models({"a": sleeper(autostart=True, max_batch_size=3), "b": sleeper(autostart=True)})
    serving.order("reload")
    assert serving.wait_state("a", "unloaded", 30)["unloaded"] == "its configuration has changed"
    assert serving.status("b")["state"] == "asleep"
    with serving.client() as client:
        assert client.complete("a", "x", max_tokens=5).text == answer("x", 5)
    assert serving.status("a")["max_batch_size"] == 3


# ---- memory


def test_models_in_turn_sleep_for_one_another(serve: Serve, box: Box) -> None:
    box.lists_the_living()
    serving = serve({name: sleeper(50) for name in "abc"}, wait=False)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with serving.client() as client:
        for number in range(15):
            name = "abc"[number] if number < 3 else chance.choice("abc")
            assert client.complete(name, f"n {number}", max_tokens=5, timeout=60).text == answer(f"n {number}", 5)
    for name in "abc":
        assert serving.status(name)["generation"] == 1, "each was loaded once"
    states = sorted(serving.status(name)["state"] for name in "abc")
    assert states == ["asleep", "asleep", "ready"]
    assert "putting to sleep" in serving.log()


@pytest.mark.long
def test_no_room_to_wake_is_told_with_the_arithmetic(serve: Serve, box: Box) -> None:
    box.lists_the_living()
    serving = serve({"a": sleeper(50, autostart=True), "b": {**sleeper(50, autostart=False), "lazy": False}})
    serving.order("sleep", model="a")
    asleep(serving, "a")
    serving.order("start", model="b")
    serving.wait_state("b", "ready", 30)
    with serving.client() as client:
        with pytest.raises(WireError, match=r"needs 49.5 GiB more on GPU 0 to wake, GPU 0 has 29.5 of 80.0 free") as no:
            client.complete("a", "x")
        assert (no.value.code, no.value.retry_after_ms) == (ErrorCode.MODEL_FAILED, 10_000)
        assert serving.status("a")["state"] == "asleep"
        serving.order("stop", model="b")
        serving.wait_state("b", "stopped", 30)
        assert client.complete("a", "x", max_tokens=5).text == answer("x", 5)
    assert serving.status("a")["generation"] == 1


@pytest.mark.long
def test_host_memory_bounds_the_sleepers(serve: Serve) -> None:
    models = {name: sleeper(autostart=True, options={"host_gib": 4}) for name in "abc"}
    models["d"] = sleeper(autostart=True, options={"host_gib": 11})
    serving = serve(models, host_memory="10GiB")
    for name in "abc":
        serving.order("sleep", model=name)
        asleep(serving, name)
    assert serving.wait_state("a", "unloaded", 30)["unloaded"] == "made room in host memory for c"
    assert serving.status("b")["state"] == "asleep"
    serving.order("sleep", model="d")
    assert "it would take 11.0 GiB of host memory" in serving.wait_state("d", "unloaded", 30)["unloaded"]
    assert serving.status("b")["state"] == serving.status("c")["state"] == "asleep", "nobody left for nothing"


@pytest.mark.long
def test_the_demo_models_answer_the_same_after_a_sleep(serve: Serve) -> None:
    demo = {"engine": "transformers", "gpu": "cpu", "lazy": True, "autostart": True, "model_dir": "demo:letters"}
    serving = serve({"letters": demo})
    with serving.client() as client:
        ask = {"max_tokens": 40, "temperature": 0}
        first = client.complete("letters", "reverse: abcdef", **ask).text
        for _ in range(2):
            serving.order("sleep", model="letters")
            status = asleep(serving, "letters")
            assert status["host_bytes"] > 1_000_000
            assert client.complete("letters", "reverse: abcdef", **ask).text == first
    assert serving.status("letters")["generation"] == 1
