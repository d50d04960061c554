"""A supervisor that has served many requests holds no more entries than one that has served few. Requests and
connections of every kind, well and badly behaved, leave nothing in any container."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from modelctl import AsyncClient
from protocol.errors import WireError
from protocol.messages import Cancel, Credit
from tests.keyed import Keyed, stranger
from tests.raw_client import RawClient
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

FIRST, THEN, AT_ONCE = 8, 32, 4
"""Requests of each kind before the first count, and between the two counts; how many are under way at a time."""
NOISE = THEN // 2
"""Number of entries that may come and go by themselves, such as timers."""


async def some_of_every_kind(keyed: Keyed, times: int) -> None:
    async with (
        AsyncClient(runtime_dir=keyed.serving.runtime_dir, timeout=WITHIN) as local,
        keyed_client(keyed) as remote,
    ):
        numbers = iter(range(times))

        async def one_by_one() -> None:
            for number in numbers:
                await requests(local, number)
                await requests(remote, number)
                await connections(keyed, number)

        await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))


async def requests(client: AsyncClient, number: int) -> None:
    await client.complete("one", f"short {number}", max_tokens=3, deadline_ms=3_600_000 - 1000 * number)
    await client.complete("pair", f"short {number % 5}", max_tokens=3, priority="batch")
    await client.tokenize("one", "text")
    stream = client.generate("one", "cancelled", max_tokens=2000)
    async for _ in stream:
        stream.cancel()
    async for _ in client.generate("one", "left", max_tokens=2000):
        break
    for model, fields in ("one", {"prompt": "x" * 5000}), ("nobody", {"prompt": "x"}):
        with pytest.raises(WireError):
            await client.complete(model, **fields)


async def connections(keyed: Keyed, number: int) -> None:
    runtime_dir = keyed.serving.runtime_dir
    async with AsyncClient(runtime_dir=runtime_dir, timeout=WITHIN) as client:
        await client.complete("one", "fleeting", max_tokens=3)
    async with keyed_client(keyed) as client:
        await client.complete("one", "fleeting", max_tokens=3)
    for where, key in ((runtime_dir, None), (keyed.endpoint, keyed.keys["key"])):
        leaver = RawClient(where, hello=number % 2 == 0, key=key)
        for frame in (b"", b"\xc1", Credit(7, 7), Cancel(7)):
            leaver.send(frame)
        leaver.generate(1, "one", "in the midst", max_tokens=2000)
        leaver.generate(2, "pair", "in the midst", max_tokens=2000)
        if number % 3:
            leaver.receive()
        leaver.close()
    RawClient(keyed.endpoint, key=stranger(keyed.keys["key"])).close()
    with socket.create_connection(("127.0.0.1", keyed.port)) as stray:
        stray.sendall(bytes(number))


def keyed_client(keyed: Keyed) -> AsyncClient:
    return AsyncClient(keyed.endpoint, key=keyed.keys["key"], timeout=WITHIN)


def held(serving: Serving, reported: Path) -> dict[str, int]:
    """Return the supervisor's counts of entries when it is idle."""
    for worker in "one", "pair:1", "pair:2":
        serving.wait_idle(worker)
    with serving.client() as client:  # another request makes the supervisor drop the timers of ended ones
        client.complete("one", "the last", max_tokens=1)
    wait_until(lambda: serving.overview()["supervisor"]["connections"] == 1, what="the others' connections to end")
    reported.unlink(missing_ok=True)
    os.kill(serving.pid, signal.SIGUSR2)
    wait_until(reported.exists, what="an account of what it holds")
    counted: dict[str, int] = json.loads(reported.read_text())
    return counted


@pytest.mark.long
def test_what_was_served_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = tmp_path / "held.json"
    monkeypatch.setenv("COUNTED_TO", str(message))
    models = {"one": engine(step_s=0.0005, max_batch_size=4), "pair": engine(step_s=0.0005, replicas=2)}
    with Keyed(models, {"other": "infer"}, script=ROOT / "tests" / "system" / "counted_supervisor.py") as keyed:
        keyed.new("key", "infer", max_in_flight=1000)
        asyncio.run(some_of_every_kind(keyed, FIRST))
        first = held(keyed.serving, message)
        asyncio.run(some_of_every_kind(keyed, THEN))
        then = held(keyed.serving, message)
    assert first["ConnectionTable.by_id"] >= 1, "what there is, is found"
    grown = {name: (first.get(name, 0), count) for name, count in then.items() if count > first.get(name, 0) + NOISE}
    assert not grown, f"entries of, before and after {THEN} more of every kind: {grown}"
