"""Measure how long streams wait after the death of their worker, and how a request that kills workers is found.

    python -m benchmarks.recovery [--rounds 3]
    python -m benchmarks.recovery --engine exllamav2 --gpu 0 [--models 1b-exl2 8b]

One SIGKILL: STREAMS streams decode on one worker, and the worker is killed. The figures are the time until the worker
is ready again, the longest gap between two deltas of each stream, and the time from ready until the last stream has a
token again. Then a new worker reads the same prompts (with the delivered part of the answers), all sent at once. That
time is subtracted in the figure with the target.

Poison: all but one of the streams decode when the last request comes. It kills each worker that computes it, either
when its prompt has been read or at its token LATE. The settings are the defaults.

Without options, the benchmark measures an engine that needs no torch, and the embedded engine.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.deaths import read_log
from benchmarks.harness import SPECIAL_IDS, Server, arguments_for
from benchmarks.models import path_of
from benchmarks.poisoned import POISON
from benchmarks.report import Result, write
from model_worker.engines.model_dir import ModelDir
from modelctl import AsyncClient
from protocol.errors import WireError
from tests.serving import ROOT

STREAMS = 32
PROMPT_TOKENS = 64
KILL_AT = 50
"""Tokens that every stream has when the worker is killed."""
LATE = 50
LONG, ANSWER = 600, 200
"""Tokens of an answer: where the worker is killed from outside, and where a request kills it."""
CONTEXT = 2048
WITHIN_S = 2.0
MOST_DEATHS = 3
SLOW_STEP_S = 0.01
"""Seconds of a step of the engine that needs no torch."""
_READY = re.compile(r"loading -> ready .* pid (\d+)$")


@dataclass
class Stream:
    """One request, and its tokens: (time.time(), ids) of each delta."""

    fields: dict[str, Any]
    deltas: list[tuple[float, list[int]]] = field(default_factory=list)
    end: str = ""

    @property
    def tokens(self) -> list[int]:
        return [token for _, ids in self.deltas for token in ids]

    def _gaps(self, since: float) -> Iterator[tuple[float, float]]:
        """Yield the begin and the end of each wait for a delta, from the last delta before ``since`` on."""
        times = [at for at, _ in self.deltas]
        first = max(i for i, at in enumerate(times) if at <= since)
        return pairwise(times[first:])

    def gap(self, since: float) -> float:
        """Return the seconds of the longest wait for a delta."""
        return max(end - begin for begin, end in self._gaps(since))

    def end_of_gap(self, since: float) -> float:
        """Return the time when the longest wait for a delta ended."""
        return max(self._gaps(since), key=lambda gap: gap[1] - gap[0])[1]

    async def run(self, client: AsyncClient, tokens: int) -> None:
        stream = client.generate("a", max_tokens=tokens, ignore_eos=True, temperature=0, **self.fields)
        try:
            async for delta in stream:
                self.deltas.append((time.time(), list(delta.token_ids)))
            self.end = str(stream.finish_reason)
        except WireError as e:
            self.end = e.code.wire_name


def prompts(entry: dict[str, Any], seed: int) -> list[list[int]]:
    """Return STREAMS prompts of random ids, others for each seed: a supervisor remembers what was sent before."""
    draw = random.Random(seed)
    vocab = 256 if entry["model_dir"] == str(ROOT) else int(ModelDir(entry["model_dir"]).config["vocab_size"])
    return [[draw.randrange(SPECIAL_IDS, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]


async def until(condition: Callable[[], bool], what: str, within: float = 300.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within} s: {what}")
        await asyncio.sleep(0.005)


@dataclass
class Recovery:
    """Seconds of one death. ``again``: from ready until the last stream has a token."""

    ready: float
    gaps: list[float]
    again: float
    reading: float


async def one_kill(server: Server, ids: list[list[int]]) -> Recovery:
    status = server.wait_state("a", "ready")
    streams = [Stream({"token_ids": prompt}) for prompt in ids]
    async with AsyncClient(runtime_dir=server.runtime_dir, timeout=120) as client:
        tasks = [asyncio.create_task(stream.run(client, LONG)) for stream in streams]
        await until(lambda: all(len(s.tokens) >= KILL_AT for s in streams), "tokens of all streams")
        killed = time.time()
        os.kill(status["pid"], signal.SIGKILL)
        await until(
            lambda: all(s.deltas[-1][0] > killed + 0.05 and s.gap(killed) > 0.05 for s in streams), "all stream again"
        )
        gaps = [stream.gap(killed) for stream in streams]
        again = max(stream.end_of_gap(killed) for stream in streams)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    log = read_log(server.runtime_dir / "logs" / "supervisor.log")
    ready = next(at for at, text in log if at >= killed and _READY.search(text))
    reading = await read_prompts(server, [[*p, *s.tokens[:KILL_AT]] for p, s in zip(ids, streams, strict=True)])
    return Recovery(ready - killed, gaps, again - ready, reading)


async def read_prompts(server: Server, ids: list[list[int]]) -> float:
    """Return the seconds until a new, otherwise idle worker has answered each of these prompts with one token."""
    server.wait_idle("a")
    server.modelctl("restart", "a")
    server.wait_state("a", "ready")
    server.wait_idle("a")
    async with AsyncClient(runtime_dir=server.runtime_dir, timeout=120) as client:
        begun = time.monotonic()
        await asyncio.gather(*(Stream({"token_ids": prompt}).run(client, 1) for prompt in ids))
        return time.monotonic() - begun


@dataclass
class Hunt:
    """The result of the search for a request that kills its worker at a token of its answer."""

    deaths: int
    failed: int
    found: bool
    seconds: float


async def one_poison(server: Server, ids: list[list[int]], at: int) -> Hunt:
    before = server.wait_state("a", "ready")["generation"]
    streams = [Stream({"token_ids": prompt}) for prompt in ids]
    streams[-1].fields["seed"] = POISON + at
    async with AsyncClient(runtime_dir=server.runtime_dir, timeout=120) as client:
        tasks = [asyncio.create_task(stream.run(client, ANSWER)) for stream in streams[:-1]]
        await until(lambda: all(len(s.tokens) >= 10 for s in streams[:-1]), "tokens of all streams")
        begun = time.monotonic()
        tasks.append(asyncio.create_task(streams[-1].run(client, ANSWER)))
        await asyncio.gather(*tasks)
        took = time.monotonic() - begun
    state = server.status("a")
    deaths = state["generation"] - before + (state["pid"] is None)
    return Hunt(deaths, sum(s.end != "length" for s in streams[:-1]), streams[-1].end == "poisoned", took)


def measure(label: str, entry: dict[str, Any], rounds: int) -> list[Result]:
    kills = []
    for number in range(rounds):
        with Server({"a": entry}) as server:
            kills.append(asyncio.run(one_kill(server, prompts(entry, number))))
    hunts = {}
    for at in (0, LATE):
        with Server({"a": entry}) as server:
            hunts[at] = asyncio.run(one_poison(server, prompts(entry, at), at))
    worst = max(kills, key=lambda kill: kill.again - kill.reading)
    gaps = sorted(gap for kill in kills for gap in kill.gaps)
    late = max(kill.again - kill.reading for kill in kills)
    results = [
        Result("ready again after, most", max(kill.ready for kill in kills), "s"),
        Result("longest gap of a stream, least", gaps[0], "s"),
        Result("longest gap of a stream, median", statistics.median(gaps), "s"),
        Result("longest gap of a stream, most", gaps[-1], "s"),
        Result("all stream again after ready, most", max(kill.again for kill in kills), "s"),
        Result("an idle worker reads the same prompts in", worst.reading, "s"),
        Result("all stream again after ready, less that reading", late, "s", f"<= {WITHIN_S:g}"),
    ]
    for at, hunt in hunts.items():
        what = f"kills at token {at}: " if at else "kills at its prompt: "
        results += [
            Result(f"{what}deaths until it is poisoned", hunt.deaths, "deaths", f"<= {MOST_DEATHS}"),
            Result(f"{what}found", int(hunt.found), "requests", ">= 1"),
            Result(f"{what}others that failed", hunt.failed, "requests", "<= 0"),
            Result(f"{what}all answers ended after", hunt.seconds, "s"),
        ]
    return [Result(f"{label}: {r.name}", r.value, r.unit, r.target) for r in results]


def entry_of(kind: str, directory: str, gpu: str, **options: Any) -> dict[str, Any]:
    return {
        "model_dir": directory, "engine": f"benchmarks.poisoned:{kind}", "gpu": gpu if gpu == "cpu" else int(gpu),
        "max_batch_size": STREAMS, "max_seq_len": CONTEXT, "options": options,
    }  # fmt: skip


def entries(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return {label: entry of models.yaml} of the engines to measure."""
    if arguments.engine == "exllamav2":
        return {
            model: entry_of(
                "ExLlamaV2", str(path_of(model, arguments.where)), arguments.gpu, cache_size=STREAMS * CONTEXT
            )
            for model in arguments.models or ["1b-exl2"]
        }
    return {
        "no torch": entry_of("TorchFree", str(ROOT), "cpu", step_s=SLOW_STEP_S, context=CONTEXT),
        **{
            f"embedded, {model}": entry_of("Embedded", str(path_of(model, arguments.where)), "cpu")
            for model in arguments.models or ["stories"]
        },
    }


def main() -> None:
    parser = arguments_for(__doc__)
    parser.set_defaults(engine="transformers", gpu="cpu")
    parser.add_argument("--models", nargs="+", help="default: stories, and an engine without torch; 1b-exl2 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    results = [r for label, entry in entries(arguments).items() for r in measure(label, entry, rounds)]
    write("recovery-exllamav2" if arguments.engine == "exllamav2" else "recovery", results, arguments.out)


if __name__ == "__main__":
    main()
