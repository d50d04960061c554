"""Measure what a page that shows everything costs the supervisor.

    python -m benchmarks.page_load

The gateway takes a picture once a second for all open pages with the same key together: it asks for ``status``,
``requests`` and ``events``. Here MODELS models with a deterministic engine, each on a GPU of its own (a stand-in for
NVML), compute STREAMS requests, each with 20 tokens per second. In turn, nobody asks, and a gateway's own code takes 20
pictures a second. The difference of the supervisor's processor time (of all its threads) is divided by the number of
pictures. So the share of a core is that of one picture in a second, and of ten: ten open pages with ten keys.

The time of each verb alone is measured, too, and that of ``logs``, which a page asks for only while it shows a log.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from gateway.http.callers import ANYBODY
from gateway.page.page import Picture, take_picture
from gateway.supervisor_link import SupervisorLink
from modelctl import AsyncClient
from protocol.process.worker_spec import GatewaySettings
from tests.nvml_box import Box
from tests.serving import ROOT, Serving, engine

MODELS, STREAMS, TOKENS_PER_S = 8, 100, 20
ASKED_PER_S, SECONDS, ROUNDS, CALLS = 20, 5.0, 5, 200
ENDLESS = 1_000_000


async def stream(client: AsyncClient, model: str, number: int) -> None:
    async for _ in client.generate(model, f"stream {number}", max_tokens=ENDLESS):
        pass


async def measure_pictures(link: SupervisorLink, process: psutil.Process, seconds: float) -> float:
    """Return the supervisor's processor time for one picture, in milliseconds."""
    spent = []
    picture: Picture = {}
    picture, last = await take_picture(link, ANYBODY, picture, 0)  # the first one has the speeds of two minutes
    for often in (0, ASKED_PER_S):
        before, begun, count = sum(process.cpu_times()[:2]), time.monotonic(), 0
        while time.monotonic() < begun + seconds:
            if often:
                picture, last = await take_picture(link, ANYBODY, picture, last)
                assert (len(picture["requests"]), len(picture["gpus"])) == (STREAMS, MODELS)
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
    verbs: dict[str, tuple[str, dict[str, Any]]] = {
        "status": ("status", {}),
        "status with the speeds of two minutes": ("status", {"history": True}),
        "requests": ("requests", {"limit": STREAMS}),
        "events": ("events", {"after": 0, "limit": 512}),
        "logs": ("logs", {"lines": 1000}),
    }
    place = serving.runtime_dir
    link = SupervisorLink(GatewaySettings(auth="none", runtime_dir=str(place)))
    await link.connect()
    async with (
        AsyncClient(runtime_dir=place) as user,
        AsyncClient(runtime_dir=place) as viewer,
        AsyncClient(runtime_dir=place, admin=True) as admin,
    ):
        while len((await viewer.call("status", history=True))["models"][0]["speeds"]) < rounds * seconds:
            await asyncio.sleep(0.5)
        alone = {
            what: await measure_verb(admin, process, calls, verb, **params) for what, (verb, params) in verbs.items()
        }
        tasks = [asyncio.create_task(stream(user, f"m{n % MODELS}", n)) for n in range(STREAMS)]
        while (await viewer.call("requests"))["total"] < STREAMS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        pictures = [await measure_pictures(link, process, seconds) for _ in range(rounds)]
        shown = await viewer.call("requests", limit=STREAMS)
        assert {request["state"] for request in shown["requests"]} == {"running"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await link.close()
    each = statistics.median(pictures)
    return [
        Result("status, requests and events, supervisor's CPU", each, "ms"),
        Result("the least of the rounds", min(pictures), "ms"),
        Result("the greatest of the rounds", max(pictures), "ms"),
        Result("share of a core for once a second", each / 10, "%", "<= 1.0"),
        Result("share of a core for ten pages with ten keys", each, "%"),
        *(Result(f"{what} alone, nothing runs, supervisor's CPU", cost, "ms") for what, cost in alone.items()),
    ]


def of_box(directory: Path) -> dict[str, str]:
    """Return the environment of a supervisor that sees MODELS GPUs with all their sensors."""
    box = Box(directory / "box.json")
    values = {"utilization": 87, "temperature": 71, "power": 412_250, "power_limit": 700_000}
    box.becomes([80] * MODELS, **{name: [value] * MODELS for name, value in values.items()})
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "stand_in_nvml")])
    return {"MODELCTL_TEST_BOX": str(box.path), "PYTHONPATH": path}


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    seconds, rounds, calls = (1.0, 1, 20) if arguments.quick else (SECONDS, ROUNDS, CALLS)
    models = {
        f"m{n}": engine(step_s=1 / TOKENS_PER_S, context=2 * ENDLESS, max_batch_size=16, gpu=n, vram="1GiB")
        for n in range(MODELS)
    }
    with tempfile.TemporaryDirectory() as directory, Serving(models, environment=of_box(Path(directory))) as serving:
        write("page-load", asyncio.run(measure(serving, seconds, rounds, calls)), arguments.out)


if __name__ == "__main__":
    main()
