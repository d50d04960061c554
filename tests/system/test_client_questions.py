"""The clients' methods for what a supervisor does: requests, events, logs, and the order to cancel a request."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from modelctl import AsyncClient
from protocol.errors import ErrorCode, WireError
from tests.serving import WITHIN, Serving, engine, wait_until

LONG = 90_000


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"m": engine(context=100_000)}) as serving:
        yield serving


def test_a_client_lists_requests_and_an_admin_cancels_one(serving: Serving) -> None:
    with serving.client() as client, serving.client(admin=True) as admin:
        streams = [client.generate("m", "x", max_tokens=LONG) for _ in range(3)]
        for stream in streams:
            next(stream)
        listed = client.requests()
        assert listed["total"] == len(listed["requests"]) == 3
        assert len(client.requests(limit=1)["requests"]) == 1
        for request in listed["requests"]:
            admin.cancel_request(request["id"])
        for stream in streams:
            stream.complete()
            assert stream.finish_reason == "cancelled"
        with pytest.raises(WireError) as refused:
            client.cancel_request("1-1")
        assert refused.value.code is ErrorCode.UNSUPPORTED
    serving.wait_idle("m")


def test_status_has_the_speed_of_the_last_two_minutes_for_a_client_that_wants_it(serving: Serving) -> None:
    with serving.client() as client:
        client.complete("m", "x", max_tokens=100)

        def speeds() -> list[float]:
            found: list[float] = client.call("status", history=True)["models"][0]["speeds"]
            return found

        # A request that ends within one second is in one value, or in two.
        told = wait_until(lambda: sum(found := speeds()) >= 100 and found, what="the speed of the request")
        assert sum(speed > 0 for speed in told) <= 3
        later = wait_until(lambda: len(found := speeds()) > len(told) and found, what="the next second")
        assert later[: len(told)] == told, "the newest value is the last"
        assert "speeds" not in client.status("m")["models"][0]


def test_a_client_reads_events_and_logs_and_goes_on_behind_them(serving: Serving) -> None:
    with serving.client() as client:
        events = client.events()
        (ready,) = (event for event in events["events"] if event.get("state") == "ready")
        assert re.fullmatch(r"m: ready, \d\.\d s", ready["message"])
        assert "context 100000 tokens" in ready["reason"]
        assert [event["number"] for event in client.events(limit=2)["events"]] == [events["last"] - 1, events["last"]]
        assert client.events(after=events["last"])["events"] == []
        logs = client.logs()
        assert any("loading -> ready" in line for line in logs["lines"])
        assert len(client.logs(lines=1)["lines"]) == 1
        assert client.logs(after=logs["position"])["lines"] == []
        assert client.logs("m")["lines"] != logs["lines"]


def test_a_client_in_a_loop_asks_the_same(serving: Serving) -> None:
    async def main() -> None:
        runtime_dir = serving.runtime_dir
        async with (
            AsyncClient(runtime_dir=runtime_dir, timeout=WITHIN) as client,
            AsyncClient(runtime_dir=runtime_dir, admin=True, timeout=WITHIN) as admin,
        ):
            stream = client.generate("m", "x", max_tokens=LONG)
            await anext(stream)
            (request,) = (await client.requests(limit=5))["requests"]
            await admin.cancel_request(request["id"])
            await stream.complete()
            assert stream.finish_reason == "cancelled"
            events = await client.events(limit=1)
            assert (await client.events(after=events["last"]))["events"] == []
            logs = await client.logs("m", lines=3)
            assert len(logs["lines"]) == 3
            assert (await client.logs("m", after=logs["position"]))["lines"] == []
            assert (await client.status("m"))["models"][0]["name"] == "m"

    asyncio.run(main())
    serving.wait_idle("m")
