"""Kill workers all the time, and check every answer.

    python -m benchmarks.survival [--seconds 120] [--every 5] [--defaults]

Two models have two workers each. 20 clients ask one question after the other. Every few seconds a random worker gets
SIGKILL. The engine is a deterministic one that needs no torch: token k of an answer is a function of prompt and k. So a
token that is missing, came twice or belongs to another request is noticed. ``--defaults`` keeps the default limits of
restarts and of deaths that may be blamed on a request, and kills every second. Then requests are refused as poisoned
and models fail, but the invariants must still hold. ``--seed`` repeats the choices of another run.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Server, arguments_for
from benchmarks.report import Result, write
from modelctl import AsyncClient
from protocol.errors import WireError
from tests.deterministic_engine import answer
from tests.serving import engine

CLIENTS = 20
MODELS = ("a", "b")
TOKENS = (20, 400)
STEP_S = 0.004
ENGINE = engine(step_s=STEP_S, context=4096, replicas=2, max_batch_size=8)
RAISED = {
    "restart": {"limit": 1000, "window": "1m", "initial": "10ms", "max": "100ms"},
    "poison": {"limit": 1000, "window": "10m"},
}
EXPECTED = frozenset({"poisoned", "model_failed", "worker_died"})
"""Ends other than a whole answer that the defaults allow."""


@dataclass
class Tally:
    """The results of all requests."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    twice: int = 0
    resumed: int = 0
    kills: int = 0
    for_nobody: int = 0
    unanswered: int = 0
    longest_gap_s: float = 0.0


async def one_client(number: int, runtime_dir: Path, until: float, chance: random.Random, tally: Tally) -> None:
    async with AsyncClient(runtime_dir=runtime_dir, timeout=20) as client:
        count = 0
        while time.monotonic() < until:
            count += 1
            model, prompt, tokens = chance.choice(MODELS), f"client {number} request {count}", chance.randint(*TOKENS)
            stream = client.generate(model, prompt, max_tokens=tokens)
            tally.unanswered += 1
            last, end = time.monotonic(), ""
            try:
                async for _ in stream:
                    now = time.monotonic()
                    tally.longest_gap_s, last = max(tally.longest_gap_s, now - last), now
                end = str(stream.finish_reason)
            except WireError as e:
                end = e.code.wire_name
                await asyncio.sleep(0.05)  # a failed model refuses at once
            tally.unanswered -= 1
            tally.ends[end] += 1
            tally.wrong += stream.text != answer(prompt, len(stream.token_ids))
            tally.wrong += end == "length" and len(stream.token_ids) != tokens
            tally.resumed += stream.usage.get("resumes", 0) > 0
        await client.status()  # an event behind a terminal event would arrive before the answer to this call
        tally.for_nobody += client._connection.session.ignored


async def killer(server: Server, every_s: float, until: float, chance: random.Random, tally: Tally) -> None:
    async with AsyncClient(runtime_dir=server.runtime_dir) as client:
        while time.monotonic() + every_s < until:
            await asyncio.sleep(every_s)
            pids = [m["pid"] for m in (await client.status())["models"] if m["state"] == "ready"]
            if pids:
                os.kill(chance.choice(pids), signal.SIGKILL)
                tally.kills += 1


async def run(server: Server, seconds: float, every_s: float, seed: int) -> Tally:
    tally, until = Tally(), time.monotonic() + seconds
    clients = [
        one_client(number, server.runtime_dir, until, random.Random(seed * CLIENTS + number), tally)
        for number in range(CLIENTS)
    ]
    await asyncio.gather(*clients, killer(server, every_s, until, random.Random(seed), tally))
    return tally


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, help="seconds between kills: 5, or 1 with --defaults")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    seconds = 10.0 if arguments.quick else arguments.seconds
    every = arguments.every or (1.0 if arguments.defaults or arguments.quick else 5.0)
    print(f"seed {arguments.seed}")
    with Server(dict.fromkeys(MODELS, ENGINE), settings={} if arguments.defaults else RAISED) as server:
        tally = asyncio.run(run(server, seconds, every, arguments.seed))
        states = Counter(m["state"] for m in server.overview()["models"])
    total = sum(tally.ends.values())
    surprising = sum(n for end, n in tally.ends.items() if end != "length" and end not in EXPECTED)
    results = [
        Result("requests", total, "requests"),
        Result("workers killed", tally.kills, "times"),
        Result("requests without exactly one terminal event", tally.unanswered + tally.for_nobody, "requests", "<= 0"),
        Result("answers with a missing, duplicated or foreign token", tally.wrong, "answers", "<= 0"),
        Result("ends that are not documented", surprising, "requests", "<= 0"),
        Result("finished", tally.ends["length"] / total, "ratio", None if arguments.defaults else ">= 0.99"),
        Result("went on in another worker and finished", tally.resumed, "requests"),
        Result("longest gap between two deltas", tally.longest_gap_s, "s"),
        *(Result(f"ended as {end}", n, "requests") for end, n in sorted(tally.ends.items()) if end != "length"),
        *(Result(f"workers {state} at the end", n, "workers") for state, n in sorted(states.items())),
    ]
    write("survival-defaults" if arguments.defaults else "survival", results, arguments.out)


if __name__ == "__main__":
    main()
