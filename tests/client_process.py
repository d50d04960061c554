"""A client in a process of its own, for tests that need several of them, or want to kill one.

    python -m tests.client_process RUNTIME_DIR REQUESTS

REQUESTS is a JSON list of [model, prompt, max_tokens]. The client sends all of them at once. It prints ``streaming``
when each has got text. When all have ended it prints JSON: ``answers``, a list of [text, finish_reason or error name],
and ``ignored``, the number of events that belonged to no request.
"""

import asyncio
import json
import sys

from modelctl import AsyncClient
from protocol.errors import WireError


async def main(runtime_dir: str, requests: list[tuple[str, str, int]]) -> None:
    async with AsyncClient(runtime_dir=runtime_dir, timeout=20) as client:
        silent = len(requests)

        async def one(model: str, prompt: str, max_tokens: int) -> tuple[str, str]:
            nonlocal silent
            stream = client.generate(model, prompt, max_tokens=max_tokens, temperature=0)
            heard = False
            try:
                async for _ in stream:
                    if not heard:
                        heard = True
                        silent -= 1
                        if not silent:
                            print("streaming", flush=True)
            except WireError as e:
                return stream.text, e.code.wire_name
            return stream.text, str(stream.finish_reason)

        answers = await asyncio.gather(*(one(*request) for request in requests))
        try:
            # Events that followed a terminal event arrive before this reply.
            await client.status()
        except WireError:
            pass
        print(json.dumps({"answers": answers, "ignored": client._connection.session.ignored}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
