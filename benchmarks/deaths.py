"""Measure how fast the supervisor sees the death of a worker, and how fast the worker is ready again.

    python -m benchmarks.deaths [--count 200]

A decoding worker gets SIGKILL again and again, each time when it is ready and streams have begun. The times come from
the supervisor's log (in milliseconds): from the signal to the line about the exit, and to the line that says ready,
minus the time of the load, which that line names. The pause before a restart is zero. The engine is a deterministic one
that needs no torch. A few deaths are measured with the embedded engine, too.
"""

import os
import re
import select
import signal
import statistics
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, arguments_for, percentile
from benchmarks.report import Result, write
from tests.serving import engine

SETTINGS: dict[str, Any] = {
    "restart": {"limit": 1000, "window": "1m", "initial": 0, "max": 0},
    "poison": {"limit": 1000, "window": "10m"},
}
FAKE = engine(step_s=0.005, context=1_000_000)
EMBEDDED = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"}
_LINE = re.compile(r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}[+-]\d\d:\d\d) \w+ +(?P<text>.*)$", re.MULTILINE)
_SEEN = re.compile(r"pid (?P<pid>\d+): killed by SIGKILL")
_READY = re.compile(r"loading -> ready \(loaded in (?P<load_s>[\d.]+) s.*\) pid (?P<pid>\d+)")


@dataclass
class Times:
    """Seconds for each death."""

    gone: list[float] = field(default_factory=list)
    """Until the kernel had ended the process, as seen by the benchmark."""
    seen: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    """From the kill to ready, minus the load."""
    resumed: int = 0


def measure(entry: dict[str, Any], count: int, fields: dict[str, Any]) -> Times:
    """Kill a worker ``count`` times, and return the times."""
    killed: list[tuple[int, float, int]] = []
    times = Times()
    with (
        Server({"a": {**entry, "max_batch_size": 4}, "b": FAKE}, settings=SETTINGS) as server,
        server.client() as client,
    ):
        for _ in range(count):
            status = server.wait_state("a", "ready")
            streams = [client.generate("a", max_tokens=40, ignore_eos=True, **fields) for _ in range(2)]
            for stream in streams:
                next(stream)
            pidfd, at = os.pidfd_open(status["pid"]), time.time()
            os.kill(status["pid"], signal.SIGKILL)
            select.select([pidfd], [], [], 60)
            times.gone.append(time.time() - at)
            os.close(pidfd)
            for stream in streams:
                times.resumed += stream.complete().usage.get("resumes") == 1
            killed.append((status["pid"], at, server.wait_state("a", "ready")["pid"]))
        lines = read_log(server.runtime_dir / "logs" / "supervisor.log")
    seen, ready = {}, {}
    for at, text in lines:
        if found := _SEEN.search(text):
            seen[int(found["pid"])] = at
        elif found := _READY.search(text):
            ready[int(found["pid"])] = at - float(found["load_s"])
    for pid, at, successor in killed:
        times.seen.append(max(0.0, seen[pid] - at))
        times.ready.append(ready[successor] - at)
    return times


def read_log(path: Path) -> list[tuple[float, str]]:
    """Return (time, text) of each line, including those of the rotated log."""
    text = "".join(p.read_text() for p in (path.with_name(path.name + ".1"), path) if p.exists())
    return [(datetime.fromisoformat(m["at"]).timestamp(), m["text"]) for m in _LINE.finditer(text)]


def results_of(times: Times, count: int, what: str = "") -> list[Result]:
    """Return the results of several deaths.

    The kernel needs some time to end a process that has all of torch mapped, before anybody can see its death. That
    time is part of the figures with targets, and is also shown separately.
    """
    return [
        Result(f"{what}deaths", count, "times"),
        Result(f"{what}ended by the kernel after, median", 1000 * statistics.median(times.gone), "ms"),
        Result(
            f"{what}seen after the kernel had ended it, p99",
            1000 * percentile([max(0.0, s - g) for s, g in zip(times.seen, times.gone, strict=True)], 99),
            "ms",
        ),
        Result(f"{what}seen after, median", 1000 * statistics.median(times.seen), "ms", "<= 10"),
        Result(f"{what}seen after, p99", 1000 * percentile(times.seen, 99), "ms", "<= 50"),
        Result(f"{what}ready again after, less the load, median", statistics.median(times.ready), "s"),
        Result(f"{what}ready again after, less the load, p99", percentile(times.ready, 99), "s", "<= 1"),
        Result(f"{what}requests that went on, of those that ran", times.resumed / (2 * count), "ratio", ">= 1"),
    ]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_args()
    count, few = (5, 2) if arguments.quick else (arguments.count, 10)
    results = results_of(measure(FAKE, count, {"prompt": "count"}), count)
    prompt = {"prompt": "count to 150: 10 11 12 ->", "temperature": 0}
    results += results_of(measure(EMBEDDED, few, prompt), few, "embedded engine: ")
    write("deaths", results, arguments.out)


if __name__ == "__main__":
    main()
