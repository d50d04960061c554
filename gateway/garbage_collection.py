"""Keep Python's garbage collector from stopping all streams."""

import gc
from typing import Final

THRESHOLDS: Final = (50_000, 20, 100)
"""Python's own are (700, 10, 10). With a thousand streams their passes over all objects stopped this process's loop for
100 to 230 ms each, on the host of an H200. The 99th percentile of the gap between tokens was 3.5 times the engine's.
With these thresholds it is 1.13 times the engine's (``benchmarks.http_serving --many``).

A full pass then hardly ever comes. So a request must leave no cycle of objects, answered or refused: a cycle would keep
its body. ``tests/gateway/test_refused_bodies.py`` measures that."""


def tune() -> None:
    """Let the collector look at new objects only, and less often. Call this once everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
