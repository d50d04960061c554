"""Measure where one supervisor ends: its processor time per token, its admin verbs and its starts with 1 to 1,000
workers on other machines.

    python -m benchmarks.cluster_scale [--seconds 10] [--rounds 3] [--workers 1,10,100,1000]

The supervisor is real, and so are its connections: two for each worker, over TCP with CURVE. The workers and their
agents are simulated by a few processes (``benchmarks.link_peers``), which also take Ray's place. Each worker has
STREAMS streams and makes RATE steps per second, so a step is one frame with STREAMS events, as with a gateway as the
client. One process reads all streams. With 1,000 workers that would be 200,000 tokens per second. If the machine cannot
do that, for the simulation and the client share its cores with the supervisor, fewer tokens come, and the figures say
how many.

Processor time is that of all the supervisor's threads (schedstat). What it takes without streams is measured first: the
beats and figures of the workers. The time of a token holds all that the supervisor does besides, because the two cannot
be told apart: when more comes at once, the loop wakes less often. "Extrapolated" figures are worked out, not measured:
the loop's thread, of which there is one, is taken to need as much for each worker as at the largest size that the
machine could serve in full.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import percentile
from benchmarks.link_peers import PLAN
from benchmarks.report import RESULTS, Result, write
from benchmarks.sampled_streams import SampledStreams
from modelctl import Client
from protocol.errors import ConnectionLost
from tests.serving import Serving, wait_until

STREAMS, RATE = 8, 25.0
"""Streams of each worker, and steps per second of each worker."""
SIZES = (1, 10, 100, 1000)
REPLICAS = 10
"""Workers of one model, if there are as many."""
CONNECTIONS = 8
PER_MACHINE = 8
CALLS = 10
READY_S = 150.0
SERVED = 0.95
"""Share of the offered tokens that must come. Else the machine is the limit, and nothing is extrapolated from it."""
FULL = 0.7
"""Share of its core that a loop may use before latencies grow: the rest is for bursts and admin verbs."""


@dataclass(frozen=True)
class Busy:
    """Seconds of processor time: of all threads of a process, and of its main thread, on which the loop runs."""

    all: float
    loop: float

    @staticmethod
    def of(pid: int) -> "Busy":
        spent = {
            int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in Path(f"/proc/{pid}/task").iterdir()
        }
        return Busy(sum(spent.values()), spent[pid])

    def since(self, before: "Busy", seconds: float) -> "Busy":
        """Return the shares of a core since an earlier reading."""
        return Busy((self.all - before.all) / seconds, (self.loop - before.loop) / seconds)


@dataclass(frozen=True)
class Figures:
    """The figures of one number of workers, in one round. Times are in seconds."""

    start: float
    start_cpu: float
    idle: Busy
    loaded: Busy
    rate: float
    offered: float
    age: float
    age_p99: float
    status: float
    status_cpu: float
    status_loaded: float
    status_bytes: float
    order: float
    restart: float
    rss: float

    @property
    def token(self) -> float:
        """Return the processor time of a token, with all that the supervisor does besides."""
        return self.loaded.all / self.rate

    @property
    def token_loop(self) -> float:
        """Return the part of ``token`` that the loop's thread takes."""
        return self.loaded.loop / self.rate


@contextmanager
def served(workers: int) -> Iterator[Serving]:
    """Run a supervisor whose cluster is simulated."""
    replicas = min(workers, REPLICAS)
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        directory = Path(scratch)
        plan = {"peers": 2 if workers > 100 else 1, "nodes": -(-workers // PER_MACHINE), "rate": RATE, "batch": STREAMS}
        (directory / PLAN).write_text(json.dumps(plan))
        script = directory / "served.py"
        script.write_text(
            "import runpy, sys\n"
            "import supervisor.cluster.machines as starter\n"
            "starter._COMMAND = (sys.executable, '-P', '-m', 'benchmarks.link_peers')\n"
            "if __name__ == '__main__':\n"
            "    sys.argv[0] = 'supervisor'\n"
            "    runpy.run_module('supervisor', run_name='__main__', alter_sys=True)\n"
        )
        entry = {
            "model_dir": ".", "engine": "benchmarks.stamped_engine:StampedEngine", "node": "others",
            "max_batch_size": STREAMS, "max_queue": 4096, "replicas": replicas,
        }  # fmt: skip
        models = {f"m{number}": entry for number in range(workers // replicas)}
        cluster = {"ray": scratch, "advertise": f"tcp://127.0.0.1:{_free_port()}", "lease": "60s"}
        with (
            redirect_stdout(sys.stderr),
            Serving(models, cluster=cluster, script=script, wait=False, options=["--quiet"]) as serving,
        ):
            yield serving


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ready(serving: Serving) -> int:
    return sum(model["state"] == "ready" for model in serving.overview()["models"])


def timed(call: Callable[[], object], times: int) -> float:
    """Return the median seconds of a call."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def probe(runtime_dir: Path) -> None:
    """Measure ``status`` while others are served, and print the median seconds. Runs in a process of its own."""
    with Client(runtime_dir=runtime_dir) as client:
        print(timed(client.status, 5), flush=True)


def measure(workers: int, seconds: float) -> Figures:
    begun = time.monotonic()
    with served(workers) as serving:
        while (there := ready(serving)) < workers:
            if time.monotonic() > begun + READY_S:
                raise TimeoutError(f"{there} of {workers} workers are ready")
            time.sleep(0.1 + workers / 1000)
        start, pid = time.monotonic() - begun, serving.pid
        start_cpu = Busy.of(pid).all
        time.sleep(1.0)
        before, at = Busy.of(pid), time.monotonic()
        time.sleep(seconds)
        idle = Busy.of(pid).since(before, time.monotonic() - at)
        with serving.client() as client, serving.client(admin=True) as admin:
            before = Busy.of(pid)
            status = timed(client.status, CALLS)
            status_cpu = (Busy.of(pid).loop - before.loop) / CALLS
            size = len(json.dumps(client.status()))
            order = timed(lambda: admin.call("log_level", model="m0"), 5)
        one = "m0" if workers == 1 else "m0:1"
        generation, begun = serving.status(one)["generation"], time.monotonic()
        serving.order("restart", model=one)
        wait_until(lambda: (m := serving.status(one))["generation"] > generation and m["state"] == "ready", READY_S)
        restart = time.monotonic() - begun
        names = [f"m{n // REPLICAS}" if workers > REPLICAS else "m0" for n in range(workers)]
        with SampledStreams(serving.runtime_dir, min(CONNECTIONS, max(1, workers // REPLICAS))) as streams:
            streams.begin([name for name in names for _ in range(STREAMS)])
            streams.read(2.0)
            streams.forget()
            before, at = Busy.of(pid), time.monotonic()
            streams.read(seconds)
            took = time.monotonic() - at
            loaded = Busy.of(pid).since(before, took)
            rate, ages = streams.tokens / took, streams.ages
            command = [sys.executable, "-m", "benchmarks.cluster_scale", "--probe", str(serving.runtime_dir)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probing:
                streams.read_until(lambda: probing.poll() is not None, "the probe's end")
                assert probing.stdout is not None
                said = probing.stdout.read()
            status_loaded = float(said) if said else math.inf
            if streams.failures:
                raise RuntimeError(f"{workers} workers: {streams.failures[:3]}")
        rss = float(psutil.Process(pid).memory_info().rss)
        return Figures(
            start, start_cpu, idle, loaded, rate, workers * STREAMS * RATE, statistics.median(ages),
            percentile(ages, 99), status, status_cpu, status_loaded, size, order, restart, rss,
        )  # fmt: skip


def results_of(found: dict[int, list[Figures]]) -> list[Result]:
    results = []

    def median(workers: int, of: Callable[[Figures], float]) -> float:
        return statistics.median(of(figures) for figures in found[workers])

    for n in found:
        name = f"{n:,} workers" if n > 1 else "1 worker"
        results += [
            Result(f"{name}: streams", n * STREAMS, "streams"),
            Result(f"{name}: tokens that the workers would make", median(n, lambda f: f.offered), "tok/s"),
            Result(f"{name}: tokens that came", median(n, lambda f: f.rate), "tok/s"),
            Result(f"{name}: share of them that came", median(n, lambda f: f.rate / f.offered), "ratio"),
            Result(f"{name}: supervisor without streams", median(n, lambda f: f.idle.all), "cores"),
            Result(f"{name}: supervisor with streams", median(n, lambda f: f.loaded.all), "cores"),
            Result(f"{name}: loop's thread with streams", median(n, lambda f: f.loaded.loop), "cores"),
            Result(f"{name}: loop's CPU of a status", 1e3 * median(n, lambda f: f.status_cpu), "ms"),
            Result(f"{name}: status", 1e3 * median(n, lambda f: f.status), "ms"),
            Result(f"{name}: size of the reply to status", median(n, lambda f: f.status_bytes) / 1024, "KiB"),
            Result(f"{name}: an order (log_level)", 1e3 * median(n, lambda f: f.order), "ms"),
            Result(f"{name}: restart of one worker", median(n, lambda f: f.restart), "s"),
            Result(f"{name}: all ready after the supervisor's start", median(n, lambda f: f.start), "s"),
            Result(f"{name}: supervisor's CPU until then", median(n, lambda f: f.start_cpu), "s"),
            Result(f"{name}: supervisor's memory", median(n, lambda f: f.rss) / (1 << 20), "MiB"),
        ]
        if median(n, lambda f: f.rate / f.offered) >= SERVED:
            results += [
                Result(f"{name}: supervisor's CPU of a token", 1e6 * median(n, lambda f: f.token), "µs"),
                Result(f"{name}: of this, on the loop's thread", 1e6 * median(n, lambda f: f.token_loop), "µs"),
                Result(f"{name}: token on its way, median", 1e3 * median(n, lambda f: f.age), "ms"),
                Result(f"{name}: token on its way, p99", 1e3 * median(n, lambda f: f.age_p99), "ms"),
            ]
        if (loaded := median(n, lambda f: f.status_loaded)) < math.inf:  # else the client gave up after 5 s
            results.append(Result(f"{name}: status, while streams run", 1e3 * loaded, "ms"))
    served = [n for n in found if median(n, lambda f: f.rate / f.offered) >= SERVED]
    most = max(served)
    if most > 1:
        worker = median(most, lambda f: f.loaded.loop) / most
        room = median(most, lambda f: FULL / f.token_loop)
        results += [
            Result(f"tokens at {FULL:.0%} of the loop's core, extrapolated from {most} workers", room, "tok/s"),
            Result(
                f"workers with {STREAMS} streams at {RATE:g} tok/s each at {FULL:.0%} of the loop's core, extrapolated "
                f"from {most}", FULL / worker, "workers",
            ),
        ]  # fmt: skip
    return results


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each size is measured in a round")
    parser.add_argument("--workers", default=",".join(map(str, SIZES)), help="numbers of workers, separated by commas")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.probe:
        probe(arguments.probe)
        return
    sizes = [int(size) for size in arguments.workers.split(",")]
    found: dict[int, list[Figures]] = {size: [] for size in sizes}
    for number in range(arguments.rounds):
        for size in sizes:
            try:
                found[size].append(measure(size, arguments.seconds))
            except (TimeoutError, ConnectionLost) as e:
                print(f"round {number + 1}: {size} workers: {e}", file=sys.stderr, flush=True)
                continue
            print(f"round {number + 1}: {size} workers: {found[size][-1]}", file=sys.stderr, flush=True)
    if arguments.dry:
        return
    write("cluster-scale", results_of({size: each for size, each in found.items() if each}), arguments.out)


if __name__ == "__main__":
    main()
