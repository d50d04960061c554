"""Measure what it costs that a worker runs on another machine: tokens per second, the first token, and the start.

    python -m benchmarks.other_machine [--model 1b] [--rounds 5]

It needs Ray. A Ray cluster of two nodes is started on this machine, in which only the second node leases GPUs. If
network namespaces can be made, that node has one, and tokens cross the link between the two. Otherwise they cross the
loopback interface. One supervisor has two workers of the same model, one started by itself and one through an agent on
the second node. Both are on one GPU, and only one of them has requests at a time. They take turns.

A start is measured from the order to the state ``ready``, with another worker stopped and with files in the page cache.
With spare workers each machine has one when the order comes. Without, they are turned off.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Server, arguments_for, entry, quiet_heap, requests, served
from benchmarks.report import Result, write
from modelctl import Client
from tests.ray_cluster import RayCluster, can_make_namespaces, wait_for_spare
from tests.serving import wait_until

HERE, THERE = "here", "there"
STREAMS = (1, 8, 32)
TOKENS, FIRST_TOKENS, FIRSTS = 256, 4, 40
NODE = "second"
READY_S = 120.0
CPUS = 4


def rates(server: Server, made: dict[str, Any], model: str, rounds: int, tokens: int) -> list[Result]:
    results = []
    for count in STREAMS:
        pairs = []
        for number in range(rounds + 1):
            asked = requests(model, made["model_dir"], count, seed=number)
            order = (HERE, THERE) if number % 2 else (THERE, HERE)
            found = {name: served(server, name, asked, tokens).rate for name in order}
            pairs.append((found[HERE], found[THERE]))
        here, there = (statistics.median(values) for values in zip(*pairs[1:], strict=True))
        label = f"{count} stream{'s' * (count > 1)}: "
        results += [
            Result(f"{label}tokens/s of a worker on this machine", here, "tok/s"),
            Result(f"{label}tokens/s of a worker on the other machine", there, "tok/s"),
            Result(
                f"{label}the other machine over this one", statistics.median(b / a for a, b in pairs[1:]), "ratio",
                ">= 0.97",
            ),
        ]  # fmt: skip
    return results


def first_tokens(server: Server, made: dict[str, Any], model: str, count: int) -> list[Result]:
    seconds: dict[str, list[float]] = {HERE: [], THERE: []}
    for number in range(count):
        asked = requests(model, made["model_dir"], 1, seed=1000 + number)
        for name in (HERE, THERE) if number % 2 else (THERE, HERE):
            seconds[name].append(served(server, name, asked, FIRST_TOKENS).first)
    here, there = (1000 * statistics.median(seconds[name]) for name in (HERE, THERE))
    return [
        Result("first token of a worker on this machine, median", here, "ms"),
        Result("first token of a worker on the other machine, median", there, "ms"),
        Result("first token: the other machine later than this one", there - here, "ms", "<= 2"),
    ]


def starts(server: Server, spare: bool, rounds: int) -> list[Result]:
    """Measure the start of each worker. The first round does not count."""
    seconds: dict[str, list[float]] = {HERE: [], THERE: []}
    for _ in range(rounds + 1):
        for name in (HERE, THERE):
            server.modelctl("stop", name)
            server.wait_state(name, "stopped")
            if spare:
                wait_until(lambda: has_spares(server), READY_S, "a spare worker here")
                wait_for_spare(psutil.pids)
            begun = time.perf_counter()
            with Client(runtime_dir=server.runtime_dir, admin=True) as client:
                client.call("start", model=name)
            server.wait_state(name, "ready")
            seconds[name].append(time.perf_counter() - begun)
    here, there = (statistics.median(seconds[name][1:]) for name in (HERE, THERE))
    label = f"start with{'' if spare else 'out'} spare workers: "
    return [
        Result(f"{label}this machine", here, "s"),
        Result(f"{label}the other machine", there, "s"),
        Result(f"{label}the other machine later", there - here, "s", "<= 1"),
    ]


def has_spares(server: Server) -> bool:
    """Return whether all spares that there will be are there."""
    spares = server.overview()["supervisor"]["spares"]
    return bool(spares) and all(spare["ready"] for spare in spares)


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", help="of benchmarks.models; default: 1b, or tiny with --quick")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or ("tiny" if arguments.quick else "1b")
    rounds, tokens, firsts = (1, 24, 4) if arguments.quick else (arguments.rounds, TOKENS, FIRSTS)
    made = entry(arguments, model, max(STREAMS), max(STREAMS) * 512)
    gpus = int(arguments.gpu != "cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` must not leave a cluster behind
    with (
        tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch,
        RayCluster(Path(scratch), {NODE: 1}, apart=can_make_namespaces(), cpus=CPUS) as cluster,
    ):
        os.environ.update(cluster.environment)
        cluster.wait_for_nodes()
        section = {"ray": cluster.address, "advertise": cluster.advertise}
        there = made | {"node": NODE, "gpu": "auto" if gpus else "cpu"}
        results: list[Result] = []
        for spare in (True, False):
            with Server({HERE: made, THERE: there}, settings={"spare": int(spare)}, cluster=section) as server:
                if spare:
                    quiet_heap()
                    results += rates(server, made, model, rounds, tokens)
                    results += first_tokens(server, made, model, firsts)
                    write("other-machine", results, arguments.out)  # also when what follows fails
                results += starts(server, spare, min(rounds, 3))
        write("other-machine", results, arguments.out)


if __name__ == "__main__":
    main()
