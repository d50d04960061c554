"""Workers that hang in any way are found, killed and replaced. Slow workers are left alone."""

import os
import signal
import time

import psutil
import pytest

from modelctl import Client
from protocol.client.stream_base import StreamBase
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import Serving, engine, is_alive, wait_until

WATCH = {"start": "60s", "load": 2, "idle": 2, "step": 2}
LEASE_S = 2.0
LONG = 100_000


def hanging(kind: str, **keys: object) -> dict[str, object]:
    return {**engine(context=LONG, **keys), "engine": f"tests.hanging_engines:{kind}"}


def started(client: Client, model: str, prompt: str, tokens: int) -> StreamBase:
    """Return a stream after its first events have arrived."""
    stream = client.generate(model, prompt, max_tokens=tokens)
    next(stream)
    return stream


@pytest.mark.long
def test_every_hang_is_found_and_its_requests_go_on(serve: Serve) -> None:
    in_steps = ("gil", "loop", "sleep", "stop")
    models = {how: hanging("HangsOnce") for how in in_steps}
    models |= {"idle": engine(), "loading": engine("SlowLoad", load_s=1.0), "stuck": hanging("HangsInLoad")}
    models["leaving"] = hanging("HangsOnce")
    models["other"] = engine(context=LONG, step_s=0.01)
    early = serve({"early": engine()}, watch={"start": 5}, wait=False)
    newborn = psutil.Process(wait_until(lambda: early.status("early")["pid"], 30))
    newborn.send_signal(signal.SIGSTOP)
    first_phase = early.status("early")["phase"]
    serving = serve(models, watch=WATCH, wait=False)
    serving.wait_state("loading", "loading", 60)
    stopped = serving.worker("loading")
    stopped.send_signal(signal.SIGSTOP)
    for model in (*in_steps, "idle", "leaving", "other"):
        serving.wait_state(model, "ready", 60)

    with serving.client() as client:
        bystander = started(client, "other", "b", 500)
        idle = serving.worker("idle")
        idle.send_signal(signal.SIGSTOP)
        streams = {how: started(client, how, f"hang {how}", 40) for how in in_steps}
        left = started(client, "leaving", "hang gil", 40)
        first = {how: serving.worker(how) for how in in_steps}
        serving.order("stop", model="leaving")
        for how, stream in streams.items():
            completion = stream.complete()
            assert completion.text == answer(f"hang {how}", 40)
            assert completion.usage["resumes"] == 1
        assert not any(is_alive(process) for process in (stopped, idle, *first.values()))
        assert bystander.complete().text == answer("b", 500)
        left.cancel()

    for model in (*in_steps, "idle", "loading", "stuck"):
        status = serving.wait_state(model, "ready", 60)
        assert (status["generation"], status["last_exit"]["reason"]) == (2, "hung"), model
        assert status["last_exit"]["code"] == -signal.SIGKILL
    assert serving.status("other")["generation"] == 1

    report = {model: serving.status(model)["last_exit"]["message"] for model in models if model != "other"}
    for how in in_steps:
        assert "in a step (lease 2 s)" in report[how]
    assert "while idle (lease 2 s)" in report["idle"]
    assert "while loading (lease 2 s)" in report["loading"]
    assert "while loading (lease 2 s)" in report["stuck"]
    assert all("it is stopped (SIGSTOP)" in report[model] for model in ("stop", "idle", "loading"))
    assert "it is computing" in report["loop"]

    # the log has the stacks of all workers that can write them, and `status` has them in short
    for model, where in (("gil", "hang"), ("loop", "hang"), ("sleep", "hang"), ("stuck", "load")):
        assert "most recent call first" in serving.log(model)
        lines = serving.status(model)["last_exit"]["lines"]
        assert lines[0].startswith(("Current thread", "Thread"))
        assert any(f"in {where}" in line for line in lines)
        assert "in before_token" in serving.log(model) or model == "stuck"
    assert "in hang" in serving.modelctl("status", "gil", "-v").stdout

    status = serving.wait_state("leaving", "stopped", 30)
    assert (status["last_exit"]["reason"], status["phase"], status["beat_s"]) == ("hung", None, None)
    assert serving.wait_state("idle", "ready")["phase"] == "idle"

    if first_phase == "starting":  # the worker may have been too fast for the test
        status = early.wait_state("early", "ready", 60)
        assert status["last_exit"]["reason"] == "hung"
        assert "before it came up (lease 5 s); it is stopped" in status["last_exit"]["message"]
        assert not is_alive(newborn)


@pytest.mark.long
def test_what_is_slow_is_not_hung(serve: Serve) -> None:
    """Parts of a load and steps may take half of their leases, and the supervisor may pause. No worker is killed."""
    slow_load = {**hanging("LoadsInParts"), "options": {"parts": 3, "part_s": 1.0}}
    serving = serve(
        {"load": slow_load, "steps": engine(step_s=1.0), "idle": engine(), "fast": engine(context=LONG)},
        watch=WATCH,
        wait=False,
    )
    for model in ("steps", "fast", "idle"):
        serving.wait_state(model, "ready", 60)
    with serving.client() as client:
        slow, fast = started(client, "steps", "s", 4), started(client, "fast", "f", 1500)
        os.kill(serving.pid, signal.SIGSTOP)
        time.sleep(LEASE_S + 0.5)
        os.kill(serving.pid, signal.SIGCONT)
        assert slow.complete().text == answer("s", 4)
        assert fast.complete().text == answer("f", 1500)
    serving.wait_state("load", "ready", 60)
    assert [m["generation"] for m in serving.overview()["models"]] == [1, 1, 1, 1]
    assert "hung" not in serving.log()

    # a worker that goes on while its stacks are written is spared, and writing them does no harm
    worker = serving.worker("idle")
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: "hung" in serving.log(), 30)
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: "goes on after all" in serving.log() or not is_alive(worker), 30)
    if is_alive(worker):  # on a busy machine the supervisor may have been first
        with serving.client() as client:
            assert client.complete("idle", "x", max_tokens=5).text == answer("x", 5)
        assert serving.status("idle")["generation"] == 1
        assert "most recent call first" in serving.log("idle")


FAULTY = """
import runpy, sys
import supervisor.loop

def broken(self):
    raise RuntimeError("a fault put in by a test")

if __name__ == "__main__":  # workers import this file again
    supervisor.loop.Supervisor._sample = broken
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
"""


def test_a_supervisor_with_a_fault_of_its_own_says_so_and_leaves_with_a_code(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("faulty") / "faulty.py"
    script.write_text(FAULTY)
    serving: Serving = serve({"a": engine(), "b": engine("SlowLoad")}, script=script, wait=False)
    before: list[psutil.Process] = serving.processes()
    serving._killed = True  # the supervisor ends by itself
    assert serving.process.wait(30) == 70
    wait_until(lambda: not [p for p in (*before, *serving.processes()) if is_alive(p)], 10, "the end of its processes")
    assert "the supervisor stops because of a fault of its own" in serving.log()
    assert "a fault put in by a test" in serving.log()
