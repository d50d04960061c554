"""Measure what a page that shows everything costs the supervisor.

    python -m benchmarks.page_load

The gateway asks for ``status``, ``requests`` and ``events`` once a second, for all viewers of its page together. Here
MODELS models with a deterministic engine compute STREAMS requests, each with 20 tokens per second. In turn, nobody
asks, and somebody asks 20 times a second. The difference of the supervisor's processor time (of all its threads) is
divided by the number of times. So the share of a core is that of one time in a second.

The time of each verb alone is measured, too, and that of ``logs``, which a page asks for only while it shows a log.
"""

import asyncio
import statistics
import time
from typing import Any

import psutil

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from modelctl import AsyncClient
from tests.serving import Serving, engine

MODELS, STREAMS, TOKENS_PER_S = 8, 100, 20
ASKED_PER_S, SECONDS, ROUNDS, CALLS = 20, 5.0, 5, 200
ENDLESS = 1_000_000


async def stream(client: AsyncClient, model: str, number: int) -> None:
    async for _ in client.generate(model, f"stream {number}", max_tokens=ENDLESS):
        pass


async def page(client: AsyncClient, after: int) -> int:
    """Ask for everything that a page shows. Return the number of the last event."""
    answers = await asyncio.gather(
        client.call("status"), client.call("requests", limit=STREAMS), client.call("events", after=after)
    )
    assert len(answers[1]["requests"]) == STREAMS
    last: int = answers[2]["last"]
    return last


async def measure_page(client: AsyncClient, process: psutil.Process, seconds: float) -> float:
    """Return the supervisor's processor time for one page, in milliseconds."""
    spent = []
    for often in (0, ASKED_PER_S):
        before, begun, count, last = sum(process.cpu_times()[:2]), time.monotonic(), 0, 0
        while time.monotonic() < begun + seconds:
            if often:
                last = await page(client, last)
                count += 1
            await asyncio.sleep(max(0.0, begun + (count / often if often else seconds) - time.monotonic()))
        spent.append((sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun))
    return (spent[1] - spent[0]) / (count / seconds) * 1000


async def measure_verb(client: AsyncClient, process: psutil.Process, calls: int, verb: str, **params: Any) -> float:
    """Return the supervisor's processor time for one call of a verb, in milliseconds."""
    before = sum(process.cpu_times()[:2])
    for _ in range(calls):
        await client.call(verb, **params)
    return (sum(process.cpu_times()[:2]) - before) / calls * 1000


async def measure(serving: Serving, seconds: float, rounds: int, calls: int) -> list[Result]:
    process = psutil.Process(serving.pid)
    verbs: dict[str, dict[str, Any]] = {
        "status": {}, "requests": {"limit": STREAMS}, "events": {"after": 0, "limit": 512}, "logs": {"lines": 1000},
    }  # fmt: skip
    place = serving.runtime_dir
    async with (
        AsyncClient(runtime_dir=place) as user,
        AsyncClient(runtime_dir=place) as viewer,
        AsyncClient(runtime_dir=place, admin=True) as admin,
    ):
        alone = {v: await measure_verb(admin, process, calls, v, **params) for v, params in verbs.items()}
        tasks = [asyncio.create_task(stream(user, f"m{n % MODELS}", n)) for n in range(STREAMS)]
        while (await viewer.call("requests"))["total"] < STREAMS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        pages = [await measure_page(viewer, process, seconds) for _ in range(rounds)]
        shown = await viewer.call("requests", limit=STREAMS)
        assert {request["state"] for request in shown["requests"]} == {"running"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    each = statistics.median(pages)
    return [
        Result("status, requests and events, supervisor's CPU", each, "ms"),
        Result("the least of the rounds", min(pages), "ms"),
        Result("the greatest of the rounds", max(pages), "ms"),
        Result("share of a core for once a second", each / 10, "%", "<= 1.0"),
        *(Result(f"{verb} alone, nothing runs, supervisor's CPU", cost, "ms") for verb, cost in alone.items()),
    ]


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    seconds, rounds, calls = (1.0, 1, 20) if arguments.quick else (SECONDS, ROUNDS, CALLS)
    models = {f"m{n}": engine(step_s=1 / TOKENS_PER_S, context=2 * ENDLESS, max_batch_size=16) for n in range(MODELS)}
    with Serving(models) as serving:
        write("page-load", asyncio.run(measure(serving, seconds, rounds, calls)), arguments.out)


if __name__ == "__main__":
    main()
