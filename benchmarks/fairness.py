"""Measure fairness and overload: one client's flood beside another client, and ten times too many requests for a model.

    python -m benchmarks.fairness [--engine transformers --gpu cpu --model letters] [--gpu 0 --model 1b]

1. Client B sends 10 requests at once while client A keeps one in flight, and again while A has 200 waiting. The result
   is B's mean time to an answer, as the median of several rounds.
2. First as many clients as keep the model busy, then ten times as many, which repeat every refused request. The results
   are the tokens per second of the served requests, the time that a refusal takes, and its cost in memory.
"""

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from benchmarks.harness import Request, Server, arguments_for, entry, percentile, requests
from benchmarks.report import Result, write
from modelctl import AsyncClient
from protocol.errors import ErrorCode, WireError

BATCH, TOKENS = 8, 64
FLOOD, FEW, ROUNDS = 200, 10, 5
QUEUE = 32
SECONDS = 10.0
MIB = 1 << 20


async def ask(client: AsyncClient, model: str, request: Request, tokens: int) -> float:
    """Return the seconds to the end of the answer."""
    begun = perf_counter()
    await client.complete(model, max_tokens=tokens, ignore_eos=True, temperature=0, **request.fields)
    return perf_counter() - begun


async def beside(runtime_dir: Path, model: str, asked: Sequence[Request], tokens: int, flood: int) -> float:
    """Return B's mean time to an answer while A has ``flood`` requests waiting. With 1, A always has one in flight."""
    async with AsyncClient(runtime_dir=runtime_dir) as a, AsyncClient(runtime_dir=runtime_dir) as b:
        done = asyncio.Event()

        async def keep_one() -> None:
            for request in itertools.cycle(asked):
                if done.is_set():
                    return
                await ask(a, model, request, tokens)

        others: list[asyncio.Task[Any]] = []
        if flood == 1:
            others.append(asyncio.create_task(keep_one()))
        else:
            others = [asyncio.create_task(ask(a, model, asked[i % len(asked)], tokens)) for i in range(flood)]
        await asyncio.sleep(0.3)  # so that A is being served when B comes
        times = await asyncio.gather(*(ask(b, model, request, tokens) for request in asked[:FEW]))
        done.set()
        if flood != 1:
            for task in others:
                task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return statistics.mean(times)


async def pressed(
    runtime_dir: Path, model: str, asked: Sequence[Request], tokens: int, at_once: int, seconds: float
) -> tuple[float, list[float]]:
    """Keep ``at_once`` requests going: each is repeated at once when it is refused or has ended.

    Returns (tokens per second of the accepted requests, seconds that each refusal took).
    """
    refusals: list[float] = []
    got = 0
    until = perf_counter() + seconds
    async with AsyncClient(runtime_dir=runtime_dir) as client:

        async def insist(number: int) -> None:
            nonlocal got
            while perf_counter() < until:
                begun = perf_counter()
                stream = client.generate(
                    model, max_tokens=tokens, ignore_eos=True, temperature=0, **asked[number % len(asked)].fields
                )
                try:
                    async for delta in stream:
                        if perf_counter() < until:
                            got += len(delta.token_ids)
                except WireError as e:
                    if e.code is not ErrorCode.OVERLOADED:
                        raise
                    refusals.append(perf_counter() - begun)
                    await asyncio.sleep(0.1)  # far less than retry_after_ms: an impatient client

        begun = perf_counter()
        await asyncio.gather(*(insist(number) for number in range(at_once)))
    return got / max(seconds, until - begun), refusals


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", help="default: 1b, or letters on the CPU")
    arguments = parser.parse_args()
    on_cpu = arguments.gpu == "cpu"
    model = arguments.model or ("letters" if on_cpu else "1b")
    rounds, seconds = (1, 3.0) if arguments.quick else (ROUNDS, SECONDS)
    made: dict[str, Any] = entry(arguments, model, BATCH, BATCH * 1024, context=512 if on_cpu else 2048)
    asked = requests(model, made["model_dir"], 50)
    results = []
    models = {"m": made | {"max_queue": 256}, "n": made | {"max_queue": QUEUE, "autostart": False}}
    with Server(models, wait=False) as server:
        server.wait_state("m", "ready")
        few, many = [], []
        for _ in range(rounds):  # in turn, so that other load of the machine affects both
            few.append(asyncio.run(beside(server.runtime_dir, "m", asked, TOKENS, 1)))
            server.wait_idle("m")
            many.append(asyncio.run(beside(server.runtime_dir, "m", asked, TOKENS, FLOOD)))
            server.wait_idle("m")
        ratio = statistics.median(b / a for a, b in zip(few, many, strict=True))
        results += [
            Result(f"B's {FEW} requests while A has one: mean time", statistics.median(few), "s"),
            Result(f"B's {FEW} requests while A has {FLOOD} waiting: mean time", statistics.median(many), "s"),
            Result("the second over the first", ratio, "ratio", "<= 2.5"),
        ]
        server.modelctl("stop", "m")
        server.modelctl("start", "n")
        # A full queue beside a full batch keeps the model as busy as possible.
        for _ in range(2):  # the first one warms up
            base, _ = asyncio.run(pressed(server.runtime_dir, "n", asked, TOKENS, BATCH + 4, seconds))
        supervisor = psutil.Process(server.overview()["supervisor"]["pid"])
        first, refused = asyncio.run(pressed(server.runtime_dir, "n", asked, TOKENS, 10 * (BATCH + 4), seconds))
        before = supervisor.memory_info().rss
        second, more = asyncio.run(pressed(server.runtime_dir, "n", asked, TOKENS, 10 * (BATCH + 4), seconds))
        grown = supervisor.memory_info().rss - before
        refused += more
    rates = statistics.mean((first, second))
    results += [
        Result("busy: tokens accepted", base, "tok/s"),
        Result("ten times as many requests: tokens accepted", rates, "tok/s"),
        Result("the second over the first, at ten times the load", rates / base, "ratio", ">= 0.9"),
        Result("refusals", len(refused), "requests"),
        Result("a refusal takes, median", 1000 * statistics.median(refused), "ms", "<= 20"),
        Result("a refusal takes, p99", 1000 * percentile(refused, 99), "ms"),
        Result("supervisor's memory grew meanwhile", grown / MIB, "MiB", "<= 2"),
    ]
    write("fairness-transformers" if arguments.engine == "transformers" else "fairness", results, arguments.out)


if __name__ == "__main__":
    main()
