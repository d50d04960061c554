"""Measure what a spare worker saves: the time to the first token after a worker's death, and of a start.

    python -m benchmarks.spare

The demo model `letters` is served by engine transformers on the CPU, with a spare worker and without, in turn. A
request is sent right after SIGKILL of the idle worker, and another one after `stop` and `start`. Between two
measurements the next spare is awaited.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from tests.serving import Serving, wait_until

ROUNDS = 10
LETTERS = {"engine": "transformers", "gpu": "cpu", "model_dir": "demo:letters"}
WITHIN_S = 120.0


def first_token(serving: Serving, cause: Callable[[], object]) -> float:
    """Return the seconds from a cause to the first token of a request that is sent right after it."""
    begun = time.monotonic()
    cause()
    with serving.client() as client:
        next(iter(client.generate("letters", "reverse: abc", max_tokens=5)))
    return time.monotonic() - begun


def measure(serving: Serving, *, spare: bool) -> tuple[float, float]:
    """Return the seconds to the first token after a death, and after an order to start."""

    def settled() -> None:
        serving.wait_state("letters", "ready", WITHIN_S)
        if spare:
            wait_until(lambda: any(s["ready"] for s in serving.overview()["supervisor"]["spares"]), WITHIN_S, "a spare")

    settled()
    pid = serving.status("letters")["pid"]
    death = first_token(serving, lambda: os.kill(pid, signal.SIGKILL))
    settled()
    serving.order("stop", model="letters")
    serving.wait_state("letters", "stopped", WITHIN_S)
    start = first_token(serving, lambda: serving.order("start", model="letters"))
    return death, start


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    results: list[Result] = []
    limits: dict[str, Any] = {"restart": {"limit": 1000}, "poison": {"limit": 1000}}
    with (
        Serving({"letters": LETTERS}, spare=0, **limits) as without,
        Serving({"letters": LETTERS}, spare=1, **limits) as ahead,
    ):
        pairs = [(measure(without, spare=False), measure(ahead, spare=True)) for _ in range(rounds)]
        ram = [spare["ram_bytes"] for spare in ahead.overview()["supervisor"]["spares"]]
    for place, what in enumerate(("first token after a death", "first token after a start")):
        plain, quick = [a[place] for a, _ in pairs], [b[place] for _, b in pairs]
        results += [
            Result(f"{what}, without a spare", statistics.median(plain), "s"),
            Result(f"{what}, with a spare", statistics.median(quick), "s"),
            Result(f"{what}, with a spare, the slowest of {rounds}", max(quick), "s"),
            Result(f"{what}, with / without", statistics.median(quick) / statistics.median(plain), ""),
        ]
    if ram and ram[0] is not None:
        results.append(Result("host memory of a spare", ram[0] / 2**20, "MiB"))
    write("spare", results, arguments.out)


if __name__ == "__main__":
    main()
