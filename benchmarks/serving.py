"""What supervisor, sockets and process boundary cost: a demo model through a client against the bare engine.

    make bench          or: python -m benchmarks.serving [--engine exllamav2 --gpu 0]

Both sides compute the same greedy answers with the same engine in the same run, alternating; figures are medians of
ROUNDS rounds. Machines are noisy: read the ratios.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.report import Result, write
from model_worker.demo_models import corpus, directory
from model_worker.engine import Finished, Job
from model_worker.engines import build_engine
from protocol import AsyncClient, Client
from protocol.request import SamplingParams
from protocol.worker_spec import EngineSpec

ROUNDS = 5
CONCURRENT = (1, 8, 32)
TOKENS = 160
CACHE_SIZE = max(CONCURRENT) * 512
MODELCTL = [sys.executable, "-m", "supervisor"]
PROMPTS = [prompt for prompt, _ in corpus.STORIES_TEST_REQUESTS]


def bare(engine: object, prompts: list[list[int]]) -> tuple[float, float]:
    """(tokens per second, seconds to the first token) of the engine stepped in this process."""
    sampling = SamplingParams(temperature=0.0)
    begun = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.submit(Job(i, tuple(ids), TOKENS, sampling))  # type: ignore[attr-defined]
    first, tokens, left = 0.0, 0, len(prompts)
    while left:
        for event in engine.step():  # type: ignore[attr-defined]
            first = first or time.perf_counter() - begun
            if isinstance(event, Finished):
                left -= 1
                tokens += event.completion_tokens
    return tokens / (time.perf_counter() - begun), first


async def served(runtime_dir: Path, count: int) -> tuple[float, float]:
    """The same through one client connection."""
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        begun = time.perf_counter()
        firsts: list[float] = []

        async def one(prompt: str) -> int:
            messages = [{"role": "user", "content": prompt}]
            stream = client.generate("stories", messages=messages, max_tokens=TOKENS, temperature=0)
            seen = False
            async for _ in stream:
                if not seen:
                    seen = True
                    firsts.append(time.perf_counter() - begun)
            return int(stream.usage["completion_tokens"])

        tokens = sum(await asyncio.gather(*(one(prompt) for prompt in PROMPTS[:count])))
        return tokens / (time.perf_counter() - begun), min(firsts)


def measure(runtime_dir: Path, supervisor: psutil.Process, name: str, gpu: str) -> list[Result]:
    spec = EngineSpec(
        "stories",
        name,
        str(directory("stories")),
        device="cpu" if gpu == "cpu" else "cuda",
        max_batch_size=max(CONCURRENT),
        options={"cache_size": CACHE_SIZE} if name == "exllamav2" else {},
    )
    engine = build_engine(spec)
    engine.load(lambda *_: None)
    results = []
    for count in CONCURRENT:
        ids = [list(engine.encode(corpus.render_chat([{"role": "user", "content": p}]))) for p in PROMPTS[:count]]
        rates: list[tuple[float, float]] = []
        firsts: list[tuple[float, float]] = []
        for round_number in range(ROUNDS + 1):
            bare_rate, bare_first = bare(engine, ids)
            served_rate, served_first = asyncio.run(served(runtime_dir, count))
            if round_number:  # the first one warms up
                rates.append((served_rate, bare_rate))
                firsts.append((served_first, bare_first))
        ratio = statistics.median(s / b for s, b in rates)
        more = statistics.median(s - b for s, b in firsts)
        results += [
            Result(f"{count} streams: tokens/s served", statistics.median(s for s, _ in rates), "tok/s"),
            Result(
                f"{count} streams: tokens/s, bare engine in one process",
                statistics.median(b for _, b in rates),
                "tok/s",
            ),
            Result(f"{count} streams: served over bare", ratio, "ratio"),
            Result(f"{count} streams: first token later than bare", more * 1000, "ms"),
        ]
    ps = [_timed([*MODELCTL, "ps", "--runtime-dir", str(runtime_dir)]) for _ in range(2 * ROUNDS)]
    results += [
        Result("modelctl ps", statistics.median(ps), "s", "<= 0.2"),
        Result("supervisor's memory (RSS) after serving", supervisor.memory_info().rss / 1e6, "MB", "<= 80"),
    ]
    return results


def _timed(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--gpu", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        runtime_dir = Path(scratch) / "run"
        common = ["--runtime-dir", str(runtime_dir)]
        models_yaml = Path(scratch) / "models.yaml"
        cache = f", cache_size: {CACHE_SIZE}" if arguments.engine == "exllamav2" else ""
        models_yaml.write_text(
            f"models: {{stories: {{model_dir: 'demo:stories', engine: {arguments.engine}, gpu: {arguments.gpu}, "
            f"max_batch_size: {max(CONCURRENT)}{cache}}}}}\n"
        )
        subprocess.run([*MODELCTL, "serve", "--detach", "-c", str(models_yaml), *common], check=True)
        try:
            with Client(runtime_dir=runtime_dir) as client:
                pid = client.status()["supervisor"]["pid"]
            results = measure(runtime_dir, psutil.Process(pid), arguments.engine, arguments.gpu)
            write(f"serving-{arguments.engine}", results)
        finally:
            subprocess.run([*MODELCTL, "shutdown", "--now", *common], check=True)


if __name__ == "__main__":
    main()
