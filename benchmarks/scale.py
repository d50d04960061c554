"""Measure the cost of many streams: the supervisor's CPU and the latency per token with 1 to 3,000 streams, and memory.

    python -m benchmarks.scale [--rounds 3] [--seconds 5]

Each size has one real supervisor and real workers, with an engine without torch (``benchmarks.paced_engine``). It makes
RATE tokens per second in all, for any number of streams, one after the other. So every token is a frame of its own,
which is the most expensive case. (An engine that steps 32 streams of a connection sends them in one frame.) So each
size has the same events per second. Streams, connections and workers are increased independently. With more workers,
more processes share the machine's cores, and their caches are cold when they wake. One client process reads all
connections (``benchmarks.many_streams``).

CPU is that of all the supervisor's threads (schedstat), divided by the tokens that came. Latency is from the engine's
step to the client's receipt. Sizes take turns in every round, and figures are medians of rounds. Memory is the
supervisor's RSS with MEMORY_STREAMS streams open and nearly idle, minus its RSS with their connections open and used,
minus prompts and delivered ids.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, percentile
from benchmarks.many_streams import ManyStreams
from benchmarks.report import RESULTS, Result, write

RATE = 2000
"""Tokens per second of all streams together."""
ROUNDS, SECONDS = 3, 5.0
ENDLESS = 1_000_000
MEMORY_STREAMS = 3000
MEMORY_RATE = 100
"""Tokens per second while memory is measured."""
KIB = 1024


@dataclass(frozen=True)
class Size:
    streams: int
    connections: int
    workers: int

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.connections} connections, {self.workers} workers"


MIDDLE = Size(1000, 50, 4)
AXES = {
    "streams": (Size(1, 1, 1), Size(10, 10, 4), Size(100, 50, 4), MIDDLE, Size(3000, 50, 4)),
    "connections": (Size(1000, 1, 4), MIDDLE, Size(1000, 200, 4)),
    "workers": (Size(1000, 50, 1), MIDDLE, Size(1000, 50, 16)),
}
ALL_AT_MOST = Size(3000, 200, 16)
SIZES = tuple(dict.fromkeys([*(size for axis in AXES.values() for size in axis), ALL_AT_MOST]))
REFERENCE = AXES["streams"][1]
GROWTHS: tuple[tuple[Size, Size, str, str | None], ...] = (
    (REFERENCE, MIDDLE, "1,000 streams over 10", "<= 1.25"),
    (AXES["connections"][0], AXES["connections"][2], "200 connections over 1", None),
    (AXES["workers"][0], AXES["workers"][2], "16 workers over 1", None),
)
"""(smaller size, larger size, name of the growth, target)"""


@dataclass(frozen=True)
class Figures:
    """The result of one size: seconds of the supervisor's CPU per token, and seconds from a token's making to its
    receipt."""

    cpu: float
    median: float
    p99: float
    rate: float


def models(size: Size, rate: float) -> dict[str, dict[str, Any]]:
    """Return models that make ``rate`` tokens per second in all."""
    batch = -(-size.streams // size.workers)
    return {
        f"m{number}": {
            "model_dir": ".", "engine": "benchmarks.paced_engine:PacedEngine", "max_batch_size": batch,
            "max_queue": 4096, "options": {"rate": rate, "turn": number, "of": size.workers, "context": 2 * ENDLESS},
        } for number in range(size.workers)
    }  # fmt: skip


def wanted(size: Size) -> list[tuple[int, str, str, int]]:
    return [
        (i % size.connections, f"m{i * size.workers // size.streams}", f"stream {i:06}", ENDLESS)
        for i in range(size.streams)
    ]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all living threads of a process, to the nanosecond (psutil's ticks are 10 ms)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(size: Size, seconds: float) -> Figures:
    with Server(models(size, RATE)) as server:
        pid = server.overview()["supervisor"]["pid"]
        with ManyStreams(server.runtime_dir, size.connections) as client:
            client.begin(wanted(size))
            client.read(min(seconds, 2.0))
            client.ages.clear()
            before, begun = cpu_seconds(pid), time.monotonic()
            client.read(seconds)
            spent, took = cpu_seconds(pid) - before, time.monotonic() - begun
            ages = client.ages
            if client.failures or client.ended:
                raise RuntimeError(f"{size}: {client.ended} streams ended, {client.failures[:3]}")
    return Figures(spent / len(ages), statistics.median(ages), percentile(ages, 99), len(ages) / took)


def rss(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * KIB


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of a connection, and of a stream without its prompt and its delivered ids."""

    connection: float
    stream: float


def measure_memory(size: Size) -> MemoryFigures:
    with Server(models(size, MEMORY_RATE)) as server:
        pid = server.overview()["supervisor"]["pid"]
        with ManyStreams(server.runtime_dir, 1) as first:  # takes the memory that is allocated only once
            first.begin([(0, "m0", "warm", ENDLESS)])
        server.wait_idle("m0")
        alone = rss(pid)
        with ManyStreams(server.runtime_dir, size.connections) as client:
            client.exchange(300)  # libzmq's queues grow by 256 messages
            connected = rss(pid)
            asked = wanted(size)
            client.begin(asked)
            client.read(3.0)
            opened = rss(pid)
            own = sum(len(prompt) for _, _, prompt, _ in asked) + 4 * len(client.ages)
    return MemoryFigures((connected - alone) / size.connections, (opened - connected - own) / size.streams)


def results_of(found: dict[Size, list[Figures]], memory: dict[Size, list[MemoryFigures]]) -> list[Result]:
    results = []
    middle = {
        size: Figures(*(statistics.median(getattr(f, name) for f in figures) for name in Figures.__annotations__))
        for size, figures in found.items()
    }
    for size, f in middle.items():
        results += [
            Result(f"{size}: supervisor's CPU of a token", f.cpu * 1e6, "µs"),
            Result(f"{size}: on its way, median", f.median * 1e6, "µs"),
            Result(f"{size}: on its way, p99", f.p99 * 1e6, "µs"),
            Result(f"{size}: tokens read", f.rate, "tok/s"),
        ]
    for less, more, what, target in GROWTHS:
        if less in found and more in found:
            for name, title in (("cpu", "CPU of a token"), ("median", "latency, median")):
                ratio = statistics.median(
                    getattr(b, name) / getattr(a, name) for a, b in zip(found[less], found[more], strict=True)
                )
                results.append(Result(f"{what}: {title}", ratio, "ratio", target))
    for size, figures in memory.items():
        results += [
            Result(f"{size}: memory of a stream", max(m.stream for m in figures) / KIB, "KiB", "<= 8"),
            Result(f"{size}: memory of a connection", max(m.connection for m in figures) / KIB, "KiB"),
        ]
    return results


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for which each size is measured in a round")
    parser.add_argument("--quick", action="store_true", help="one round of two small sizes: tries the script itself")
    parser.add_argument("--only", choices=["speed", "memory"], help="one half; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args(given)
    sizes = SIZES[:2] if arguments.quick else SIZES
    rounds = 1 if arguments.quick else arguments.rounds
    found: dict[Size, list[Figures]] = {size: [] for size in sizes}
    for number in range(rounds if arguments.only != "memory" else 0):
        for size in sizes:
            found[size].append(measured := measure(size, arguments.seconds))
            print(
                f"round {number + 1}: {size}: CPU {measured.cpu * 1e6:.1f} µs, median {measured.median * 1e6:.0f} µs, "
                f"p99 {measured.p99 * 1e6:.0f} µs, {measured.rate:.0f} tokens/s",
                flush=True,
            )
    few = 60 if arguments.quick else MEMORY_STREAMS
    memory: dict[Size, list[MemoryFigures]] = {Size(few, 1, 3): [], Size(few, 20 if arguments.quick else 200, 16): []}
    for size in memory if arguments.only != "speed" and not arguments.quick else ():
        for _ in range(rounds):
            memory[size].append(m := measure_memory(size))
            print(f"{size}: {m.stream / KIB:.2f} KiB a stream, {m.connection / KIB:.1f} a connection", flush=True)
    if arguments.only:
        return
    write("scale", results_of(found, {size: figures for size, figures in memory.items() if figures}), arguments.out)


if __name__ == "__main__":
    main()
