"""Check that nothing leaks over kills and restarts: the supervisor holds no more after hundreds of them than before.

    python -m benchmarks.cycles [--cycles 400] [--embedded-cycles 12]

There are two models. The worker of each gets SIGKILL in turn, and the next kill comes when the worker is ready again.
Some requests go through the new worker each time. Descriptors, sockets among them, threads, children, zombies among
them, and entries of /dev/shm are counted, and the memory is read: once after some cycles of warm-up and once at the
end, when nothing is running. The engine needs no torch. A few more cycles run on the embedded engine with a demo model.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.orphans import EMBEDDED, LOAD_S
from benchmarks.report import RESULTS, Result, write
from tests.serving import Serving, engine, opened, wait_until

MODELS = ("a", "b")
WARM_UP = 10
EMBEDDED_WARM_UP = 2
MEMORY_TARGET_MIB = 8.0
RESTART = {"limit": 1000, "window": "1s", "initial": "1ms", "max": "1ms"}
SETTLE_S = 30.0


@dataclass(frozen=True)
class Held:
    """The resources that a supervisor holds."""

    descriptors: int
    sockets: int
    threads: int
    children: int
    zombies: int
    shm: int
    rss_mib: float

    COUNTS = ("descriptors", "sockets", "threads", "children", "zombies", "shm")


def held(serving: Serving) -> Held:
    process = psutil.Process(serving.pid)
    links = opened(serving.pid)
    children = process.children()
    zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in children)
    sockets = sum(link.startswith("socket:") for link in links)
    shm, rss = len(os.listdir("/dev/shm")), process.memory_info().rss / (1 << 20)
    return Held(len(links), sockets, process.num_threads(), len(children), zombies, shm, rss)


def kill_one(serving: Serving, model: str) -> float:
    """Kill a worker. Return the seconds until it is ready again."""
    status = serving.status(model)
    began = time.perf_counter()
    os.kill(status["pid"], signal.SIGKILL)
    wait_until(lambda: serving.status(model)["generation"] > status["generation"], LOAD_S)
    serving.wait_state(model, "ready", LOAD_S)
    took = time.perf_counter() - began
    with serving.client() as client:
        for i in range(2):
            client.complete(model, f"x {i}", max_tokens=5)
    return took


def settled(serving: Serving, most: Held | None) -> Held:
    """Wait until nothing is running any more, and return what the supervisor holds.

    Connections end a moment after their clients.

    most  the resources that the supervisor should not exceed. If it still exceeds them after SETTLE_S, return what it
          holds then
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = held(serving)
        same = most is not None and all(getattr(now, name) <= getattr(most, name) for name in Held.COUNTS)
        if same or time.monotonic() > deadline or (most is None and held(serving) == now):
            return now
        time.sleep(0.1)


def measure(what: str, entry: dict[str, Any], warm_up: int, cycles: int) -> list[Result]:
    with redirect_stdout(sys.stderr), Serving(dict.fromkeys(MODELS, entry), restart=RESTART, wait=False) as serving:
        for model in MODELS:
            serving.wait_state(model, "ready", LOAD_S)
        for cycle in range(warm_up):
            kill_one(serving, MODELS[cycle % 2])
        time.sleep(1.0)  # what clients have left is noticed once a second
        before = settled(serving, None)
        times = [kill_one(serving, MODELS[cycle % 2]) for cycle in range(cycles)]
        after = settled(serving, before)
    print(f"{what}: before {before}\n{what}: after {cycles} {after}", flush=True)
    more = [
        Result(f"{what}: {name} more than before", getattr(after, name) - getattr(before, name), name, "<= 0")
        for name in Held.COUNTS
    ]
    return [
        Result(f"{what}: cycles of kill and restart", cycles, "times"),
        *more,
        Result(f"{what}: memory before", before.rss_mib, "MiB"),
        Result(f"{what}: memory more than before", after.rss_mib - before.rss_mib, "MiB", f"<= {MEMORY_TARGET_MIB:g}"),
        Result(f"{what}: ready again, at the latest", max(times), "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=400, help="kills of a worker")
    parser.add_argument("--embedded-cycles", type=int, default=12, help="the same on the embedded engine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results = measure("torch-free engine", engine(), WARM_UP, arguments.cycles)
    if arguments.embedded_cycles:
        results += measure("embedded engine", EMBEDDED, EMBEDDED_WARM_UP, arguments.embedded_cycles)
    write("cycles", results, arguments.out)


if __name__ == "__main__":
    main()
