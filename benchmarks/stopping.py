"""Check that stopping takes a bounded time, even if every worker hangs, or is stopped by SIGSTOP.

    python -m benchmarks.stopping [--rounds 5] [--embedded-rounds 3]

There are two models. All their workers hang in a step and ignore SIGTERM, or also hold the interpreter's lock, or are
stopped. Both get ``stop --now`` or ``stop`` at once, with the defaults except for a drain of two seconds. The time is
from the order until both are stopped, that is until their processes are reaped. The engine needs no torch. SIGSTOP in
the middle of an answer is tried on the embedded engine with a demo model, too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.orphans import EMBEDDED, LOAD_S, LOCKS, PLAIN, decoding, embedded_decoding, hung, leave, stopped
from benchmarks.report import RESULTS, Result, write
from supervisor.workers.life import PATIENT
from tests.serving import Serving, engine, is_alive

DRAIN_S = 2.0
NOW_TARGET_S, TARGET_S = 2.0, DRAIN_S + 8.0
LADDER = {"drain": f"{DRAIN_S:g}s", "shutdown": f"{PATIENT.shutdown_s:g}s", "sigterm": f"{PATIENT.sigterm_s:g}s"}


def stopped_in_an_answer(serving: Serving) -> None:
    decoding(serving)
    stopped(serving)


def embedded_stopped_in_an_answer(serving: Serving) -> None:
    embedded_decoding(serving)
    stopped(serving)


Trouble = tuple[str, dict[str, Any], Callable[[Serving], None]]
TROUBLES: list[Trouble] = [
    ("hung, deaf to SIGTERM", engine("HangsDeaf"), hung),
    ("hung with the interpreter's lock", engine() | {"engine": LOCKS}, hung),
    ("SIGSTOPped", PLAIN, stopped_in_an_answer),
]
EMBEDDED_TROUBLES: list[Trouble] = [("embedded engine, SIGSTOPped", EMBEDDED, embedded_stopped_in_an_answer)]


def stop(trouble: Trouble, *, now: bool) -> float:
    """Return the seconds from the order until both models are stopped. Raises AssertionError if a worker still
    lives."""
    _, entry, reach = trouble
    with redirect_stdout(sys.stderr), Serving({"a": entry, "b": entry}, stop=LADDER, wait=False) as serving:
        for model in ("a", "b"):
            serving.wait_state(model, "ready", LOAD_S)
        workers = [serving.worker(model) for model in ("a", "b")]
        reach(serving)
        began = time.perf_counter()
        for model in ("a", "b"):
            serving.order("stop", model=model, **({"now": True} if now else {}))
        for model in ("a", "b"):
            serving.wait_state(model, "stopped")
        took = time.perf_counter() - began
        leave(serving)
        assert not [worker for worker in workers if is_alive(worker)]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="stops of each kind")
    parser.add_argument("--embedded-rounds", type=int, default=3, help="the same on the embedded engine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    plan = [(trouble, arguments.rounds) for trouble in TROUBLES]
    plan += [(trouble, arguments.embedded_rounds) for trouble in EMBEDDED_TROUBLES]
    results: list[Result] = []
    for trouble, rounds in plan:
        for order, now, target in (("stop --now", True, NOW_TARGET_S), ("stop", False, TARGET_S)):
            times = [stop(trouble, now=now) for _ in range(rounds)]
            if not times:
                continue
            print(f"{trouble[0]}, {order}: {', '.join(f'{s:.2f}' for s in times)} s", flush=True)
            name = f"{trouble[0]}: {order}"
            results.append(Result(f"{name}, of {rounds} the median", statistics.median(times), "s"))
            results.append(Result(f"{name}, of {rounds} the longest", max(times), "s", f"<= {target:g}"))
    write("stopping", results, arguments.out)


if __name__ == "__main__":
    main()
