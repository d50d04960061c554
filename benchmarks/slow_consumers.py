"""Measure the effect of eight clients that stop reading on eight clients that read, and on the supervisor's memory.

    python -m benchmarks.slow_consumers

A deterministic engine without torch computes 16 streams of one model. Each client is a process of its own. Several
times, in turn, eight readers work alone, and beside eight clients that have stopped reading. (These are not stopped by
SIGSTOP, which would end their connections. They read nothing while libzmq's own thread keeps the connections alive.)
The readers' gaps between deltas are compared.
"""

import itertools
import multiprocessing
import os
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.harness import Server, arguments_for, percentile
from benchmarks.report import Result, write
from modelctl import Client
from protocol.messages import Credit
from tests.raw_client import RawClient
from tests.serving import engine

STEP_S = 0.01
ENGINE = engine(step_s=STEP_S, context=1_000_000, max_batch_size=16)
CLIENTS, TOKENS, ROUNDS = 8, 1500, 5
MIB = 1 << 20


def reader(runtime_dir: Path, tokens: int, pipe: Connection) -> None:
    """Send the seconds between the deltas of one stream to the parent."""
    with Client(runtime_dir=runtime_dir) as client:
        stream = client.generate("m", f"reader {os.getpid()}", max_tokens=tokens)
        times = [time.perf_counter() for _ in stream]
    pipe.send([b - a for a, b in itertools.pairwise(times)])


def gaps(server: Server, tokens: int) -> list[float]:
    processes = multiprocessing.get_context("forkserver")
    readers = []
    for _ in range(CLIENTS):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=reader, args=(server.runtime_dir, tokens, theirs))
        process.start()
        readers.append((process, ours))
    found = []
    for process, pipe in readers:
        found += pipe.recv()
        process.join()
    return found


def main() -> None:
    parser = arguments_for(__doc__)
    arguments = parser.parse_args()
    rounds, tokens = (1, 300) if arguments.quick else (ROUNDS, TOKENS)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.harness"])
    alone, beside, grown = [], [], []
    with Server({"m": ENGINE}, settings={"stall": "5s"}) as server:
        supervisor = psutil.Process(server.overview()["supervisor"]["pid"])
        gaps(server, 100)
        for _ in range(rounds):
            # Both halves have as many streams, so that the worker's work is the same.
            company = [RawClient(server.runtime_dir) for _ in range(CLIENTS)]
            alone.append(_with(server, company, tokens, stalled=False))
            for client in company:
                client.close()
            server.wait_idle("m")
            before = supervisor.memory_info().rss
            stalled = [RawClient(server.runtime_dir) for _ in range(CLIENTS)]
            beside.append(_with(server, stalled, tokens, stalled=True))
            grown.append(supervisor.memory_info().rss - before)
            for client in stalled:
                client.close()
            server.wait_idle("m")
        ended = server.status("m")["totals"]["errors"]
    medians = [statistics.median(b) / statistics.median(a) for a, b in zip(alone, beside, strict=True)]
    tails = [percentile(b, 95) / percentile(a, 95) for a, b in zip(alone, beside, strict=True)]
    results = [
        Result("gap between deltas, median", 1000 * statistics.median(map(statistics.median, alone)), "ms"),
        Result("median gap beside stalled clients over without", statistics.median(medians), "ratio", "<= 1.2"),
        Result("p95 gap beside stalled clients over without", statistics.median(tails), "ratio", "<= 1.2"),
        Result("supervisor's memory grew by, most", max(grown) / MIB, "MiB", "<= 16"),
        Result(f"stalled streams ended after 5 s, of {CLIENTS * rounds}", ended, "streams"),
    ]
    write("slow-consumers", results, arguments.out)


def _read(company: list[RawClient], stop: threading.Event) -> None:
    while not stop.is_set():
        for client in company:
            while client.socket.poll(0):
                client.receive()
                client.send(Credit(1, 1))
        time.sleep(0.005)


def _with(server: Server, company: list[RawClient], tokens: int, *, stalled: bool) -> list[float]:
    """Return the readers' gaps beside other streams, which are read or not."""
    for number, client in enumerate(company):
        client.generate(1, "m", f"company {number}", max_tokens=2 * tokens)
    if stalled:
        return gaps(server, tokens)
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(company, stop))
    thread.start()
    try:
        return gaps(server, tokens)
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
