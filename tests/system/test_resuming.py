"""Streams survive the death of their worker, and the request that is to blame is found."""

import os
import signal

import pytest

from protocol.messages import Cancel, Credit
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import Heard, RawClient
from tests.serving import Serving, engine, is_alive, wait_until

WINDOW = 256


def has_tokens(client: RawClient, request: int, count: int) -> None:
    while client.heard.get(request, Heard()).tokens < count:
        client.receive()


def kill(serving: Serving, worker: str) -> None:
    process = serving.worker(worker)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(process), what="the worker to be gone")


def test_a_stream_goes_on_in_another_worker_at_once(serve: Serve) -> None:
    """The other replica is ready, so the stream need not wait."""
    serving = serve({"a": engine(step_s=0.005, replicas=2)})
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 9):
            client.generate(request, "a", f"on {request}", max_tokens=200)
        for request in range(1, 9):
            has_tokens(client, request, 5)
        assert {serving.status(worker)["active"] for worker in ("a:1", "a:2")} == {4}, "the least busy one is chosen"
        kill(serving, "a:1")
        client.read_until_ended(*range(1, 9))
        for request in range(1, 9):
            heard = client.heard[request]
            assert (heard.text, heard.ends) == (answer(f"on {request}", 200), ["length"])
            assert heard.seqs == list(range(200))
        assert sorted(client.heard[r].usage.get("resumes", 0) for r in range(1, 9)) == [0] * 4 + [1] * 4
    assert serving.status("a:1")["totals"]["resumed"] == 4


@pytest.mark.long
def test_what_is_held_for_a_slow_client_is_part_of_what_goes_on(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.001)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "slow", max_tokens=1000)
        has_tokens(client, 1, WINDOW)
        wait_until(lambda: serving.status("a")["totals"]["tokens"] > WINDOW + 100, what="events to be held")
        kill(serving, "a")
        client.send(Credit(1, WINDOW))
        while not client.heard[1].ends:
            client.send(Credit(1, 100))
            client.barrier()
        assert client.heard[1].text == answer("slow", 1000)
        assert client.heard[1].seqs == list(range(1000))
        assert client.heard[1].usage == {"prompt_tokens": 4, "completion_tokens": 1000, "resumes": 1}


def test_resume_false_says_how_much_was_delivered(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.005, context=200_000)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "once", max_tokens=100_000, route={"resume": False})
        has_tokens(client, 1, 10)
        kill(serving, "a")
        client.read_until_ended(1)
        heard = client.heard[1]
        assert heard.ends == ["worker_died"]
        assert heard.delivered == heard.tokens >= 10
        assert heard.text == answer("once", heard.tokens)


def test_what_cannot_go_on_says_so(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.005, context=200_000)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "mirostat", max_tokens=100_000, mirostat_mode=2)
        has_tokens(client, 1, 10)
        kill(serving, "a")
        client.read_until_ended(1)
        heard = client.heard[1]
        assert heard.ends == ["worker_died"]
        assert "mirostat" in str(heard.error["message"])
        assert heard.delivered == heard.tokens >= 10


def test_a_request_that_kills_is_found_and_then_refused(serve: Serve) -> None:
    """Innocent requests finish, and the same payload sent again is refused before it reaches a worker."""
    serving = serve({"a": engine("RaisesAtToken", step_s=0.01)})
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 4):
            client.generate(request, "a", f"innocent {request}", max_tokens=40)
        client.generate(4, "a", "bad", max_tokens=40)
        client.read_until_ended(1, 2, 3, 4)
        assert client.heard[4].ends == ["poisoned"]
        assert client.heard[4].delivered == client.heard[4].tokens == 5
        for request in range(1, 4):
            heard = client.heard[request]
            assert (heard.text, heard.ends) == (answer(f"innocent {request}", 40), ["length"])
            assert 1 <= heard.usage["resumes"] <= 3
        client.generate(5, "a", "bad", max_tokens=40)
        wait_until(lambda: client.receive() is not None and bool(client.errors), what="the refusal")
        assert [(request, error["name"]) for request, error in client.errors] == [(5, "poisoned")]
        assert not client.errors[0][1]["retryable"]
        client.generate(6, "a", "innocent 1", max_tokens=40)
        client.read_until_ended(6)
        assert client.heard[6].ends == ["length"]
    assert serving.wait_state("a", "ready")["generation"] == 4, "three deaths"


@pytest.mark.long
def test_the_limit_of_deaths_is_a_setting(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.005)}, poison={"limit": 10}, restart={"limit": 100, "max": "10ms"})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "often", max_tokens=400)
        for death in range(5):
            has_tokens(client, 1, 20 * (death + 1))
            kill(serving, "a")
            client.send(Credit(1, WINDOW))
        client.read_until_ended(1)
        assert client.heard[1].text == answer("often", 400)
        assert client.heard[1].usage["resumes"] == 5


def test_a_cancel_wins_over_going_on(serve: Serve) -> None:
    """A request that is cancelled while it waits for the worker's successor never reaches the successor."""
    serving = serve({"a": engine("SlowLoad", load_s=0.5, step_s=0.005)})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "cancelled", max_tokens=4000)
        has_tokens(client, 1, 5)
        kill(serving, "a")
        client.send(Cancel(1))
        client.read_until_ended(1)
        heard = client.heard[1]
        assert heard.ends == ["cancelled"]
        assert heard.usage["completion_tokens"] == heard.tokens
        assert serving.wait_state("a", "ready")["generation"] == 2
        serving.wait_idle("a")
        assert serving.status("a")["engine_stats"]["steps"] == 0


def test_a_model_that_fails_ends_what_waited_to_go_on(serve: Serve) -> None:
    serving = serve({"a": engine("RaisesAtToken", step_s=0.01)}, restart={"limit": 1})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "beside", max_tokens=400)
        client.generate(2, "a", "bad", max_tokens=400)
        client.read_until_ended(1, 2)
        assert client.heard[1].ends == client.heard[2].ends == ["worker_died"]
        assert client.heard[1].delivered == client.heard[1].tokens
    assert serving.status("a")["state"] == "failed"


@pytest.mark.long
@pytest.mark.parametrize("which", ["queue_ms", "ttft_ms", "deadline_ms"])
def test_times_are_kept_whatever_the_worker_does(serve: Serve, which: str) -> None:
    """Although the worker hangs, neither queueing nor prefill nor the stream may last longer than the client allows."""
    serving = serve({"a": engine("HangsAtToken", max_batch_size=1)}, stop={"drain": "100ms", "sigterm": "100ms"})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "bad", max_tokens=100, route={"deadline_ms": 700} if which == "deadline_ms" else {})
        has_tokens(client, 1, 5)
        for request in range(2, 6):  # two wait in the worker, and two in the supervisor
            client.generate(request, "a", "behind", max_tokens=5, route={} if which == "deadline_ms" else {which: 300})
        ended = [1] if which == "deadline_ms" else [2, 3, 4, 5]
        client.read_until_ended(*ended)
        code = "queue_timeout" if which == "queue_ms" else "deadline_exceeded"
        assert [client.heard[request].ends for request in ended] == [[code]] * len(ended)
        assert client.heard[ended[0]].error["field"] == f"route.{which}"
        assert client.heard[1].tokens == 5
        assert not [r for r in range(1, 6) if r not in ended and client.heard.get(r, Heard()).ends]
    os.kill(serving.worker("a").pid, signal.SIGKILL)


def test_positions_are_reported_to_who_asked(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.01, max_batch_size=1)})
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 8):
            # each answer takes longer than the half second between two reports, so no position is skipped
            client.generate(request, "a", f"line {request}", max_tokens=60, route={"progress": request in (5, 7)})
        client.read_until_ended(*range(1, 8))
        assert set(client.reports) == {5, 7}
        positions = [int(str(report["queue_position"])) for report in client.reports[7]]
        assert positions == sorted(positions, reverse=True)
        assert len(set(positions)) == len(positions) >= 2, "two looks a second, and it waits for more than one"
        assert {report["phase"] for report in client.reports[7]} == {"queued"}


@pytest.mark.long
@pytest.mark.parametrize("how", ["the drain's time is over", "it dies while it drains"])
def test_what_a_restart_interrupts_goes_on_behind_it(serve: Serve, how: str) -> None:
    drain = "100ms" if how == "the drain's time is over" else "30s"
    serving = serve({"a": engine(step_s=0.005)}, stop={"drain": drain})
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "restarted", max_tokens=250)
        has_tokens(client, 1, 5)
        serving.order("restart", model="a")
        if drain == "30s":
            kill(serving, "a")
        client.read_until_ended(1)
        assert (client.heard[1].text, client.heard[1].ends) == (answer("restarted", 250), ["length"])
        assert client.heard[1].usage["resumes"] == 1
    assert serving.wait_state("a", "ready")["generation"] == 2
