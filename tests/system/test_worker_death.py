"""After a worker's death its requests end once, other models are not affected, and it is started again or given up."""

import os
import signal

import psutil
import pytest

from modelctl import Client
from protocol.client.stream_base import StreamBase
from protocol.errors import ErrorCode, WireError
from protocol.messages import Credit
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import Serving, engine, is_alive, wait_until

LONG = 100_000


def first_tokens(client: Client, model: str, count: int, *, tokens: int = LONG) -> list[StreamBase]:
    """Return streams that have begun to arrive."""
    streams = [client.generate(model, f"{model} {i}", max_tokens=tokens) for i in range(count)]
    for stream in streams:
        next(stream)
    return streams


def test_kill_in_mid_stream(serve: Serve) -> None:
    serving = serve({"a": engine(context=2 * LONG, step_s=0.001), "b": engine(context=2 * LONG)})
    pid = serving.status("a")["pid"]
    with RawClient(serving.runtime_dir) as victim, serving.client() as other:
        # two requests are computed, the others wait in the worker and in the supervisor
        for request in range(1, 15):
            victim.generate(request, "a", f"a {request}", max_tokens=500)
        while len(victim.heard) < 8:
            victim.receive()
        bystanders = first_tokens(other, "b", 4, tokens=600)

        os.kill(pid, signal.SIGKILL)
        for request in range(1, 15):
            victim.send(Credit(request, 256))
        victim.read_until_ended(*range(1, 15))
        for request in range(1, 15):
            heard = victim.heard[request]
            assert heard.ends == ["length"]
            assert not heard.after_end
            assert heard.seqs == list(range(len(heard.seqs)))
            assert heard.text == answer(f"a {request}", 500)
        assert victim.heard[1].usage == {"prompt_tokens": 3, "completion_tokens": 500, "resumes": 1}

        for i, stream in enumerate(bystanders):
            assert stream.complete().text == answer(f"b {i}", 600)
        status = serving.wait_state("a", "ready")
        assert (status["generation"], status["restarts"], status["last_exit"]["reason"]) == (2, 1, "killed")
        assert status["totals"]["resumed"] >= 8
        assert (serving.status("b")["generation"], serving.status("b")["restarts"]) == (1, 0)


def test_an_engine_exception_ends_the_process_and_it_comes_back(serve: Serve) -> None:
    serving = serve({"a": engine("RaisesAtToken"), "b": engine()})
    with serving.client() as client:
        bystander = client.generate("b", "b", max_tokens=300)
        stream = client.generate("a", "bad", max_tokens=50)
        with pytest.raises(WireError) as caught:
            stream.complete()
        assert caught.value.code is ErrorCode.POISONED, "it was tried once more, alone"
        assert not caught.value.retryable
        assert stream.text == answer("bad", len(stream.token_ids))
        assert client.complete("a", "good", max_tokens=10).text == answer("good", 10)
        assert bystander.complete().text == answer("b", 300)
    status = serving.status("a")
    assert status["last_exit"]["code"] == 70
    assert status["last_exit"]["reason"] == "engine fault"
    assert "the engine broke" in status["last_exit"]["message"]
    assert "Traceback" in serving.log("a")


def test_a_crash_loop_ends_in_failed_until_started(serve: Serve) -> None:
    serving = serve(
        {"a": engine("CrashesInLoad", autostart=False), "b": engine()},
        restart={"limit": 3, "initial": "20ms", "max": "200ms"},
    )
    with serving.client() as client:
        bystander = client.generate("b", "b", max_tokens=1000)
        serving.order("start", model="a")
        waiting = client.generate("a", "hopeful", max_tokens=5)
        with pytest.raises(WireError) as caught:
            waiting.complete()
        assert caught.value.code is ErrorCode.MODEL_FAILED
        assert "the disk hiccupped" in caught.value.message
        status = serving.status("a")
        assert (status["state"], status["generation"], status["pid"]) == ("failed", 3, None)
        with pytest.raises(WireError, match="modelctl start a"):
            client.complete("a", "too late", max_tokens=5)

        # an operator's start allows the full number of tries again
        serving.order("start", model="a")
        assert serving.status("a")["state"] != "failed"
        assert serving.wait_state("a", "failed")["generation"] == 6
        serving.order("stop", model="a")
        assert serving.status("a")["state"] == "stopped"
        assert bystander.complete().text == answer("b", 1000)


def test_what_a_person_must_mend_is_not_retried(serve: Serve) -> None:
    serving = serve({"a": engine("CannotLoad", autostart=False), "b": engine(autostart=False)})
    serving.order("start", model="a")
    with serving.client() as client, pytest.raises(WireError) as caught:
        client.complete("a", "x", max_tokens=1)
    assert caught.value.code is ErrorCode.MODEL_FAILED
    assert "config.json says the moon is made of cheese" in caught.value.message
    status = serving.wait_state("a", "failed")
    assert (status["generation"], status["restarts"], status["last_exit"]["code"]) == (1, 0, 78)


@pytest.mark.parametrize("target", ["no.such.module:Engine", "tests.deterministic_engine:NoSuchClass"])
def test_an_engine_that_does_not_exist_is_not_retried(serve: Serve, target: str) -> None:
    serving = serve({"a": {**engine(), "engine": target}}, wait=False)
    status = serving.wait_state("a", "failed")
    assert (status["generation"], status["last_exit"]["code"]) == (1, 78)
    assert (
        target.replace(":", ".").split(".")[-1] in status["last_exit"]["message"]
        or target in status["last_exit"]["message"]
    )


def test_unknown_options_are_refused_by_name(serve: Serve) -> None:
    serving = serve({"a": {**engine(), "options": {"stepp_s": 1}}}, wait=False)
    assert "stepp_s" in serving.wait_state("a", "failed")["last_exit"]["message"]


def test_what_a_dead_worker_started_is_killed(serve: Serve) -> None:
    serving = serve({"a": engine("ForksChild")})
    child = forked_child(serving, "a")
    os.kill(serving.status("a")["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(child), what="the end of the worker's child")
    wait_until(lambda: serving.status("a")["generation"] == 2)
    serving.wait_state("a", "ready")


def forked_child(serving: Serving, model: str) -> psutil.Process:
    """Return the child process that ForksChild started last."""
    child = psutil.Process(int(serving.log(model).rsplit("child pid ", 1)[1].split()[0]))
    assert is_alive(child)
    return child
