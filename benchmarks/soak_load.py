"""The mixed load of ``benchmarks.soak``, in a process of its own.

    python -m benchmarks.soak_load RUNTIME_DIR SECONDS

Requests of each kind begin at evenly spaced times, whether earlier ones have ended or not, so that the load is
constant. At the end the process prints JSON: for each kind how many ended as they should, and the messages of the
others.
"""

import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from modelctl import AsyncClient
from protocol.errors import WireError
from tests.deterministic_engine import answer
from tools.demo_models import corpus

MOST_AT_ONCE = 64
"""Most requests of each kind at once. Further ones are skipped and counted, if the machine is too slow for the load."""
CONVERSATIONS = 60
"""Prompts of each kind, which are repeated. The supervisor remembers where up to 10,000 of them were computed last,
with 135 bytes each. That memory must be full after the first minute."""
SLOW_S = 0.02
"""Seconds that a slow reader waits between two deltas."""
Kind = Callable[[AsyncClient, Path, int], Awaitable[bool]]
_LETTERS = corpus.TEST_PROMPTS["letters"]
_BAD = (
    ("fast", {"prompt": "x", "temprature": 1}, "invalid_request"),
    ("fast", {"prompt": "x", "top_p": 2.0}, "invalid_request"),
    ("fast", {"prompt": "x" * 5000}, "context_overflow"),
    ("fast", {"prompt": "x", "priority": "urgent"}, "invalid_request"),
    ("nobody", {"prompt": "x"}, "model_not_found"),
)


async def short(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    done = await client.complete("fast", f"short {number}", max_tokens=16)
    return done.text == answer(f"short {number}", 16)


async def long(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    done = await client.complete("pair", f"long {number}", max_tokens=400)
    return done.text == answer(f"long {number}", 400)


async def embedded(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    prompt, expected = _LETTERS[number % len(_LETTERS)]
    done = await client.complete("letters", prompt, max_tokens=24, temperature=0)
    return done.text == expected or (done.finish_reason == "length" and expected.startswith(done.text))


async def cancelled(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    stream = client.generate("fast", f"cancelled {number}", max_tokens=2000)
    read = 0
    async for delta in stream:
        read += len(delta.token_ids)
        if read == 10:
            stream.cancel()
    return stream.finish_reason == "cancelled" and stream.text == answer(f"cancelled {number}", read)


async def left(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    got = ""
    async for delta in client.generate("pair", f"left {number}", max_tokens=2000):
        got += delta.text
        if len(got) >= 5:
            break
    return got == answer(f"left {number}", len(got))


async def bad(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    model, fields, code = _BAD[number % len(_BAD)]
    try:
        await client.complete(model, **fields)
    except WireError as e:
        return e.code.wire_name == code
    return False


async def slow(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    got = ""
    async for delta in client.generate("pair", f"slow {number}", max_tokens=400):
        got += delta.text
        await asyncio.sleep(SLOW_S)
    return got == answer(f"slow {number}", 400)


async def fleeting(client: AsyncClient, runtime_dir: Path, number: int) -> bool:
    """Send a request over a connection of its own."""
    async with AsyncClient(runtime_dir=runtime_dir) as own:
        return await short(own, runtime_dir, number)


KINDS: dict[Kind, float] = {short: 0.05, long: 0.5, embedded: 0.5, cancelled: 0.2, left: 0.25, bad: 0.2, slow: 2.0,
                            fleeting: 0.5}  # fmt: skip
"""Seconds between two requests of each kind."""


async def main(runtime_dir: Path, seconds: float) -> None:
    report: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in KINDS}
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    async with AsyncClient(runtime_dir=runtime_dir) as client:

        async def one(kind: Kind, number: int) -> None:
            try:
                outcome = (
                    "as it ought to"
                    if await kind(client, runtime_dir, number % CONVERSATIONS)
                    else "with another answer"
                )
            except (WireError, TimeoutError) as e:
                outcome = str(e)
            report[kind.__name__][outcome] += 1

        async def again_and_again(kind: Kind, pause: float) -> None:
            running: set[asyncio.Task[None]] = set()
            begun = loop.time()
            for number in itertools.count():
                if len(running) < MOST_AT_ONCE:
                    task = asyncio.create_task(one(kind, number))
                    running.add(task)
                    task.add_done_callback(running.discard)
                else:
                    report[kind.__name__]["left out"] += 1
                await asyncio.sleep(max(0.0, begun + (number + 1) * pause - loop.time()))
                if loop.time() >= end:
                    break
            await asyncio.gather(*running)

        await asyncio.gather(*(again_and_again(kind, pause) for kind, pause in KINDS.items()))
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
