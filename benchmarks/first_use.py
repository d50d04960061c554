"""Measure whether the first requests of a new worker wait for what is loaded at first use.

    python -m benchmarks.first_use [--models 1b 1b-exl2-rounded]

A worker serves shapes of requests that it has not served before: numbers of answers at once, lengths of prompts, and
options that use other kernels. Each shape is asked ROUNDS times in turn. Its first round is compared with the others by
the longest wait of any of its streams: for the first token, or between two tokens. The worker is new for each model.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Request, Server, arguments_for, entry, requests
from benchmarks.report import Result, write
from modelctl import AsyncClient

ROUNDS = 10
TOKENS = 48
BATCH, CACHE, CONTEXT = 32, 65536, 8192
SLOWER_S = 0.02
"""A first round may be slower than the slowest of the others by so many seconds."""


@dataclass(frozen=True)
class Kind:
    """Requests that are sent at once: how many, tokens of each prompt and answer, and their options."""

    name: str
    streams: int = 1
    prompt: int = 64
    tokens: int = TOKENS
    options: dict[str, Any] = field(default_factory=dict)


KINDS = [
    Kind("one greedy answer"),
    Kind("5 answers", 5),
    Kind("31 answers", 31),
    Kind("temperature", 3, options={"temperature": 0.8}),
    Kind("top_p, repetition penalty", 9, options={"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}),
    Kind("flat top_p", 2, options={"temperature": 3.0, "top_p": 0.95, "frequency_penalty": 0.1}),
    Kind("typical_p", 2, options={"temperature": 0.8, "typical_p": 0.9}),
    Kind("log-probabilities", 7, options={"logprobs": True, "top_logprobs": 5}),
    Kind("a bias", 3, options={"logit_bias": {5: 1.0}, "banned_tokens": [7]}),
    Kind("a regular expression", 1, options={"regex": "[a-z ]{40,60}"}),
    Kind("mirostat", 3, options={"temperature": 1.0, "mirostat_mode": 2}),
    Kind("min_p and XTC", 3, options={"temperature": 1.0, "min_p": 0.05, "xtc_probability": 0.5}),
    Kind("guidance", 1, options={"negative_prompt": "x", "cfg_scale": 1.5}),
    Kind("stop strings, banned strings", 3, options={"stop": ["zqzqzq"], "banned_strings": ["qzqz"]}),
    Kind("a prompt of 700 tokens", 1, 700),
    Kind("a prompt of 5,000 tokens", 1, 5000),
    Kind("9 prompts of 1,500 tokens", 9, 1500),
    Kind("31 answers of 300 tokens", 31, 64, 300),
]


async def _longest_wait(server: Server, model: str, kind: Kind, asked: list[Request]) -> float:
    """Return the longest time in seconds that one of some streams brought no token."""
    async with AsyncClient(runtime_dir=server.runtime_dir) as client:

        async def one(request: Request) -> float:
            longest, last = 0.0, time.perf_counter()
            options = {"temperature": 0, "ignore_eos": True} | kind.options
            if kind.options.get("negative_prompt"):
                options |= {"prompt": "abc " * (kind.prompt // 2)}
            else:
                options |= request.fields
            async for _ in client.generate(model, max_tokens=kind.tokens, **options):
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            return longest

        return max(await asyncio.gather(*(one(request) for request in asked)))


def measure(server: Server, model: str, made: dict[str, Any], rounds: int) -> list[Result]:
    results: list[Result] = []
    late = 0
    for kind in KINDS:
        waits = [
            asyncio.run(
                _longest_wait(
                    server, model, kind, requests(model, made["model_dir"], kind.streams, kind.prompt, seed=number)
                )
            )
            for number in range(rounds)
        ]
        first, others = waits[0], waits[1:]
        late += first > max(others) + SLOWER_S
        results += [
            Result(f"{model}, {kind.name}: longest wait, first round", first * 1000, "ms"),
            Result(f"{model}, {kind.name}: longest wait, other rounds, median", statistics.median(others) * 1000, "ms"),
            Result(f"{model}, {kind.name}: longest wait, other rounds, slowest", max(others) * 1000, "ms"),
        ]
        print(f"{model}, {kind.name}: {first * 1000:.1f} ms, then {[round(w * 1000, 1) for w in others]}", flush=True)
    name = f"{model}: kinds of requests whose first round waits {SLOWER_S * 1000:g} ms longer than any other"
    return [*results, Result(name, late, "", "<= 0")]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["1b", "1b-exl2-rounded"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    results: list[Result] = []
    for model in arguments.models:
        made = entry(arguments, model, BATCH, CACHE, CONTEXT)
        with Server({model: made}) as server:
            results += measure(server, model, made, arguments.rounds)
        write("first-use", results, arguments.out)


if __name__ == "__main__":
    main()
