"""Serve models on GPUs while their workers are killed, stopped, paused and restarted, and check every answer.

    python -m benchmarks.chaos_exllamav2 [--gpus 0 1] [--requests 10000] [--seconds 180] [--seed N]

The demo models have known answers. Each is served by two workers with captured steps: in fp16 with an FP16 cache, and
one of them in GPTQ's 4 bits with a Q8 cache. First so many requests of mixed shapes come without faults: greedy, seeded
draws, penalties, log-probabilities, constraints, stop strings, prompts of up to 1,500 tokens, and clients that leave.
GPU memory must then be where it was before. Then the same load goes on under faults for so many seconds.

A greedy answer must be the known one; an answer with a seed must be the one of the first phase, wherever it is drawn.
For each answer, the tokens that came must be those that the worker counted. An answer may end with an error only if it
says that the request can be sent again, or that its worker died too often. At the end nothing may be left: no request,
no page, no process. The seed is printed.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.harness import Server, arguments_for, entry
from benchmarks.memory import MIB, memory
from benchmarks.report import Result, write
from modelctl import AsyncClient
from protocol.errors import WireError
from tools.demo_models import corpus

MODELS: dict[str, str] = {"letters": "letters", "stories": "stories", "quantised": "letters-gptq"}
SOURCES = {"letters": "letters", "stories": "stories", "quantised": "letters"}
AT_ONCE = 96
SEEDS = 4
LEAVES_MIB = 64
"""Most GPU memory that may be held in addition after all requests."""
MAY_END = {"worker_died", "poisoned", "model_not_running", "queue_timeout", "overloaded"}
SHAPES = (
    "greedy", "greedy", "greedy", "seeded", "seeded", "penalties", "logprobs", "regex", "choice", "stop", "long",
    "leaves",
)  # fmt: skip


@dataclass
class Checked:
    """What was seen. ``wrong`` describes each answer that breaks a promise."""

    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seeded: dict[tuple[str, str, int], str] = field(default_factory=dict)
    differ: int = 0
    """Seeded answers that differ from the first one with the same seed."""


async def ask(client: AsyncClient, draw: random.Random, checked: Checked, faulty: bool) -> None:
    """Send one request of a random shape, and check its answer."""
    model = draw.choice(list(MODELS))
    prompt, expected = draw.choice(corpus.TEST_PROMPTS[SOURCES[model]])
    shape = draw.choice(SHAPES)
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 1000, "temperature": 0}
    seed = draw.randrange(SEEDS)
    if shape == "seeded":
        prompt, _ = corpus.TEST_PROMPTS[SOURCES[model]][draw.randrange(8)]
        fields |= {"prompt": prompt, "temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": seed, "max_tokens": 200}
    elif shape == "penalties":
        fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 0.7, "max_tokens": 100}
    elif shape == "logprobs":
        fields |= {"logprobs": True, "top_logprobs": 3}
    elif shape == "regex":
        fields |= {"regex": "[a-z ]{20,40}"}
    elif shape == "choice":
        fields |= {"choice": ["one of these", "or of those", "none"]}
    elif shape == "stop":
        fields |= {"stop": [expected[len(expected) // 2 :][:6]]}
        expected = expected[: expected.index(fields["stop"][0])]
    elif shape == "long":
        fields |= {"prompt": prompt + " x" * draw.randrange(700), "max_tokens": draw.randrange(1, 20)}
    checked.requests += 1
    text, ids = "", 0
    stream = client.generate(model, **fields)
    leave_at = draw.randrange(1, 30) if shape == "leaves" else None
    try:
        async for delta in stream:
            text += delta.text
            ids += len(delta.token_ids)
            if leave_at is not None and ids >= leave_at:
                stream.close()
                checked.ends["client left"] += 1
                if not expected.startswith(text):
                    checked.wrong.append(f"{model} {shape}: {text!r} is no beginning of {expected!r}")
                return
    except WireError as e:
        end = e.code.wire_name
        checked.ends[end] += 1
        if not faulty or not (e.retry_after_ms is not None or end in MAY_END):
            checked.wrong.append(f"{model} {shape}: ended with {end}: {e}")
        return
    finally:
        checked.tokens += ids
    checked.ends[str(stream.finish_reason)] += 1
    counted = stream.usage["completion_tokens"]
    if ids != counted:
        checked.wrong.append(f"{model} {shape}: {ids} tokens came, the worker counted {counted}")
    if shape in ("greedy", "logprobs", "stop", "leaves") and text != expected:
        checked.wrong.append(f"{model} {shape}: {text!r}, expected {expected!r}")
    elif shape == "seeded":
        first = checked.seeded.setdefault((model, prompt, seed), text)
        checked.differ += text != first
    elif shape == "regex" and not (20 <= len(text) <= 40 and text.replace(" ", "").isalpha()):
        checked.wrong.append(f"{model} regex: {text!r}")
    elif shape == "choice" and text not in fields["choice"]:
        checked.wrong.append(f"{model} choice: {text!r}")


async def load(server: Server, checked: Checked, draw: random.Random, requests: int, until: float | None) -> None:
    """Keep AT_ONCE requests in flight: so many in all, or until a time (monotonic seconds)."""
    begun = checked.requests
    async with AsyncClient(runtime_dir=server.runtime_dir, timeout=120) as client:

        async def one() -> None:
            while (time.monotonic() < until) if until is not None else checked.requests - begun < requests:
                await ask(client, draw, checked, until is not None)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))


async def inflict(server: Server, checked: Checked, draw: random.Random, until: float) -> None:
    """Kill, stop, pause and restart workers, one each half second, and leave the last ten seconds alone."""
    resumes: list[asyncio.Task[None]] = []
    async with AsyncClient(endpoint=f"ipc://{server.runtime_dir}/admin", timeout=120) as admin:
        while time.monotonic() < until - 10.0:
            await asyncio.sleep(draw.uniform(0.2, 0.8))
            models = (await admin.status())["models"]
            ready = [m for m in models if m["state"] == "ready" and m["pid"]]
            if len(ready) <= len(MODELS):
                continue
            chosen = draw.choice(ready)
            kind = draw.choices(("kill", "pause", "stop", "restart"), (6, 3, 1, 1))[0]
            checked.faults[kind] += 1
            with contextlib.suppress(ProcessLookupError):
                if kind == "kill":
                    os.kill(chosen["pid"], signal.SIGKILL)
                elif kind == "stop":  # the supervisor finds that it hangs, and kills it
                    os.kill(chosen["pid"], signal.SIGSTOP)
                elif kind == "pause":
                    os.kill(chosen["pid"], signal.SIGSTOP)
                    resumes.append(asyncio.create_task(_resume(chosen["pid"])))
                else:
                    with contextlib.suppress(WireError):
                        await admin.call("restart", model=chosen["name"])
        await asyncio.gather(*resumes)


async def _resume(pid: int) -> None:
    await asyncio.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def under_faults(server: Server, checked: Checked, draw: random.Random, seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(load(server, checked, draw, 0, until), inflict(server, checked, draw, until))


def at_rest(server: Server, within: float = 120.0) -> list[str]:
    """Wait until all workers are ready and have nothing to do. Return what is left after so many seconds."""
    deadline = time.monotonic() + within
    while True:
        left = []
        for model in server.overview()["models"]:
            stats = model["engine_stats"] or {}
            if model["state"] != "ready" or model["active"] or model["queued"] or stats.get("pages_used"):
                left.append(f"{model['name']}: {model['state']}, {model['active']} active, {stats}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--no-graphs", action="store_true", help="with graphs: false")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    draw, checked = random.Random(arguments.seed), Checked()
    models = {
        name: entry(arguments, model, 32, 32 * 1024, graphs=not arguments.no_graphs, replicas=2)
        | ({"cache_mode": "Q8"} if name == "quantised" else {})
        for name, model in MODELS.items()
    }
    if arguments.engine != "exllamav2":  # tries the script itself, without a GPU
        del MODELS["quantised"]
        models = {name: entry(arguments, model, 32, 0, replicas=2) for name, model in MODELS.items()}
    elif len(arguments.gpus) > 1:
        models = {name: made | {"gpu": "auto"} for name, made in models.items()}
    settings = {
        "restart": {"limit": 1000, "window": "10s", "initial": "50ms", "max": "50ms"},
        "watch": {"start": "60s", "load": "60s", "idle": "3s", "step": "3s"},
    }
    requests = 300 if arguments.quick else arguments.requests
    seconds = 30.0 if arguments.quick else arguments.seconds
    memories = [memory(gpu) for gpu in arguments.gpus]
    before_all = [each.used() for each in memories]
    with Server(models, settings=settings) as server:
        print({m["name"]: m["decoding"] for m in server.overview()["models"]}, flush=True)
        asyncio.run(load(server, checked, draw, 300, None))  # first use of every shape
        left = at_rest(server)
        warm = sum(each.used() for each in memories)
        begun = time.monotonic()
        asyncio.run(load(server, checked, draw, requests, None))
        took = time.monotonic() - begun
        left += at_rest(server)
        grown = sum(each.used() for each in memories) - warm
        quiet, wrong_quiet, differ_quiet = checked.requests, len(checked.wrong), checked.differ
        print(f"{quiet} requests in {took:.0f} s, {grown / MIB:.0f} MiB more; {checked.wrong[:10]}", flush=True)
        asyncio.run(under_faults(server, checked, draw, seconds))
        left += at_rest(server)
        workers = [psutil.Process(m["pid"]) for m in server.overview()["models"]]
        deaths = sum(m["restarts"] for m in server.overview()["models"])
    processes = sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in workers)
    held = sum(each.used() for each in memories) - sum(before_all)
    for text in (checked.wrong + left)[:40]:
        print(text, flush=True)
    write(
        "chaos-exllamav2",
        [
            Result("requests without faults", quiet, "requests", f">= {requests}"),
            Result("requests without faults, per second", requests / took, "1/s"),
            Result("answers that were wrong, without faults", wrong_quiet, "answers", "<= 0"),
            Result("seeded answers that differ from the first, without faults", differ_quiet, "answers"),
            Result("GPU memory held in addition after them", grown / MIB, "MiB", f"<= {LEAVES_MIB}"),
            Result("requests under faults", checked.requests - quiet, "requests"),
            Result("tokens checked", checked.tokens, "tokens"),
            Result("answers that were wrong, under faults", len(checked.wrong) - wrong_quiet, "answers", "<= 0"),
            Result("seeded answers that differ from the first, under faults", checked.differ - differ_quiet, "answers"),
            Result("workers that were started again", deaths, "times"),
            Result("things left at rest", len(left), "things", "<= 0"),
            Result("processes left after the shutdown", processes, "processes", "<= 0"),
            Result("GPU memory held after the shutdown", held / MIB, "MiB", "<= 16"),
            *(Result(f"fault: {name}", count, "times") for name, count in sorted(checked.faults.items())),
            *(Result(f"ended as {name}", count, "requests") for name, count in sorted(checked.ends.items())),
        ],
        arguments.out,
    )


if __name__ == "__main__":
    main()
