"""Run a mixed load for ten minutes: latency must not grow, and memory must stay flat.

    python -m benchmarks.soak [--minutes 10]

One supervisor serves two models of an engine without torch, one of them with two workers, and the demo model
``letters`` on the embedded engine. Another process (``benchmarks.soak_load``) sends short answers, long ones, cancelled
and abandoned ones, bad requests, slow readers, and connections that come and go. The load is constant. Each request
must end as its kind should, with its own answer.

**Latency**: ten times a second a client asks a model of its own, whose steps take 1 ms, for a short answer. The median
of the time to its first token, and to its end, in the last tenth of the run is compared with that in the second tenth
(of ten minutes: the last minute with the second; in the first, caches fill).

**The machine**: other users may slow the machine down for some minutes. After each of these answers the same process
sends a message to another one over a bare ZeroMQ socket. The other process sleeps as long as a step takes, and sends
the message back. Nothing is subtracted for that exchange. If answers took longer at the end, the exchange only shows
whether the machine was slower.

**Memory**: RSS of the supervisor and of each worker, twice a second. It is flat if the median of the last tenth is at
most 2 % more than that of the second tenth.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import zmq

from benchmarks.harness import Server
from benchmarks.report import RESULTS, Result, write
from modelctl import Client
from tests.serving import engine

MINUTES = 10.0
PARTS = 10
PROBE_S = 0.1
PROBE_TOKENS = 32
STEP_S = 0.001
MIB = 1 << 20
MODELS = {
    "fast": engine(step_s=0.004, max_batch_size=16),
    "pair": engine(step_s=0.008, max_batch_size=16, replicas=2),
    "letters": {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 4},
    "probe": engine(step_s=STEP_S),
}
FIRST, WHOLE, BARE = "first token", f"answer of {PROBE_TOKENS} tokens", "bare exchange beside them"
TARGETS = {FIRST: "<= 1.05", WHOLE: "<= 1.05", BARE: None}
"""Targets of the last tenth divided by the second."""
Samples = list[tuple[float, float]]
"""(seconds since the beginning, measured value)."""


def medians(samples: Samples, seconds: float) -> list[float]:
    """Return the median of each tenth of a run of ``seconds``. Raises ValueError if a tenth has no samples."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for at, value in samples:
        if at < seconds:
            parts[int(at / seconds * PARTS)].append(value)
    if not all(parts):
        raise ValueError(f"nothing was measured in part {1 + [bool(part) for part in parts].index(False)} of {PARTS}")
    return [statistics.median(part) for part in parts]


def an_hour(samples: Samples, seconds: float) -> float:
    """Return the slope of a straight line through all but the first tenth, per hour."""
    later = [(at, value) for at, value in samples if at > seconds / PARTS]
    return 3600 * statistics.linear_regression(*zip(*later, strict=True)).slope


def echo(endpoint: str) -> None:
    """Send each message back after as long as a step takes, until an empty one comes. Runs in a process of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.bind(endpoint)
        while message := socket.recv():
            time.sleep(STEP_S)
            socket.send(message)


@contextmanager
def bare_exchange(directory: Path) -> Iterator["zmq.Socket[bytes]"]:
    """Yield the socket at the other end of ``echo``."""
    endpoint = f"ipc://{directory / 'echo.sock'}"
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(endpoint,), daemon=True)
    process.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        yield socket
        socket.send(b"")
        process.join()


class Watch:
    """A probe, the bare exchange beside it, and the sizes of processes, for some seconds."""

    def __init__(self, server: Server) -> None:
        status = server.overview()
        pids = {"supervisor": status["supervisor"]["pid"]} | {m["name"]: m["pid"] for m in status["models"]}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.memory: dict[str, Samples] = {name: [] for name in pids}
        self.timed: dict[str, Samples] = {label: [] for label in TARGETS}

    def run(self, client: Client, bare: "zmq.Socket[bytes]", seconds: float) -> None:
        begun = time.perf_counter()
        number = 0
        while (at := time.perf_counter() - begun) < seconds:
            stream = client.generate("probe", f"probe {number}", max_tokens=PROBE_TOKENS)
            next(stream)
            self.timed[FIRST].append((at, time.perf_counter() - begun - at))
            for _ in stream:
                pass
            self.timed[WHOLE].append((at, time.perf_counter() - begun - at))
            asked = time.perf_counter()
            bare.send(b"x")
            bare.recv()
            self.timed[BARE].append((at, time.perf_counter() - asked))
            if number % 5 == 0:
                for name, process in self._processes.items():
                    self.memory[name].append((at, process.memory_info().rss / MIB))
            number += 1
            time.sleep(max(0.0, begun + number * PROBE_S - time.perf_counter()))


def judged(watch: Watch, seconds: float) -> list[Result]:
    results = []
    for label, samples in watch.timed.items():
        parts = medians(samples, seconds)
        results += [
            Result(f"{label}: second tenth, median", 1000 * parts[1], "ms"),
            Result(f"{label}: last tenth, median", 1000 * parts[-1], "ms"),
            Result(f"{label}: last tenth over the second", parts[-1] / parts[1], "ratio", TARGETS[label]),
        ]
    for name, samples in watch.memory.items():
        parts = medians(samples, seconds)
        results += [
            Result(f"{name}: memory, last tenth over the second", parts[-1] / parts[1], "ratio", "<= 1.02"),
            Result(f"{name}: memory, last tenth", parts[-1], "MiB"),
            Result(f"{name}: memory, straight line", an_hour(samples, seconds), "MiB/h"),
        ]
    return results


def counted(counts_by_kind: dict[str, dict[str, int]]) -> list[Result]:
    ended = sum(outcomes.get("as it ought to", 0) for outcomes in counts_by_kind.values())
    left_out = sum(outcomes.get("left out", 0) for outcomes in counts_by_kind.values())
    others = sum(sum(outcomes.values()) for outcomes in counts_by_kind.values()) - ended - left_out
    return [
        Result("requests that ended as their kind is to end", ended, "requests"),
        Result("requests that ended otherwise", others, "requests", "<= 0"),
        Result("requests left out because the machine was too slow", left_out, "requests"),
    ]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args(given)
    seconds = 60 * arguments.minutes
    with Server(MODELS) as server, server.client() as client, bare_exchange(server.runtime_dir) as bare:
        command = [sys.executable, "-m", "benchmarks.soak_load", str(server.runtime_dir), str(seconds + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
            try:
                watch = Watch(server)
                watch.run(client, bare, seconds)
                output, _ = load.communicate(timeout=120)
            finally:
                load.kill()
        report = json.loads(output)
        for worker in server.workers:
            server.wait_idle(worker, within=30)
        restarts = sum(m["restarts"] for m in server.overview()["models"])
    for label, samples in watch.timed.items():
        print(f"{label}, medians of tenths:", *(f"{1000 * part:.2f}" for part in medians(samples, seconds)), "ms")
    for kind, outcomes in report.items():
        print(f"{kind}: {outcomes}")
    results = [*judged(watch, seconds), *counted(report), Result("restarts of workers", restarts, "times", "<= 0")]
    write("soak", results, arguments.out)


if __name__ == "__main__":
    main()
