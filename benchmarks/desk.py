"""Measure what watching costs: `modelctl top`, ten open pages and a scrape every second.

    python -m benchmarks.desk

MODELS models with a deterministic engine compute STREAMS requests, each with TOKENS_PER_S tokens per second. In turn,
nobody looks, and all of these look: one `modelctl top` in a terminal of 120 columns, PAGES connections that read the
gateway's page as a browser does, and one scrape of ``/metrics`` every second. The difference of the supervisor's
processor time (of all its threads) is its cost. The gateway and `top` have processes of their own.

The way of a token is measured by the gaps between the deltas of all streams at the client, whose engine makes one every
1 / TOKENS_PER_S seconds: their 99th percentile with and without watchers, in ROUNDS pairs.
"""

import asyncio
import os
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from modelctl import AsyncClient
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until

MODELS, STREAMS, TOKENS_PER_S, PAGES = 8, 100, 20, 10
SECONDS, ROUNDS = 6.0, 10
SETTLE_S = 1.0
ENDLESS = 1_000_000


class Gaps:
    """The gaps between the deltas of all streams since ``clear``, in seconds."""

    def __init__(self) -> None:
        self.found: list[float] = []

    async def stream(self, client: AsyncClient, model: str, number: int) -> None:
        before = None
        async for _ in client.generate(model, f"stream {number}", max_tokens=ENDLESS):
            now = time.perf_counter()
            if before is not None:
                self.found.append(now - before)
            before = now

    def p99_ms(self) -> float:
        return statistics.quantiles(self.found, n=100)[98] * 1000


@contextmanager
def watchers(serving: Serving, port: int) -> Iterator[None]:
    """Look at everything, as long as the context lasts."""
    over = threading.Event()
    threads = [threading.Thread(target=_page, args=(port, over), daemon=True) for _ in range(PAGES)]
    threads.append(threading.Thread(target=_scrape, args=(port, over), daemon=True))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "supervisor", "top", "--runtime-dir", str(serving.runtime_dir)]
    environment = {**serving.environment, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    threads.append(threading.Thread(target=_drain, args=(ours,), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
        assert top.poll() is None, "top has ended"
    finally:
        over.set()
        top.send_signal(signal.SIGKILL)
        top.wait()
        for thread in threads:
            thread.join(5)
        os.close(ours)


def _page(port: int, over: threading.Event) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/page/events", timeout=30) as answer:
        while not over.is_set() and answer.readline():
            pass


def _scrape(port: int, over: threading.Event) -> None:
    while not over.wait(1.0):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b"modelctl_num_requests_running" in answer.read()


def _drain(descriptor: int) -> None:
    with suppress(OSError):
        while os.read(descriptor, 65536):
            pass


async def measure(serving: Serving, port: int, seconds: float, rounds: int) -> list[Result]:
    process, gaps = psutil.Process(serving.pid), Gaps()

    async def look(seconds: float) -> tuple[float, float]:
        """Return the supervisor's share of a core in per cent, and the 99th percentile of the gaps in ms."""
        await asyncio.sleep(SETTLE_S)
        gaps.found.clear()
        before, begun = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(seconds)
        spent = sum(process.cpu_times()[:2]) - before
        return 100 * spent / (time.monotonic() - begun), gaps.p99_ms()

    alone, watched = [], []
    async with AsyncClient(runtime_dir=serving.runtime_dir) as user:
        tasks = [asyncio.create_task(gaps.stream(user, f"m{n % MODELS}", n)) for n in range(STREAMS)]
        while (await user.call("requests"))["total"] < STREAMS:
            await asyncio.sleep(0.05)
        for _ in range(rounds):
            alone.append(await look(seconds))
            with watchers(serving, port):
                watched.append(await look(seconds))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    costs = [b[0] - a[0] for a, b in zip(alone, watched, strict=True)]
    spread = min(p99 for _, p99 in alone), max(p99 for _, p99 in alone)
    within = sum(spread[0] <= p99 <= spread[1] for _, p99 in watched)
    return [
        Result(
            "top, ten pages and a scrape a second, supervisor's CPU", statistics.median(costs), "% of a core", "<= 1"
        ),
        Result("the least of the pairs", min(costs), "% of a core"),
        Result("the greatest of the pairs", max(costs), "% of a core"),
        Result("the supervisor when nobody looks", statistics.median(cpu for cpu, _ in alone), "% of a core"),
        Result("p99 of the gaps between tokens, nobody looks", statistics.median(p99 for _, p99 in alone), "ms"),
        Result("its least round", spread[0], "ms"),
        Result("its greatest round", spread[1], "ms"),
        Result(
            "p99 of the gaps, all of them look",
            statistics.median(p99 for _, p99 in watched),
            "ms",
            f"<= {spread[1]:.1f}",
        ),
        Result(f"rounds of {rounds} within the spread", within, ""),
    ]


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    seconds, rounds = (2.0, 1) if arguments.quick else (SECONDS, ROUNDS)
    models = {f"m{n}": engine(step_s=1 / TOKENS_PER_S, context=2 * ENDLESS, max_batch_size=16) for n in range(MODELS)}
    port = free_port()
    with Serving(models, gateway={"listen": f"127.0.0.1:{port}", "auth": "none"}) as serving:
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], 30, "the gateway")
        write("desk", asyncio.run(measure(serving, port, seconds, rounds)), arguments.out)


if __name__ == "__main__":
    main()
