"""A stop drains, climbs the stop ladder, and does not affect other models."""

import os
import signal

import pytest

from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Cancel, Events
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

LONG = 100_000
QUICK = {"drain": "100ms", "shutdown": "200ms", "sigterm": "200ms"}


def hang(serving: Serving, client: object) -> None:
    """Make the engine of ``a`` hang in its step."""
    stream = client.generate("a", "bad", max_tokens=50)  # type: ignore[attr-defined]
    for _ in range(5):
        next(stream)
    serving.kept.append(stream)  # a dropped stream would be cancelled, perhaps before the engine hangs


def rungs(serving: Serving, model: str) -> list[str]:
    """Return the rungs of the stop ladder that the supervisor's log shows."""
    lines = [line.split(f"{model}: ", 1)[1] for line in serving.log().splitlines() if f"{model}: " in line]
    return [line.split()[0] for line in lines if line.startswith(("SHUTDOWN", "SIG"))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "hangs", "climbed", "code"),
    [
        ("DeterministicEngine", False, ["SHUTDOWN"], 0),
        ("HangsAtToken", True, ["SHUTDOWN", "SIGTERM"], -signal.SIGTERM),
        ("HangsDeaf", True, ["SHUTDOWN", "SIGTERM", "SIGKILL"], -signal.SIGKILL),
    ],
)
def test_each_rung_ends_what_the_one_before_cannot(
    serve: Serve, kind: str, hangs: bool, climbed: list[str], code: int
) -> None:
    serving = serve({"a": engine(kind), "b": engine()}, stop=QUICK)
    with serving.client() as client:
        bystander = client.generate("b", "b", max_tokens=400)
        if hangs:
            hang(serving, client)
        serving.order("stop", model="a")
        status = serving.wait_state("a", "stopped")
        assert rungs(serving, "a") == climbed
        assert (status["last_exit"]["code"], status["last_exit"]["reason"]) == (code, "asked")
        assert status["pid"] is None
        assert bystander.complete().text == answer("b", 400)
    serving.order("start", model="a")
    serving.wait_state("a", "ready")


def test_a_stopped_process_is_ended_too(serve: Serve) -> None:
    serving = serve({"a": engine()}, stop=QUICK)
    serving.worker("a").send_signal(signal.SIGSTOP)
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")


def test_a_loading_worker_is_not_asked_but_ended(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad")}, wait=False)
    serving.wait_state("a", "loading")
    with serving.client() as client:
        waiting = client.generate("a", "x", max_tokens=1)
        wait_until(lambda: serving.status("a")["queued"] == 1)
        serving.order("stop", model="a")
        with pytest.raises(WireError) as caught:
            waiting.complete()
        assert caught.value.code is ErrorCode.DRAINING
    serving.wait_state("a", "stopped")
    assert rungs(serving, "a") == ["SIGTERM"]


def test_now_does_not_wait_for_requests(serve: Serve) -> None:
    serving = serve({"a": engine(context=2 * LONG)}, stop={"drain": "5m"})
    with serving.client() as client:
        stream = client.generate("a", "x", max_tokens=LONG)
        next(stream)
        serving.order("stop", model="a", now=True)
        with pytest.raises(WireError) as caught:
            stream.complete()
        assert caught.value.code is ErrorCode.DRAINING
        serving.wait_state("a", "stopped")


def test_now_cuts_a_drain_short(serve: Serve) -> None:
    serving = serve({"a": engine(context=2 * LONG)}, stop={"drain": "5m"})
    with serving.client() as client:
        stream = client.generate("a", "x", max_tokens=LONG)
        next(stream)
        serving.order("stop", model="a")
        assert serving.status("a")["state"] == "draining"
        serving.order("stop", model="a", now=True)
        with pytest.raises(WireError):
            stream.complete()
    serving.wait_state("a", "stopped")


def test_during_shutdown_new_requests_are_told_that_the_supervisor_drains(serve: Serve) -> None:
    """This holds in every state of a model: stopped before the shutdown, stopped by it, finishing a request, or waiting
    for its next start after a failure."""
    serving = serve(
        {
            "up": engine(context=2 * LONG),
            "idle": engine(),
            "off": engine(autostart=False),
            "crashing": engine("CrashesInLoad", autostart=False),
        },
        restart={"initial": "5m", "max": "5m"},
        stop={"drain": "5m"},
    )
    serving.order("start", model="crashing")
    serving.wait_state("crashing", "backoff")
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "up", "x", max_tokens=LONG)
        client.generate(2, "crashing", "waits", max_tokens=1)
        while not isinstance(client.receive(), Events):
            pass
        wait_until(lambda: serving.status("crashing")["queued"] == 1)
        serving.order("shutdown")
        serving.wait_state("idle", "stopped")
        models = ["up", "idle", "off", "crashing"]
        for number, model in enumerate(models, start=10):
            client.generate(number, model, "new", max_tokens=1)
            client.send(Call(number, "tokenize", pack_body({"model": model, "prompt": "x"})))
        client.generate(20, "nosuch", "new", max_tokens=1)
        client.barrier()
        assert [(number, error["name"]) for number, error in client.errors] == [
            *((number, "draining") for number in range(10, 14)),
            (20, "model_not_found"),
        ]
        assert all(error["retryable"] for number, error in client.errors if number < 20)
        assert client.heard[2].ends == ["draining"], "it was accepted before"
        reported = [reply["error"]["name"] for reply in client.replies if "error" in reply]  # type: ignore[index]
        assert reported == ["draining"] * 4
        client.send(Cancel(1))
        while not client.heard[1].ends:  # a PING might get no answer: the supervisor leaves when nothing runs
            client.receive()
        assert client.heard[1].ends == ["cancelled"]
    assert serving.process.wait(60) == 0


def test_requests_that_come_when_every_model_is_stopped_are_told_that_the_supervisor_drains(serve: Serve) -> None:
    """A gateway that hangs keeps the supervisor for some seconds. Such requests heard that the connection is lost."""
    serving = serve({"a": engine()}, gateway={"listen": free_port(), "auth": "none"})
    gateway = wait_until(lambda: serving.overview()["supervisor"]["gateway"]["pids"], what="a gateway")[0]
    os.kill(gateway, signal.SIGSTOP)
    with RawClient(serving.runtime_dir) as client:
        client.barrier()
        os.kill(serving.pid, signal.SIGTERM)
        wait_until(lambda: "every model is stopped; leaving" in serving.log(), what="the end of the models")
        client.generate(1, "a", "too late", max_tokens=3)
        while not client.errors:
            client.receive()
    ((_, error),) = client.errors
    assert (error["name"], error["retryable"]) == ("draining", True)
    serving.process.wait()


def test_draining_finishes_what_runs_and_takes_nothing_new(serve: Serve) -> None:
    serving = serve({"a": engine(), "b": engine()})
    with serving.client() as client:
        running = client.generate("a", "running", max_tokens=250)
        bystander = client.generate("b", "bystander", max_tokens=400)
        next(running)
        next(bystander)
        serving.order("stop", model="a")
        assert serving.status("a")["state"] == "draining"
        with pytest.raises(WireError) as caught:
            client.complete("a", "new", max_tokens=1)
        assert caught.value.code is ErrorCode.DRAINING
        assert caught.value.retry_after_ms
        assert caught.value.retryable
        assert running.complete().text == answer("running", 250)
        status = serving.wait_state("a", "stopped")
        assert (status["last_exit"]["code"], rungs(serving, "a")) == (0, ["SHUTDOWN"])
        with pytest.raises(WireError) as caught:
            client.complete("a", "new", max_tokens=1)
        assert caught.value.code is ErrorCode.MODEL_NOT_RUNNING
        assert "modelctl start a" in caught.value.message
        assert bystander.complete().text == answer("bystander", 400)
        serving.order("start", model="a")
        assert client.complete("a", "again", max_tokens=6).text == answer("again", 6)


def test_requests_outlasting_the_drain_end_with_an_error(serve: Serve) -> None:
    serving = serve({"a": engine(context=2 * LONG)}, stop={"drain": "200ms"})
    with serving.client() as client:
        streams = [client.generate("a", f"x {i}", max_tokens=LONG) for i in range(3)]
        for stream in streams:
            next(stream)
        serving.order("stop", model="a")
        for i, stream in enumerate(streams):
            with pytest.raises(WireError) as caught:
                stream.complete()
            assert caught.value.code is ErrorCode.DRAINING
            assert stream.text == answer(f"x {i}", len(stream.token_ids))
        assert serving.wait_state("a", "stopped")["last_exit"]["code"] == 0


def test_a_start_during_the_way_down_is_remembered(serve: Serve) -> None:
    serving = serve({"a": engine()})
    with serving.client() as client:
        running = client.generate("a", "running", max_tokens=200)
        next(running)
        serving.order("restart", model="a")
        assert serving.status("a")["state"] == "draining"
        assert running.complete().text == answer("running", 200)
        wait_until(lambda: serving.status("a")["generation"] == 2)
        serving.wait_state("a", "ready")
        assert client.complete("a", "again", max_tokens=6).text == answer("again", 6)


def test_shutdown_waits_for_running_requests_and_takes_no_orders(serve: Serve) -> None:
    serving = serve({"a": engine(), "b": engine(autostart=False)})
    with serving.client() as client, serving.client(admin=True) as admin:
        running = client.generate("a", "running", max_tokens=250)
        next(running)
        admin.call("shutdown", reply_timeout=60)
        # a model that started now would keep the supervisor from leaving
        for verb in ("start", "restart"):
            with pytest.raises(WireError) as caught:
                admin.call(verb, model="b", reply_timeout=60)
            assert caught.value.code is ErrorCode.DRAINING
        assert running.complete().text == answer("running", 250)
    assert serving.process.wait(60) == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait(serve: Serve, number: int) -> None:
    serving = serve({"a": engine("HangsDeaf")})
    with serving.client() as client:
        hang(serving, client)
        serving.process.send_signal(number)
        wait_until(lambda: serving.overview()["supervisor"]["shutting_down"])
        serving.process.send_signal(number)
        assert serving.process.wait(60) == 0
