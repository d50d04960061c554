"""The verbs ``requests`` and ``cancel_request`` show and end unfinished requests, within the rights of a key."""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import Client, Stream
from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call
from supervisor.keys.store import token_id
from tests.deterministic_engine import answer
from tests.keyed import Keyed
from tests.serving import engine, wait_until

LONG = 100_000
COMPUTED, WITH_WORKER = 1, 3
"""Number of requests that a worker of ``SLOW`` computes at once, and that it has: two more wait in it."""
SLOW = engine(step_s=0.005, context=2 * LONG, max_batch_size=1)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    """Serve with two users, a viewer who may see all requests, and an operator who may end all requests."""
    keys = {"one": "infer", "two": "infer", "viewer": "status", "boss": "admin"}
    with Keyed({"m": SLOW}, keys) as keyed:
        yield keyed


@pytest.fixture(autouse=True)
def nothing_is_left(keyed: Keyed) -> Iterator[None]:
    yield
    keyed.serving.wait_idle("m")
    with keyed.serving.client() as client:
        assert client.call("requests") == {"requests": [], "total": 0}


def listed(client: Client) -> list[dict[str, Any]]:
    """Return the requests that a client sees."""
    requests: list[dict[str, Any]] = client.call("requests")["requests"]
    return requests


def wait_listed(client: Client, count: int) -> list[dict[str, Any]]:
    """Wait until a client sees ``count`` requests, and return them."""
    return wait_until(lambda: found if len(found := listed(client)) == count else None, what=f"{count} requests")


def cancel(client: Client, request: str) -> None:
    assert client.call("cancel_request", id=request) == {}


def end(*streams: Stream) -> None:
    for stream in streams:
        stream.cancel()
    for stream in streams:
        assert stream.complete().finish_reason == "cancelled"


def test_unfinished_requests_are_listed_with_the_oldest_first(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.serving.client() as own, keyed.client("viewer") as viewer:
        first = one.generate("m", "r" * 400, max_tokens=LONG, priority="interactive")
        next(first)
        others = [own.generate("m", f"waits {n}", max_tokens=LONG) for n in range(WITH_WORKER + 2)]
        seen = wait_listed(viewer, 1 + len(others))
        waiting = len(seen) - COMPUTED
        assert [request["state"] for request in seen] == ["running"] * COMPUTED + ["queued"] * waiting
        assert [request["queue_position"] for request in seen] == [None] * COMPUTED + [*range(waiting)]
        assert [request["worker"] for request in seen] == ["m"] * WITH_WORKER + [None] * (len(seen) - WITH_WORKER)
        assert [request["key"] for request in seen] == ["one"] + [None] * len(others)
        assert [request["priority"] for request in seen] == ["interactive"] + ["normal"] * len(others)
        assert {request["model"] for request in seen} == {"m"}
        assert seen[0]["tokens"] >= 1
        assert seen[0]["prompt_tokens_estimate"] >= 100
        ages = [request["age_ms"] for request in seen]
        assert ages == sorted(ages, reverse=True)
        wait_until(lambda: listed(viewer)[0]["tokens"] > seen[0]["tokens"], what="further tokens of the answer")
        bounded = viewer.call("requests", limit=2)
        assert [request["id"] for request in bounded["requests"]] == [request["id"] for request in seen[:2]]
        assert bounded["total"] == len(seen)
        end(first, *others)


def test_a_running_request_is_cancelled_by_somebody_else(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.client("boss") as boss:
        stream = one.generate("m", "mine", max_tokens=LONG)
        next(stream)
        (request,) = listed(boss)
        cancel(boss, request["id"])
        whole = stream.complete()
        assert whole.finish_reason == "cancelled"
        assert whole.text == answer("mine", len(whole.text))
        assert 0 < whole.usage["completion_tokens"] < LONG
        with pytest.raises(WireError, match="it has ended, or never was") as caught:
            cancel(boss, request["id"])
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "id")


def test_a_request_that_waits_is_cancelled_and_the_others_go_on(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.serving.client(admin=True) as operator:
        streams = [one.generate("m", f"p {n}", max_tokens=LONG) for n in range(WITH_WORKER + 2)]
        requests = wait_listed(operator, len(streams))
        assert requests[-2]["state"] == "queued"
        cancel(operator, requests[-2]["id"])
        assert streams[-2].complete().finish_reason == "cancelled"
        left = listed(operator)
        assert [request["id"] for request in left] == [r["id"] for r in requests if r is not requests[-2]]
        assert left[-1]["queue_position"] == WITH_WORKER - COMPUTED
        end(*streams[:-2], streams[-1])


def test_a_client_that_does_not_read_keeps_no_request(keyed: Keyed) -> None:
    """The client's stream has used up its credit. After a cancel, its end still comes after the computed events."""
    with keyed.client("two") as two, keyed.client("boss") as boss:
        stream = two.generate("m", "slow", max_tokens=LONG)
        next(stream)
        (request,) = listed(boss)
        wait_until(lambda: listed(boss)[0]["tokens"] > 300, what="more tokens than the stream has credit for")
        cancel(boss, request["id"])
        wait_until(lambda: not listed(boss), what="no request")
        whole = stream.complete()
        assert whole.finish_reason == "cancelled"
        assert whole.text == answer("slow", len(whole.text))


def test_a_request_of_a_worker_that_died_is_cancelled_while_it_waits(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.client("boss") as boss:
        stream = one.generate("m", "survivor", max_tokens=LONG)
        next(stream)
        (request,) = listed(boss)
        keyed.serving.worker("m").kill()
        cancel(boss, request["id"])
        whole = stream.complete()
        assert whole.finish_reason == "cancelled"
        assert whole.text == answer("survivor", len(whole.text))
        keyed.serving.wait_state("m", "ready")


def test_a_key_sees_and_cancels_its_own_requests_only(keyed: Keyed) -> None:
    with (
        keyed.client("one") as one,
        keyed.client("one") as again,
        keyed.client("two") as two,
        keyed.client("viewer") as viewer,
    ):
        streams = [one.generate("m", "one", max_tokens=LONG), two.generate("m", "two", max_tokens=LONG)]
        ids = {request["key"]: request["id"] for request in wait_listed(viewer, 2)}
        assert [request["id"] for request in listed(one)] == [ids["one"]]
        assert [request["id"] for request in listed(again)] == [ids["one"]], "another connection of the same key"
        assert again.call("requests")["total"] == 1
        with pytest.raises(WireError, match="never was") as caught:  # the error does not reveal that the request exists
            cancel(one, ids["two"])
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        with pytest.raises(WireError, match="takes the right infer or admin") as caught:
            cancel(viewer, ids["two"])
        assert caught.value.code is ErrorCode.FORBIDDEN
        assert len(listed(viewer)) == 2
        cancel(again, ids["one"])
        assert streams[0].complete().finish_reason == "cancelled"
        keyed.new("reader", "infer,status")
        wait_until(lambda: len(keyed.tcp()["keys"]) == 5, what="the new key on the list")
        with keyed.client("reader") as reader, pytest.raises(WireError, match="takes the right admin") as caught:
            cancel(reader, ids["two"])
        assert caught.value.code is ErrorCode.FORBIDDEN
        end(streams[1])


def test_a_key_of_a_gateway_sees_and_cancels_its_own_requests_only(keyed: Keyed) -> None:
    mine, other, all_of_m = (
        {"on_behalf_of": token_id(keyed.new_http(name, rights, models=models))}
        for name, rights, models in (("mine", "infer", None), ("other", "infer", None), ("m", "admin", ("m*",)))
    )
    none_of_m = {"on_behalf_of": token_id(keyed.new_http("none", "admin", models=("n*",)))}
    with keyed.serving.client() as front, keyed.serving.client(admin=True) as admin:
        stream = front.generate("m", "for a key of a gateway", max_tokens=LONG, **mine)
        next(stream)
        (request,) = front.call("requests", **mine)["requests"]
        assert request["key"] == "mine"
        assert front.call("requests", **all_of_m)["requests"][0]["id"] == request["id"]
        for outsider in other, none_of_m:
            assert front.call("requests", **outsider) == {"requests": [], "total": 0}
            with pytest.raises(WireError, match="never was"):
                admin.call("cancel_request", id=request["id"], **outsider)
        admin.call("cancel_request", id=request["id"], **mine)
        assert stream.complete().finish_reason == "cancelled"


@pytest.mark.parametrize(
    "given",
    ["", "1", "1-", "-1", "0-1", "1-0", "1-2-3", "1 - 2", "１-1", "9" * 21 + "-1", "../1-1", "1-1\n", "x" * 5000],
)
def test_what_is_no_id_is_refused(keyed: Keyed, given: str) -> None:
    with keyed.client("boss") as boss, pytest.raises(WireError, match="never was") as caught:
        cancel(boss, given)
    assert caught.value.field == "id"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("verb", "params", "message"),
    [
        ("cancel_request", {}, "id is missing"),
        ("cancel_request", {"id": 5}, "id must be a string"),
        ("cancel_request", {"id": "1-1", "model": "m"}, "unknown parameter 'model'"),
        ("cancel_request", {"id": f"{2**64}-1"}, "never was"),
        ("requests", {"limit": 0}, "limit is 0: must be from 1 to 500"),
        ("requests", {"limit": 501}, "limit is 501"),
        ("requests", {"limit": True}, "limit must be an integer"),
        ("requests", {"limit": "5"}, "limit must be an integer"),
        ("ended_requests", {"limit": 1001}, "limit is 1001: must be from 1 to 1000"),
        ("ended_requests", {"after": -1}, "after is -1"),
        ("ended_requests", {"after": "1"}, "after must be an integer"),
        ("requests", {"model": "m"}, "unknown parameter 'model'"),
    ],
)
def test_parameters_are_checked(keyed: Keyed, verb: str, params: dict[str, Any], message: str) -> None:
    with keyed.client("boss") as boss, pytest.raises(WireError, match=message):
        boss.call(verb, **params)


def test_over_ipc_it_is_an_order(keyed: Keyed) -> None:
    with keyed.serving.client() as front, pytest.raises(WireError, match="send it to the admin socket") as caught:
        cancel(front, "1-1")
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_any_parameters_are_answered(keyed: Keyed) -> None:
    seed = int(os.environ.get("TEST_SEED", "16"))
    print("seed", seed)
    chance = random.Random(seed)
    values = [
        0, 1, -1, 500, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, float("inf"), float("nan"), True, None, "", "1-1", "m",
        "0-0", f"{2**64}-{2**64}", "9" * 20 + "-0", "supervisor", "gateway", "../m", "\0",
        "\ud7ff", "x" * 100_000, b"", b"m", [], ["m"], {}, {"m": 1},
    ]  # fmt: skip
    names = ["limit", "after", "lines", "model", "id", "on_behalf_of", "", "x" * 1000]
    with keyed.raw("boss") as raw:
        for number in range(1, 1001):
            verb = chance.choice(["requests", "ended_requests", "events", "logs", "cancel_request"])
            params = {name: chance.choice(values) for name in chance.sample(names, chance.randrange(4))}
            raw.send(Call(number, verb, pack_body(params)))
        raw.barrier()
        assert len(raw.replies) == 1000
        assert any("result" in reply for reply in raw.replies)
        assert {reply["error"]["name"] for reply in raw.replies if "error" in reply} <= {  # type: ignore[index]
            "invalid_request", "model_not_found", "forbidden",
        }  # fmt: skip
    assert keyed.serving.status("m")["state"] == "ready"
