"""Requests wait in order, for a model that loads or for room, and a full queue refuses more."""

import re
from collections.abc import Iterator

import pytest

from protocol import limits
from protocol.errors import ErrorCode, WireError
from protocol.messages import Accepted, Cancel, Generate, Kind
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

LONG = 100_000


@pytest.fixture(scope="module")
def small() -> Iterator[Serving]:
    """Serve a model that computes one request, with room for two more in the worker and three in the queue."""
    with Serving({"a": engine(context=2 * LONG, max_batch_size=1, max_queue=3)}) as serving:
        yield serving


def test_requests_wait_for_a_model_that_loads(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad", load_s=1.0)}, wait=False)
    with serving.client() as client:
        streams = [client.generate("a", f"early {i}", max_tokens=10) for i in range(20)]
        serving.wait_state("a", "loading")
        wait_until(lambda: serving.status("a")["queued"] == 20)
        progress = wait_until(lambda: serving.status("a")["progress"])
        assert progress["phase"] == "loading"
        assert 0 <= progress["done"] <= progress["total"]
        assert [stream.complete().text for stream in streams] == [answer(f"early {i}", 10) for i in range(20)]
        assert streams[7].accepted == {"model": "a", "queue_position": 7}
    status = serving.status("a")
    assert status["load_seconds"] >= 1.0
    assert status["progress"] is None


def test_a_full_queue_refuses_early(small: Serving) -> None:
    with small.client() as client:
        streams = [client.generate("a", f"x {i}", max_tokens=LONG) for i in range(6)]
        next(streams[0])
        for _ in range(3):
            with pytest.raises(WireError) as caught:
                client.complete("a", "one too many", max_tokens=1)
            assert caught.value.code is ErrorCode.OVERLOADED
            assert caught.value.retryable
            assert caught.value.retry_after_ms
        assert (small.status("a")["active"], small.status("a")["queued"]) == (1, 5)
        streams[0].cancel()
        wait_until(lambda: small.status("a")["queued"] == 4)
        late = client.generate("a", "room again", max_tokens=5)
        for stream in streams:
            stream.cancel()
        assert late.complete().text == answer("room again", 5)
    small.wait_idle("a")


def test_the_order_is_kept(small: Serving) -> None:
    with RawClient(small.runtime_dir) as client:
        for request in range(1, 7):
            client.generate(request, "a", f"in order {request}", max_tokens=3)
        client.read_until_ended(*range(1, 7))
        assert list(client.heard) == list(range(1, 7))
        assert [heard.text for heard in client.heard.values()] == [answer(f"in order {r}", 3) for r in range(1, 7)]


def test_a_second_request_of_a_running_ones_number_ends_nothing(small: Serving) -> None:
    """A client ends the stream that an ERROR names, so the ERROR for a duplicate must not name the running request."""
    with RawClient(small.runtime_dir) as client:
        client.generate(7, "a", "the first", max_tokens=50)
        while not isinstance(client.receive(), Accepted):
            pass
        client.generate(7, "a", "the second", max_tokens=50)
        client.generate(7, "a", "the third", route={"priority": "urgent"})
        client.generate(7, "nosuch", "the fourth")
        client.send(Generate(7, "a", {}, bytes(limits.MAX_FRAME[Kind.GENERATE])))
        client.read_until_ended(7)
        assert client.heard[7].text == answer("the first", 50)
        assert [request for request, _ in client.errors] == [0] * 4
        names = ["duplicate_request", "duplicate_request", "model_not_found", "too_large"]
        assert [error["name"] for _, error in client.errors] == names
        assert all(error["refused"] == {"kind": Kind.GENERATE, "number": 7} for _, error in client.errors)


def test_request_ids_belong_to_the_connection(small: Serving) -> None:
    with RawClient(small.runtime_dir) as one, RawClient(small.runtime_dir) as two:
        one.generate(1, "a", "one", max_tokens=20)
        two.generate(1, "a", "two", max_tokens=20)
        one.generate(1, "a", "again", max_tokens=20)
        one.read_until_ended(1)
        two.read_until_ended(1)
        assert (one.heard[1].text, two.heard[1].text) == (answer("one", 20), answer("two", 20))
        assert [(request, error["name"]) for request, error in one.errors] == [(0, "duplicate_request")]
        assert one.errors[0][1]["refused"] == {"kind": 2, "number": 1}
        one.heard.clear()
        one.generate(1, "a", "free again", max_tokens=4)
        one.read_until_ended(1)
        assert one.heard[1].text == answer("free again", 4)


def test_what_waits_in_the_worker_is_queued_for_all_who_look(serve: Serve) -> None:
    serving = serve({"a": engine(max_batch_size=4, step_s=0.01, context=2 * LONG)}, gateway={"listen": free_port()})
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 8):
            client.generate(
                request, "a", f"w {request}", max_tokens=LONG if request < 5 else 200, route={"progress": True}
            )
        wait_until(lambda: serving.status("a")["queued"] == 3)
        assert serving.status("a")["active"] == 4
        with serving.client() as asking:
            listed = asking.call("requests")["requests"]
        assert [(r["state"], r["queue_position"]) for r in listed] == [("running", None)] * 4 + [
            ("queued", place) for place in range(3)
        ]
        assert serving.modelctl("ps").stdout.splitlines()[1].split()[5:7] == ["4", "3"]
        metrics = serving.modelctl("metrics").stdout
        assert re.search(r'num_requests_running{.*"a".*} 4', metrics)
        assert re.search(r'num_requests_waiting{.*"a".*} 3', metrics)
        client.send(Cancel(1))
        client.read_until_ended(1, 5, 6, 7)
        assert client.reports[7][-1] == {"phase": "queued", "queue_position": 0}, "the sixth took a place, it waits"
