"""In whatever way a client stops listening, its job leaves the engine, the queue and the table."""

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from protocol.messages import Cancel
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with Serving({"a": engine(context=2 * ENDLESS, max_batch_size=2)}) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.wait_idle("a")


def wait_busy(serving: Serving, jobs: int) -> None:
    wait_until(lambda: sum(serving.status("a")[key] for key in ("active", "queued")) == jobs, 5, f"{jobs} requests")


def streaming_process(serving: Serving, streams: int) -> "subprocess.Popen[str]":
    process = serving.spawn_client([["a", f"endless {i}", ENDLESS] for i in range(streams)])
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_leaving_the_loop(serving: Serving) -> None:
    with serving.client() as client:
        for delta in client.generate("a", "left", max_tokens=ENDLESS):
            assert delta.text == answer("left", 1)
            break
        serving.wait_idle("a")
        assert client.complete("a", "the same client goes on", max_tokens=9).text == answer(
            "the same client goes on", 9
        )


def test_closing_the_client(serving: Serving) -> None:
    client = serving.client()
    streams = [client.generate("a", f"closed {i}", max_tokens=ENDLESS) for i in range(6)]
    next(streams[0])
    wait_busy(serving, 6)
    client.close()
    serving.wait_idle("a")


def test_killing_the_client_process(serving: Serving) -> None:
    process = streaming_process(serving, 2)
    wait_busy(serving, 2)
    end(process)
    serving.wait_idle("a")


def test_killing_a_client_whose_requests_wait(serving: Serving) -> None:
    with serving.client() as client:
        busy = [client.generate("a", f"busy {i}", max_tokens=ENDLESS) for i in range(4)]
        next(busy[0])
        process = serving.spawn_client([["a", "never served", 5]] * 3)
        wait_busy(serving, 7)
        end(process)
        wait_busy(serving, 4)


@pytest.mark.long
def test_a_frozen_client_is_cut_off_by_heartbeats(serving: Serving) -> None:
    process = streaming_process(serving, 2)
    closed = serving.counters()["connections_closed"]
    process.send_signal(signal.SIGSTOP)
    try:
        serving.wait_idle("a")
        assert serving.counters()["connections_closed"] == closed + 1
    finally:
        process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    ends = [reason for _, reason in json.loads(out.splitlines()[-1])["answers"]]
    assert ends == ["connection_lost"] * 2


def test_cancelling_a_running_request(serving: Serving) -> None:
    with serving.client() as client:
        stream = client.generate("a", "cancel me", max_tokens=ENDLESS)
        for _ in range(10):
            next(stream)
        stream.cancel()
        done = stream.complete()
        assert done.finish_reason == "cancelled"
        assert len(done.token_ids) == done.usage["completion_tokens"] >= 10
        assert done.text == answer("cancel me", len(done.token_ids))
        serving.wait_idle("a")


def test_cancelling_requests_that_wait(serving: Serving) -> None:
    """Two requests are computed, two wait in the worker, the rest in the supervisor. All of them can be cancelled."""
    with serving.client() as client:
        streams = [client.generate("a", f"wait {i}", max_tokens=ENDLESS) for i in range(7)]
        next(streams[0])
        wait_busy(serving, 7)
        status = serving.status("a")
        assert (status["active"], status["queued"]) == (2, 5)
        for i in (6, 2):
            streams[i].cancel()
            done = streams[i].complete()
            assert (done.finish_reason, done.text, done.usage["completion_tokens"]) == ("cancelled", "", 0)
        for i in (0, 1, 3, 4, 5):
            streams[i].cancel()
        assert {streams[i].complete().finish_reason for i in (0, 1, 3, 4, 5)} == {"cancelled"}


def test_cancel_is_idempotent_and_answers_once(serving: Serving) -> None:
    with RawClient(serving.runtime_dir) as client:
        client.send(Cancel(77))
        client.generate(1, "a", "twice", max_tokens=ENDLESS)
        while 1 not in client.heard:
            client.receive()
        for request in (1, 1, 2**64 - 1, 0, 1):
            client.send(Cancel(request))
        client.read_until_ended(1)
        client.send(Cancel(1))
        client.barrier()
        heard = client.heard[1]
        assert heard.ends == ["cancelled"]
        assert heard.seqs == list(range(len(heard.seqs)))
        assert not client.errors
