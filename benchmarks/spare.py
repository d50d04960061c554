"""Measure what a spare worker saves: the time to the first token after a worker's death, and of a start.

    python -m benchmarks.spare [--engine transformers --gpu cpu] [--model letters]

A model is served with a spare worker and without, in turn. A request is sent right after SIGKILL of the idle worker,
and another one after `stop` and `start`. Between two measurements the next spare is awaited.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Request, arguments_for, entry, requests
from benchmarks.report import Result, write
from tests.serving import Serving, wait_until

ROUNDS = 10
BATCH, CACHE = 32, 16384
WITHIN_S = 120.0


def first_token(serving: Serving, request: Request, cause: Callable[[], object]) -> float:
    """Return the seconds from a cause to the first token of a request that is sent right after it."""
    begun = time.monotonic()
    cause()
    with serving.client() as client:
        next(iter(client.generate("model", max_tokens=5, **request.fields)))
    return time.monotonic() - begun


def measure(serving: Serving, request: Request, *, spare: bool) -> tuple[float, float]:
    """Return the seconds to the first token after a death, and after an order to start."""

    def settled() -> None:
        serving.wait_state("model", "ready", WITHIN_S)
        if spare:
            wait_until(lambda: any(s["ready"] for s in serving.overview()["supervisor"]["spares"]), WITHIN_S, "a spare")

    settled()
    pid = serving.status("model")["pid"]
    death = first_token(serving, request, lambda: os.kill(pid, signal.SIGKILL))
    settled()
    serving.order("stop", model="model")
    serving.wait_state("model", "stopped", WITHIN_S)
    start = first_token(serving, request, lambda: serving.order("start", model="model"))
    return death, start


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="letters", help="of benchmarks.models")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    model = entry(arguments, arguments.model, BATCH, CACHE)
    request = requests(arguments.model, model["model_dir"], 1)[0]
    rounds = 1 if arguments.quick else arguments.rounds
    results: list[Result] = []
    limits: dict[str, Any] = {"restart": {"limit": 1000}, "poison": {"limit": 1000}}
    with (
        Serving({"model": model}, spare=0, **limits) as without,
        Serving({"model": model}, spare=1, **limits) as ahead,
    ):
        pairs = [(measure(without, request, spare=False), measure(ahead, request, spare=True)) for _ in range(rounds)]
        ram = [spare["ram_bytes"] for spare in ahead.overview()["supervisor"]["spares"]]
    name = arguments.model
    for place, what in enumerate(("first token after a death", "first token after a start")):
        plain, quick = [a[place] for a, _ in pairs], [b[place] for _, b in pairs]
        results += [
            Result(f"{name}: {what}, without a spare", statistics.median(plain), "s"),
            Result(f"{name}: {what}, with a spare", statistics.median(quick), "s"),
            Result(f"{name}: {what}, with a spare, the slowest of {rounds}", max(quick), "s"),
            Result(f"{name}: {what}, with / without", statistics.median(quick) / statistics.median(plain), ""),
        ]
    if ram and ram[0] is not None:
        results.append(Result("host memory of a spare", ram[0] / 2**20, "MiB"))
    write("spare-exllamav2" if arguments.engine == "exllamav2" else "spare", results, arguments.out)


if __name__ == "__main__":
    main()
