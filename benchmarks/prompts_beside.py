"""Measure the pauses of running answers while long prompts are read, and how fast the prompts are read.

    python -m benchmarks.prompts_beside [--model 8b]

31 answers run. Then prompts of 16,384 random tokens come, one after the other. A gap is the time between two tokens of
one answer at the client. The prompts' speed alone is measured in the same run, without answers.
"""

import asyncio
import itertools
import random
import time
from pathlib import Path

from benchmarks.harness import Server, arguments_for, entry, percentile, requests
from benchmarks.report import Result, write
from modelctl import AsyncClient

ANSWERS, PROMPTS, PROMPT_TOKENS = 31, 4, 16_384
CONTEXT = 18_432
ANSWER_TOKENS = 3000
MAX_GAP_MS = 30


def prompt(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(2, 128_000) for _ in range(size)]


async def measure(runtime_dir: Path, model: str, directory: str, size: int) -> list[Result]:
    """Return the figures of one served model. ``size`` is the length of the long prompts in tokens."""
    rng = random.Random(1)

    async def read(client: AsyncClient) -> float:
        begun = time.perf_counter()
        async for _ in client.generate(model, token_ids=prompt(rng, size), max_tokens=1, temperature=0):
            pass
        return time.perf_counter() - begun

    async with AsyncClient(runtime_dir=runtime_dir) as client, AsyncClient(runtime_dir=runtime_dir) as other:
        await read(other)
        alone = sum([await read(other) for _ in range(2)]) / 2
        times: list[list[float]] = [[] for _ in range(ANSWERS)]

        async def answer(number: int, fields: dict[str, object]) -> None:
            async for delta in client.generate(model, max_tokens=ANSWER_TOKENS, temperature=0, **fields):  # type: ignore[arg-type]
                times[number] += [time.perf_counter()] * bool(delta.token_ids)

        asked = requests(model, directory, ANSWERS, seed=3)
        tasks = [asyncio.create_task(answer(number, request.fields)) for number, request in enumerate(asked)]
        while min(map(len, times)) < 50:
            await asyncio.sleep(0.05)
        quiet_from = time.perf_counter()
        await asyncio.sleep(1.0)
        begun = time.perf_counter()
        for _ in range(PROMPTS):
            await read(other)
        ended = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def gaps(begin: float, end: float) -> list[float]:
        return [b - a for stream in times for a, b in itertools.pairwise(stream) if begin <= a and b <= end]

    beside, quiet = gaps(begun, ended), gaps(quiet_from, begun)
    speed, speed_alone = PROMPTS * size / (ended - begun), size / alone
    return [
        Result("gap between tokens without prompts, median", percentile(quiet, 50) * 1000, "ms"),
        Result("gap between tokens without prompts, p99", percentile(quiet, 99) * 1000, "ms"),
        Result("gap while prompts are read, median", percentile(beside, 50) * 1000, "ms"),
        Result("gap while prompts are read, p99", percentile(beside, 99) * 1000, "ms", f"<= {MAX_GAP_MS}"),
        Result("gap while prompts are read, longest", max(beside) * 1000, "ms"),
        Result("prompt tokens/s alone", speed_alone, "tok/s"),
        Result("prompt tokens/s beside 31 answers", speed, "tok/s"),
        Result("speed of prompts beside answers over alone", speed / speed_alone, "ratio", ">= 0.5"),
    ]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="8b")
    arguments = parser.parse_args()
    size = 2048 if arguments.quick else PROMPT_TOKENS
    # The model's own context is shorter. A larger base of the rotary embedding does not change what is computed.
    made = entry(
        arguments, arguments.model, ANSWERS + 1, ANSWERS * 4096 + 2 * CONTEXT, CONTEXT, rope_alpha=4.0,
        max_gap_ms=MAX_GAP_MS,
    )  # fmt: skip
    with Server({arguments.model: made}) as server:
        results = asyncio.run(measure(server.runtime_dir, arguments.model, made["model_dir"], size))
    write("prompts-beside", results, arguments.out)


if __name__ == "__main__":
    main()
