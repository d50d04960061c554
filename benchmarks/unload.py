"""Check whether an ended worker's VRAM comes back, how long that takes, and whether the next load waits for it.

    python -m benchmarks.unload [--model 1b] [--gpu 0]

A model is loaded and ended several times, by ``modelctl stop`` and by ``kill -9`` of its worker, which the supervisor
then starts again. NVML is asked every few milliseconds. "Left" is the GPU's memory in use after the end minus that
before the load. A successor process that exists while its predecessor still holds memory is counted.
"""

import os
import signal
import statistics
import time

from benchmarks.harness import Server, arguments_for, entry, requests, served
from benchmarks.memory import GIB, MIB, Memory, memory, wait_for
from benchmarks.report import Result, write

MODEL = "model"
TIMES = 5
WITHIN = 60.0


def stopped(server: Server, held: Memory, empty: int) -> tuple[float, float, int]:
    """End a model by ``modelctl stop``.

    Returns (seconds of the command, seconds from its return until the memory is back, bytes left).
    """
    pid = server.status(MODEL)["pid"]
    command = server.modelctl("stop", MODEL)
    after = wait_for(lambda: not held.of(pid), WITHIN, "the stopped worker's memory")
    return command, after, held.used() - empty


def killed(server: Server, held: Memory) -> tuple[float, bool]:
    """End a worker by ``kill -9``.

    Returns (seconds until NVML no longer shows the worker, whether its successor existed before that).
    """
    pid = server.status(MODEL)["pid"]
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    overlap = False
    while held.of(pid):
        successor = server.status(MODEL)["pid"]
        overlap = overlap or bool(successor and successor != pid and held.of(pid))
        if time.perf_counter() - begun > WITHIN:
            raise TimeoutError("the killed worker still holds memory")
    return time.perf_counter() - begun, overlap


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", help="default: 1b, or tiny with --quick")
    parser.add_argument("--times", type=int, default=TIMES)
    arguments = parser.parse_args()
    model = arguments.model or ("tiny" if arguments.quick else "1b")
    times = 2 if arguments.quick else arguments.times
    made = entry(arguments, model, 8, 8 * 1024) | {"autostart": False}
    asked = requests(model, made["model_dir"], 8)
    held = memory(arguments.gpu)
    stops, kills = [], []
    with Server({MODEL: made}, wait=False) as server:
        empty = held.used()
        full = 0
        for _ in range(times):
            server.modelctl("start", MODEL)
            pid = server.wait_state(MODEL, "ready")["pid"]
            served(server, MODEL, asked, 16)
            full = sum(held.of(pid).values())
            stops.append(stopped(server, held, empty))
        server.modelctl("start", MODEL)
        for _ in range(times):
            server.wait_state(MODEL, "ready")
            served(server, MODEL, asked, 16)
            kills.append(killed(server, held))
            # The supervisor puts pauses between restarts, but not before an order of the operator.
            wait_for(lambda: server.status(MODEL)["state"] in ("ready", "backoff"), WITHIN, "the restart")
            server.modelctl("start", MODEL)
        server.wait_state(MODEL, "ready")
        server.modelctl("stop", MODEL)
        left = held.used() - empty
    results = [
        Result(f"{model}: VRAM held while loaded", full / GIB, "GiB"),
        Result("left in use after modelctl stop (most of all times)", max(s[2] for s in stops) / MIB, "MiB", "<= 1"),
        Result("left in use after kill -9, a restart and a stop", left / MIB, "MiB", "<= 1"),
        Result("modelctl stop takes", 1000 * statistics.median(s[0] for s in stops), "ms"),
        Result("memory in use after modelctl stop returned", 1000 * max(s[1] for s in stops), "ms", "<= 20"),
        Result("memory in use after kill -9", 1000 * statistics.median(k[0] for k in kills), "ms"),
        Result("memory in use after kill -9, longest", 1000 * max(k[0] for k in kills), "ms"),
        Result("successors started before the memory was back", sum(k[1] for k in kills), "times", "<= 0"),
    ]
    write("unload", results, arguments.out)


if __name__ == "__main__":
    main()
