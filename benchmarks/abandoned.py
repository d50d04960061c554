"""Check that abandoned requests leave nothing behind, and that a worker that is never idle does not slow down.

    python -m benchmarks.abandoned [--model 1b] [--gpu 0]

1. 50 ordinary requests, 16 at a time, several times: the rate before.
2. 500 requests one after another, each abandoned after 5 tokens, in turn by killing the client's process (SIGKILL), by
   ``cancel()``, and by leaving the loop over its answer.
3. The engine must be empty, its pages free, and the 50 requests as fast as before.
4. 2,000 requests of three kinds (prompt, answer) in random order, always 16 at a time, so that the generator is never
   idle: for each kind the median latency of the last 100 divided by that of the first 100.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import Request, Server, arguments_for, entry, requests
from benchmarks.report import Result, write
from modelctl import AsyncClient, Client

AT_ONCE = 16
NORMAL, NORMAL_TOKENS, NORMAL_ROUNDS = 50, 128, 5
ABANDONED, ABANDONED_AFTER = 500, 5
ENDLESS_TOKENS = 1000
"""Tokens that an abandoned request asks for."""
KINDS = {"short": (64, 32), "long answer": (64, 128), "long prompt": (768, 32)}
"""Tokens of prompt and of answer."""
MIXED, COMPARED = 2000, 100
TENTHS = 10


def doomed(runtime_dir: Path, model: str, fields: dict[str, Any], pipe: Connection) -> None:
    """Run a client in a process of its own: it reports after a few tokens, and goes on reading until it is killed."""
    with Client(runtime_dir=runtime_dir) as client:
        got = 0
        for delta in client.generate(model, max_tokens=ENDLESS_TOKENS, temperature=0, **fields):
            got += len(delta.token_ids)
            if got >= ABANDONED_AFTER and not pipe.closed:
                pipe.send(got)
                pipe.close()


def abandon(server: Server, model: str, asked: Sequence[Request]) -> dict[str, int]:
    """Abandon each request after a few tokens. Return how many were abandoned in each way."""
    # The forkserver has imported the client already: while Python starts, a thousand tokens pass.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["benchmarks.harness"])
    ways = {"client killed": 0, "cancel": 0, "loop left": 0}
    with server.client() as client:
        for way, request in zip(itertools.cycle(ways), asked, strict=False):
            ways[way] += 1
            if way == "client killed":
                ours, theirs = processes.Pipe()
                process = processes.Process(target=doomed, args=(server.runtime_dir, model, request.fields, theirs))
                process.start()
                theirs.close()
                ours.recv()
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                continue
            stream = client.generate(model, max_tokens=ENDLESS_TOKENS, temperature=0, **request.fields)
            got = 0
            for delta in stream:
                got += len(delta.token_ids)
                if got < ABANDONED_AFTER:
                    continue
                if way == "loop left":
                    break
                stream.cancel()
    return ways


async def together(runtime_dir: Path, model: str, work: Sequence[tuple[str, Request, int]]) -> list[tuple[str, float]]:
    """Run (kind, request, tokens) in the order of ``work``, AT_ONCE at a time. Return (kind, latency in seconds) of
    each."""
    latencies: list[tuple[str, float]] = [("", 0.0)] * len(work)
    line = iter(enumerate(work))
    async with AsyncClient(runtime_dir=runtime_dir) as client:

        async def reader() -> None:
            for number, (kind, request, tokens) in line:
                begun = perf_counter()
                async for _ in client.generate(model, max_tokens=tokens, temperature=0, **request.fields):
                    pass
                latencies[number] = kind, perf_counter() - begun

        await asyncio.gather(*(reader() for _ in range(AT_ONCE)))
    return latencies


def normal_rates(server: Server, model: str, directory: str, rounds: int, tokens: int, seed: int) -> list[float]:
    """Return the requests per second of each round."""
    rates = []
    for number in range(seed, seed + 1 + rounds):  # with other prompts each time, so that none is in the cache
        work = [("normal", request, tokens) for request in requests(model, directory, NORMAL, seed=number)]
        begun = perf_counter()
        asyncio.run(together(server.runtime_dir, model, work))
        rates.append(NORMAL / (perf_counter() - begun))
    return rates[1:]  # the first one warms up


def mixed(server: Server, model: str, directory: str, count: int, kinds: dict[str, tuple[int, int]]) -> list[Result]:
    draw = random.Random(7)
    # Some requests run before the counted ones, and some after them. Every few requests have equally many of each kind.
    # So all requests run beside the same mix of other requests.
    few = list(kinds) * (AT_ONCE // 2)
    order = [kind for _ in range(count // len(few) + 6) for kind in draw.sample(few, len(few))]
    prompts = {kind: iter(requests(model, directory, order.count(kind), kinds[kind][0], seed=3)) for kind in kinds}
    work = [(kind, next(prompts[kind]), kinds[kind][1]) for kind in order]
    latencies = asyncio.run(together(server.runtime_dir, model, work))
    latencies = latencies[2 * len(few) : 2 * len(few) + count]
    results = []
    for kind in kinds:
        own = [seconds for its, seconds in latencies if its == kind]
        compared = min(COMPARED, len(own) // 2)
        first, last = statistics.median(own[:compared]), statistics.median(own[-compared:])
        name = f"{kind} ({kinds[kind][0]} + {kinds[kind][1]} tokens)"
        results.append(Result(f"{name}: last {compared} over first {compared}", last / first, "ratio", "<= 1.05"))
        for tenth in range(TENTHS):
            part = own[len(own) * tenth // TENTHS : len(own) * (tenth + 1) // TENTHS]
            results.append(Result(f"{kind}: median latency, tenth {tenth + 1}", 1000 * statistics.median(part), "ms"))
    return results


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", help="default: 1b, or tiny with --quick")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    model = arguments.model or ("tiny" if quick else "1b")
    made = entry(arguments, model, AT_ONCE, AT_ONCE * 2048)
    directory, tokens, rounds = made["model_dir"], 16 if quick else NORMAL_TOKENS, 2 if quick else NORMAL_ROUNDS
    with Server({model: made}) as server:
        before = normal_rates(server, model, directory, rounds, tokens, seed=0)
        ways = abandon(server, model, requests(model, directory, 30 if quick else ABANDONED, seed=1000))
        engine = server.wait_idle(model)["engine_stats"]
        print(f"abandoned: {ways}; then the engine: {engine}", flush=True)
        held = engine.get("pages_used", engine.get("slots_used", 0))
        after = normal_rates(server, model, directory, rounds, tokens, seed=500)
        results = [
            *(
                Result(f"{way}: abandoned after {ABANDONED_AFTER} tokens", count, "requests")
                for way, count in ways.items()
            ),
            Result("then pending and active in the engine", engine["pending"] + engine["active"], "jobs", "<= 0"),
            Result("then pages of the cache in use", held, "pages", "<= 0"),
            Result("50 ordinary requests, before", statistics.median(before), "1/s"),
            Result("50 ordinary requests, after", statistics.median(after), "1/s"),
            Result("after over before", statistics.median(after) / statistics.median(before), "ratio", ">= 0.97"),
        ]
        write("abandoned", results, arguments.out)  # also when the rest fails
        results += mixed(server, model, directory, 150 if quick else MIXED, KINDS)
        last = server.wait_idle(model)["engine_stats"]
        print(f"after all: {last}", flush=True)
    results.append(Result("pages of the cache in use at the end", last.get("pages_used", 0), "pages", "<= 0"))
    write("abandoned", results, arguments.out)


if __name__ == "__main__":
    main()
