"""On a busy machine each of a thousand requests of all kinds ends as documented.

Beside the requests three processes compute without end, a worker is killed again and again, and clients come and go
over ipc and TCP. Load alone must end no request: a slow machine must not look like a lost connection, a wrong key or a
constraint that cannot be compiled.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from modelctl import AsyncClient
from protocol.errors import WireError
from tests.deterministic_engine import answer
from tests.keyed import Keyed, stranger
from tests.serving import WITHIN, engine

pytestmark = pytest.mark.long

REQUESTS = 1000
BUSY_LOOPS = 3
AT_ONCE = 48
"""Number of requests that are under way together."""
KILL_EVERY = 100
"""Number of requests between two deaths of a worker."""
HANGS_S = 4 * WITHIN
"""Seconds after which an unfinished request counts as hung. The longest requests take seconds."""
ENDLESS = 1_000_000
EMBEDDED = {"engine": "transformers", "gpu": "cpu", "max_batch_size": 16}
MODELS = {
    "mortal": engine(step_s=0.001, context=2 * ENDLESS, max_batch_size=16, replicas=2),
    "steady": engine(step_s=0.001, context=2 * ENDLESS, max_batch_size=64),
    "narrow": engine(step_s=0.001, max_batch_size=1, max_queue=2),
    "off": engine(autostart=False),
    "letters": {"model_dir": "demo:letters", **EMBEDDED},
    "stories": {"model_dir": "demo:stories", **EMBEDDED},
}
LENIENT = {
    "restart": {"limit": 1000, "window": "1m", "initial": "10ms", "max": "100ms"},
    "poison": {"limit": 1000, "window": "10m"},
}


class Clients:
    """The clients of this process: two that all requests share, and others for single requests. ``number`` is that of a
    request."""

    def __init__(self, keyed: Keyed, near: AsyncClient, far: AsyncClient) -> None:
        self.keyed, self.near, self.far = keyed, near, far

    async def whole(self, number: int) -> str:
        client = self.near if number % 2 else self.far
        return await right(client, "mortal", number, 1 + number % 60)

    async def fresh_near(self, number: int) -> str:
        async with AsyncClient(runtime_dir=self.keyed.serving.runtime_dir, timeout=WITHIN) as client:
            return await right(client, "steady", number, 5)

    async def fresh_far(self, number: int) -> str:
        async with AsyncClient(self.keyed.endpoint, key=self.keyed.keys["laptop"], timeout=WITHIN) as client:
            return await right(client, "steady", number, 5)

    async def not_resumed(self, number: int) -> str:
        return await right(self.near, "mortal", number, 40, resume=False)

    async def too_late(self, number: int) -> str:
        return (await self.near.complete("steady", "late", max_tokens=ENDLESS, deadline_ms=50)).finish_reason

    async def impatient(self, number: int) -> str:
        return await right(self.far, "narrow", number, 100, queue_ms=1 + number % 100)

    async def cancelled(self, number: int) -> str:
        stream = self.far.generate("mortal", "cancelled", max_tokens=ENDLESS)
        async for _ in stream:
            stream.cancel()
        return str(stream.finish_reason)

    async def closed(self, number: int) -> str:
        async with AsyncClient(runtime_dir=self.keyed.serving.runtime_dir, timeout=WITHIN) as client:
            stream = client.generate("steady", "closed", max_tokens=ENDLESS)
            await anext(stream)
            await client.close()
            return (await stream.complete()).finish_reason

    async def strange_key(self, number: int) -> str:
        async with AsyncClient(self.keyed.endpoint, key=stranger(self.keyed.keys["laptop"]), timeout=WITHIN):
            return "admitted"

    async def no_key(self, number: int) -> str:
        async with AsyncClient(self.keyed.endpoint, timeout=WITHIN):
            return "admitted"

    async def wrong_field(self, number: int) -> str:
        return (await self.near.complete("mortal", "x", max_tokens=-1)).finish_reason

    async def not_there(self, number: int) -> str:
        return (await self.far.complete("nosuch", "x")).finish_reason

    async def stopped(self, number: int) -> str:
        return (await self.near.complete("off", "x")).finish_reason

    async def too_long(self, number: int) -> str:
        return (await self.far.complete("letters", "x" * 5000)).finish_reason

    async def chat(self, number: int) -> str:
        messages = [{"role": "user", "content": f"Tell me a story about fox {number}."}]
        return (await self.near.complete("stories", messages=messages, max_tokens=8)).finish_reason

    async def shaped(self, number: int) -> str:
        """Send a request with a regular expression that no request has used before."""
        wanted = f"[a-c]{{{1 + number % 5}}} {number}"
        done = await self.far.complete("letters", "sort: c b a ->", regex=wanted, max_tokens=40)
        return done.finish_reason if done.text.endswith(f" {number}") else f"another answer: {done.text!r}"

    async def no_shape(self, number: int) -> str:
        return (await self.near.complete("letters", "sort: c b a ->", regex=f"(a{number}")).finish_reason

    async def tokenized(self, number: int) -> str:
        ids = await self.far.tokenize("letters", f"sort: c b a -> {number}")
        return "tokenized" if await self.near.detokenize("letters", ids) else "no text"


async def right(client: AsyncClient, model: str, number: int, tokens: int, **options: object) -> str:
    """Send a request with a known answer. Return its finish reason, or a description of a wrong answer."""
    prompt = f"request {number}"
    done = await client.complete(model, prompt, max_tokens=tokens, **options)
    return done.finish_reason if done.text == answer(prompt, tokens) else f"another answer: {done.text!r}"


DOCUMENTED: dict[Callable[[Clients, int], Awaitable[str]], set[str]] = {
    Clients.whole: {"length"},
    Clients.fresh_near: {"length"},
    Clients.fresh_far: {"length"},
    Clients.not_resumed: {"length", "worker_died"},
    Clients.too_late: {"deadline_exceeded"},
    Clients.impatient: {"length", "queue_timeout", "overloaded"},
    Clients.cancelled: {"cancelled"},
    Clients.closed: {"connection_lost"},
    Clients.strange_key: {"unauthorized"},
    Clients.no_key: {"unauthorized"},
    Clients.wrong_field: {"invalid_request"},
    Clients.not_there: {"model_not_found"},
    Clients.stopped: {"model_not_running"},
    Clients.too_long: {"context_overflow"},
    Clients.chat: {"length", "stop"},
    Clients.shaped: {"stop"},
    Clients.no_shape: {"invalid_request"},
    Clients.tokenized: {"tokenized"},
}
"""The ends that each kind of request may have."""


@contextmanager
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def load(keyed: Keyed, chance: random.Random) -> dict[str, Counter[str]]:
    """Run all requests. Return the counts of their ends by kind; an undocumented error counts by its message."""
    report: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in DOCUMENTED}
    kinds = chance.choices(list(DOCUMENTED), k=REQUESTS)
    places = asyncio.Semaphore(AT_ONCE)
    key = keyed.keys["laptop"]
    async with (
        AsyncClient(runtime_dir=keyed.serving.runtime_dir, timeout=WITHIN) as near,
        AsyncClient(keyed.endpoint, key=key, timeout=WITHIN) as far,
    ):
        clients = Clients(keyed, near, far)

        async def one(number: int) -> None:
            kind = kinds[number]
            async with places:
                try:
                    if number % KILL_EVERY == KILL_EVERY - 1:
                        up = [m["pid"] for m in (await near.status("mortal"))["models"] if m["state"] == "ready"]
                        if up:
                            os.kill(chance.choice(up), signal.SIGKILL)
                    end = await asyncio.wait_for(kind(clients, number), HANGS_S)
                except WireError as e:
                    end = e.code.wire_name if e.code.wire_name in DOCUMENTED[kind] else str(e)
                except TimeoutError as e:
                    end = f"no end at all: {e!r}"
            report[kind.__name__][end] += 1

        await asyncio.gather(*map(one, range(REQUESTS)))
    return report


def test_every_end_is_documented_for_what_happened() -> None:
    seed = int(os.environ.get("TEST_SEED", random.getrandbits(32)))
    print(f"TEST_SEED={seed}")
    keys = {"laptop": "infer"}
    with busy_loops(), Keyed(MODELS, keys, **LENIENT) as keyed:
        report = asyncio.run(load(keyed, random.Random(seed)))
    for kind, ends in report.items():
        print(f"{kind}: {dict(ends)}")
    surprising = {
        kind.__name__: {end: count for end, count in report[kind.__name__].items() if end not in documented}
        for kind, documented in DOCUMENTED.items()
    }
    assert sum(count for ends in report.values() for count in ends.values()) == REQUESTS
    assert not {kind: ends for kind, ends in surprising.items() if ends}
