"""A client in a process of its own that asks for a group of answers when its parent says so.

    python -m benchmarks.group_client RUNTIME_DIR MODEL MODEL_DIR STREAMS TOKENS

Each line on stdin is a seed. The client asks for the group and prints [begin, end, tokens] as JSON. The times are
seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import Request, requests
from modelctl import AsyncClient


async def group(client: AsyncClient, model: str, asked: Sequence[Request], tokens: int) -> tuple[float, float, int]:
    begun = time.monotonic()

    async def one(request: Request) -> int:
        stream = client.generate(model, max_tokens=tokens, temperature=0, **request.fields)
        return sum([len(delta.token_ids) async for delta in stream])

    got = sum(await asyncio.gather(*(one(request) for request in asked)))
    return begun, time.monotonic(), got


async def main(runtime_dir: str, model: str, directory: str, streams: int, tokens: int) -> None:
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = requests(model, directory, streams, seed=int(line))
            print(json.dumps(await group(client, model, asked, tokens)), flush=True)


if __name__ == "__main__":
    _, where, name, files, count, length = sys.argv
    asyncio.run(main(where, name, files, int(count), int(length)))
