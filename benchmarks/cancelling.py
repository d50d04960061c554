"""Measure how soon the engine frees a request that its client no longer wants.

    python -m benchmarks.cancelling

The time is measured from the client's act until the engine forgets the job. The engine is a deterministic one without
torch, which prints the monotonic time of each ``cancel``. The acts are: an explicit cancel, leaving the loop, closing
the client, killing it (SIGKILL), and freezing it (SIGSTOP). Then 1,000 requests, queued and running, are abandoned in
all these ways at once. The result is the number of jobs that are left one second later.
"""

import json
import multiprocessing
import os
import re
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import Server, arguments_for, percentile
from benchmarks.report import Result, write
from modelctl import Client

STEP_S = 0.01
ENGINE = {
    "model_dir": ".",
    "engine": "tests.deterministic_engine:TellsCancels",
    "options": {"step_s": STEP_S, "context": 1_000_000},
    "max_batch_size": 16,
    "max_queue": 2000,
}
ENDLESS = 900_000
HEARTBEAT_S = 5.0
"""Seconds: interval and time-out of the sockets' heartbeats together."""
TIMES, FROZEN_TIMES, ABANDONED = 50, 5, 1000
_TOLD = re.compile(r"cancelled at (\d+\.\d+)")


def begun(client: Client, count: int = 1) -> list[object]:
    """Return requests whose answers have begun."""
    streams = [client.generate("m", f"endless {i}", max_tokens=ENDLESS) for i in range(count)]
    for stream in streams:
        next(stream)
    return list(streams)


def doomed(runtime_dir: Path, count: int, wait: bool, pipe: Connection) -> None:
    """Run a client in a process of its own, which reports when its requests have begun and then goes on reading."""
    with Client(runtime_dir=runtime_dir) as client:
        streams = [client.generate("m", f"doomed {os.getpid()} {i}", max_tokens=ENDLESS) for i in range(count)]
        if wait:
            next(streams[0])
        else:
            client.status()
        pipe.send(True)
        for _ in streams[0]:
            pass


def cancels(server: Server, after: float, within: float, count: int = 1) -> list[float]:
    """Return the seconds from ``after`` to each of ``count`` cancels, as the engine printed them."""
    deadline = time.monotonic() + within
    log = server.runtime_dir / "logs" / "m.log"
    while True:
        output = [at for at in map(float, _TOLD.findall(log.read_text())) if at >= after]
        if len(output) >= count:
            return [at - after for at in output]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(output)} cancels of {count} within {within} s")
        time.sleep(0.005)


def one(server: Server, way: str) -> float:
    """Return the seconds from the client's act to the engine's cancel."""
    if way in ("client killed", "client frozen"):
        processes = multiprocessing.get_context("forkserver")
        ours, theirs = processes.Pipe()
        process = processes.Process(target=doomed, args=(server.runtime_dir, 1, True, theirs))
        process.start()
        ours.recv()
        assert process.pid is not None
        time.sleep(0.05)
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL if way == "client killed" else signal.SIGSTOP)
        try:
            return cancels(server, at, 20)[0]
        finally:
            process.kill()
            process.join()
    client = server.client()
    (stream,) = begun(client)
    at = time.monotonic()
    match way:
        case "cancel":
            stream.cancel()  # type: ignore[attr-defined]
        case "loop left":
            for _ in stream:  # type: ignore[attr-defined]
                at = time.monotonic()
                break
        case "client closed":
            client.close()
    seconds = cancels(server, at, 20)[0]
    client.close()
    return seconds


def abandoned(server: Server, total: int) -> tuple[int, int]:
    """Return (jobs left one second after all were abandoned, jobs that ran or waited before)."""
    processes = multiprocessing.get_context("forkserver")
    per_way = total // 5
    clients = [server.client() for _ in range(3)]
    streams = [
        [client.generate("m", f"{n} {i}", max_tokens=ENDLESS) for i in range(per_way)]
        for n, client in enumerate(clients)
    ]
    victims = []
    for _ in range(2):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=doomed, args=(server.runtime_dir, per_way, False, theirs))
        process.start()
        ours.recv()
        victims.append(process)
    status = server.status("m")
    before = status["active"] + status["queued"]
    for stream in streams[0]:
        stream.cancel()
    for stream in streams[1]:
        stream.close()
    clients[2].close()
    for process, number in zip(victims, (signal.SIGKILL, signal.SIGTERM), strict=True):
        assert process.pid is not None
        os.kill(process.pid, number)
    deadline = time.monotonic() + 1
    for client in clients[:2]:
        client.status()  # now the supervisor has received everything
    time.sleep(max(0.0, deadline - time.monotonic()))
    status = server.status("m")
    for client in clients[:2]:
        client.close()
    for process in victims:
        process.join()
    engine = status["engine_stats"]
    return status["active"] + status["queued"] + engine["active"] + engine["pending"], before


def main() -> None:
    parser = arguments_for(__doc__)
    arguments = parser.parse_args()
    times, frozen, total = (3, 1, 100) if arguments.quick else (TIMES, FROZEN_TIMES, ABANDONED)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.harness"])
    results = []
    with Server({"m": ENGINE}) as server:
        for way in ("cancel", "loop left", "client closed", "client killed"):
            took = [1000 * one(server, way) for _ in range(times)]
            limit = 1000 * STEP_S + 10
            results.append(Result(f"{way}: median", statistics.median(took), "ms", f"<= {limit:g}"))
            results.append(Result(f"{way}: p99", percentile(took, 99), "ms"))
        took = [one(server, "client frozen") for _ in range(frozen)]
        results.append(Result("client frozen: median", statistics.median(took), "s", f"<= {HEARTBEAT_S + 1:g}"))
        server.wait_idle("m")
        alive, before = abandoned(server, total)
        results.append(Result("requests under way or waiting, then abandoned in five ways", before, "requests"))
        results.append(Result("of these alive a second later", alive, "requests", "<= 0"))
        counters = server.overview()["supervisor"]["counters"]
    print(json.dumps(counters))
    write("cancelling", results, arguments.out)


if __name__ == "__main__":
    main()
