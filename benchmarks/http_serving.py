"""Measure serving over HTTP against serving over ZeroMQ: tokens per second, first tokens, and a thousand streams.

    python -m benchmarks.http_serving [--engine exllamav2] [--gpu 0] [--model 1b] [--tools] [--quick] [--out DIR]

Both sides ask the same supervisor in the same run, in turn: this process with ``AsyncClient``, and this process with
``benchmarks.openai_client`` through a gateway. The gateway, this process and everything else have cores of their own,
where the machine has at least six. Figures are medians of ROUNDS rounds.

With --tools the requests over HTTP are chats with tools, and the answers are reasoning. So the gateway parses them, and
the worker watches for the beginning of a call. The same chats over ZeroMQ have no tools, and are read as they are.

A thousand streams come from an engine without torch that makes 20 tokens per second for each stream. The gaps between
the tokens of a stream at the reader, while all streams run, are compared with the gaps between the times at which the
engine made these tokens.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Server, arguments_for, entry, percentile, quiet_heap, requests
from benchmarks.http_path import gateway
from benchmarks.openai_client import stream
from benchmarks.report import Result, write
from modelctl import AsyncClient

ROUNDS, FIRST_ROUNDS = 5, 21
CONCURRENT = (1, 8, 32)
TOKENS = 256
MANY, RATE, WORKERS, READERS = 1000, 20, 10, 4
MANY_SECONDS = 15
CORES = 6
"""Least cores of a machine on which the parts get cores of their own."""


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("read", "write", "search")
]
TEMPLATE = (
    "{# <tool_call> arguments </tool_call> </think> #}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"
)
"""A chat template that shows Hermes' format of calls and begins the reasoning. The prompt has no tools, so it
is as long as one without tools."""


@contextmanager
def with_template(directory: str) -> Iterator[str]:
    """Give a directory with the files of a model and ``TEMPLATE``."""
    with tempfile.TemporaryDirectory(prefix="chat-", dir=Path(directory).parent) as parent:
        made = Path(parent, "model")
        shutil.copytree(directory, made, copy_function=os.link)
        (made / "chat_template.jinja").unlink(missing_ok=True)
        (made / "chat_template.jinja").write_text(TEMPLATE)
        yield str(made)


def chat_of(number: int) -> list[dict[str, str]]:
    """Return a conversation of about 64 tokens."""
    return [{"role": "user", "content": f"{number}: " + "sort: d b a c " * 8}]


Prompts = Callable[[int, int], Sequence[dict[str, Any]]]
"""Returns the fields of as many prompts as the first argument says. The second is the seed."""


@contextmanager
def serving_gateway(runtime_dir: Path, cores: set[int] | None) -> Iterator[tuple[int, psutil.Process]]:
    """Run a gateway for a supervisor, and give its port and its process."""
    spawn = multiprocessing.get_context("spawn")
    _ours, theirs = spawn.Pipe()  # the child asks nothing, but needs the other end open
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        process = spawn.Process(target=gateway, args=(str(runtime_dir), listener, theirs))
        process.start()
        if cores:
            assert process.pid is not None
            os.sched_setaffinity(process.pid, cores)
        try:
            yield listener.getsockname()[1], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.join()


async def over_zeromq(
    runtime_dir: Path, model: str, asked: Sequence[dict[str, Any]], tokens: int
) -> tuple[float, float]:
    """Return (tokens per second, seconds to the first text, the median of the streams).

    asked  the fields of each request's prompt
    """
    async with AsyncClient(runtime_dir=runtime_dir) as client:

        async def one(fields: dict[str, Any]) -> float:
            first = 0.0
            answer = client.generate(model, max_tokens=tokens, temperature=0, ignore_eos=True, **fields)
            async for delta in answer:
                if delta.text and not first:
                    first = time.perf_counter() - begun
            return first

        begun = time.perf_counter()
        firsts = await asyncio.gather(*map(one, asked))
        return tokens * len(asked) / (time.perf_counter() - begun), statistics.median(firsts)


async def over_http(port: int, model: str, asked: Sequence[dict[str, Any]], tokens: int) -> tuple[float, float]:
    """Return the same as ``over_zeromq``."""
    bodies = [
        {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        | ({"tools": TOOLS, **fields} if "messages" in fields else {"prompt": next(iter(fields.values()))})
        for fields in asked
    ]
    begun = time.perf_counter()
    answers = await asyncio.gather(*(stream("127.0.0.1", port, body) for body in bodies))
    took = time.perf_counter() - begun
    if wrong := [answer.error or "no end" for answer in answers if not answer.finished]:
        raise RuntimeError(f"an answer did not end: {wrong[0]}")
    return tokens * len(asked) / took, statistics.median(answer.came[0] - begun for answer in answers)


def measure(server: Server, port: int, model: str, prompts: Prompts, quick: bool) -> list[Result]:
    """Measure tokens per second and first tokens."""
    results = []
    tokens = 32 if quick else TOKENS
    for count in CONCURRENT:
        pairs = []
        for number in range(1 + (1 if quick else ROUNDS)):
            asked = prompts(count, number)
            zeromq = asyncio.run(over_zeromq(server.runtime_dir, model, asked, tokens))
            http = asyncio.run(over_http(port, model, asked, tokens))
            if number:  # the first one warms up
                pairs.append((http, zeromq))
        label = f"{model}, {count} streams: "
        results += [
            Result(f"{label}tokens per second over HTTP", statistics.median(h[0] for h, _ in pairs), "tokens/s"),
            Result(f"{label}tokens per second over ZeroMQ", statistics.median(z[0] for _, z in pairs), "tokens/s"),
            Result(f"{label}HTTP over ZeroMQ", statistics.median(h[0] / z[0] for h, z in pairs), "ratio", ">= 0.97"),
        ]
    later = []
    for number in range(3 if quick else FIRST_ROUNDS):
        asked = prompts(1, 100 + number)
        zeromq = asyncio.run(over_zeromq(server.runtime_dir, model, asked, 4))
        http = asyncio.run(over_http(port, model, asked, 4))
        later.append(http[1] - zeromq[1])
    results.append(Result(f"{model}: first token later than over ZeroMQ", 1e3 * statistics.median(later), "ms", "<= 2"))
    return results


Times = list[tuple[float, float]]
"""When each token of a stream was read, and when it was made, in seconds of the monotonic clock."""


def read_many(port: int, models: list[str], tokens: int, tools: bool) -> tuple[list[Times], int]:
    """Read a stream of each of these models. Return the times of their tokens, and the number of joined tokens."""

    async def main() -> list[tuple[Times, int]]:
        return list(await asyncio.gather(*(_times(port, model, tokens, tools) for model in models)))

    read = asyncio.run(main())
    return [times for times, _ in read], sum(joined for _, joined in read)


def gaps(streams: list[Times]) -> tuple[list[float], list[float]]:
    """Return the gaps between the tokens of a stream as read, and as made, while all streams run."""
    begin, end = max(times[0][0] for times in streams), min(times[-1][0] for times in streams)
    read: list[float] = []
    made: list[float] = []
    for times in streams:
        together = [each for each in times if begin <= each[0] <= end]
        read += [b[0] - a[0] for a, b in pairwise(together)]
        made += [b[1] - a[1] for a, b in pairwise(together)]
    return read, made


async def _times(port: int, model: str, tokens: int, tools: bool) -> tuple[Times, int]:
    """Return the times of a stream's tokens, and how many tokens came joined with others."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path, marker, asked = (
        ("chat/completions", b'"delta":{"content":"', {"messages": chat_of(0), "tools": TOOLS})
        if tools
        else ("completions", b'"text":"', {"prompt": "x"})
    )
    body = json.dumps({"model": model, "max_tokens": tokens, "stream": True} | asked)
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    times: Times = []
    joined = 0
    try:
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return times, joined
            if marker in line:
                now = time.monotonic()
                texts = line.partition(marker)[2].partition(b'"')[0].split()
                joined += max(0, len(texts) - 1)
                times += [(now, int(text) / 1e9) for text in texts]
    finally:
        writer.close()
    raise RuntimeError(f"a stream ended after {len(times)} tokens")


def measure_many(cores: list[set[int]] | None, quick: bool, tools: bool) -> list[Result]:
    """Measure a thousand streams."""
    streams, seconds = (80, 3) if quick else (MANY, MANY_SECONDS)
    models = {
        f"m{i}": {
            "model_dir": ".", "engine": "benchmarks.paced_engine:SteppedEngine", "max_batch_size": streams // WORKERS,
            "max_queue": streams, "options": {"rate": RATE},
        } | ({"tool_format": "hermes", "reasoning": {"start": "<think>", "end": "</think>"}} if tools else {})
        for i in range(WORKERS)
    }  # fmt: skip
    with Server(models) as server, serving_gateway(server.runtime_dir, cores[1] if cores else None) as (port, process):
        before = process.cpu_times()
        wanted = [list(models) * (streams // WORKERS // READERS)] * READERS
        begun = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(READERS) as readers:
            parts = readers.starmap(read_many, [(port, each, RATE * seconds, tools) for each in wanted])
        took = time.perf_counter() - begun
        after = process.cpu_times()
    read, made = gaps([times for part in parts for times in part[0]])
    busy = (after.user + after.system - before.user - before.system) / took
    label = f"{sum(map(len, wanted))} streams at {RATE} tokens/s: "
    return [
        Result(f"{label}gap between tokens, p99, engine", 1e3 * percentile(made, 99), "ms"),
        Result(f"{label}gap between tokens, p99, over HTTP", 1e3 * percentile(read, 99), "ms"),
        Result(
            f"{label}p99 over HTTP by that of the engine", percentile(read, 99) / percentile(made, 99), "ratio", "<= 2"
        ),
        Result(f"{label}processor time of the gateway", busy, "cores"),
        Result(f"{label}tokens joined because a write was slow", float(sum(part[1] for part in parts)), "tokens"),
    ]


def measure_model(arguments: argparse.Namespace, cores: list[set[int]] | None) -> list[Result]:
    """Measure a model over HTTP and over ZeroMQ. ``cores``: of this process, of the gateway, and of all others."""
    if cores:
        os.sched_setaffinity(0, cores[2])
    made = entry(arguments, arguments.model, max(CONCURRENT), max(CONCURRENT) * 512)
    directory = made["model_dir"]

    def prompts(count: int, seed: int) -> list[dict[str, Any]]:
        if arguments.tools:
            return [{"messages": chat_of(seed * count + i)} for i in range(count)]
        return [request.fields for request in requests(arguments.model, directory, count, seed=seed)]

    with ExitStack() as stack:
        if arguments.tools:
            made["model_dir"] = stack.enter_context(with_template(directory))
        server = stack.enter_context(Server({arguments.model: made}))
        if cores:
            os.sched_setaffinity(0, cores[0])
        quiet_heap()
        with serving_gateway(server.runtime_dir, cores[1] if cores else None) as (port, _):
            return measure(server, port, arguments.model, prompts, arguments.quick)


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="1b", help="of benchmarks.models; for the CPU: letters")
    parser.add_argument("--tools", action="store_true", help="chats with tools, and answers that reason")
    parser.add_argument("--many", action="store_true", help="only the thousand streams")
    arguments = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cores = [set(available[:2]), set(available[2:4]), set(available[4:])] if len(available) >= CORES else None
    results = [] if arguments.many else measure_model(arguments, cores)
    if cores:
        os.sched_setaffinity(0, cores[2] | cores[0])
    results += measure_many(cores, arguments.quick, arguments.tools)
    write(f"http-{'tools-' if arguments.tools else ''}{arguments.engine}", results, arguments.out)


if __name__ == "__main__":
    main()
