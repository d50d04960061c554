"""How fast things get on, and how long they still take: ``1.2 GiB of 4.2 GiB, 610 MiB/s, 5 s left``. Pure."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from supervisor.spelling import duration, size

WINDOW_S: Final = 15.0
"""The rate is that of the last seconds, because a load from a cold disk begins more slowly than it goes on."""
FEWEST: Final = 4
"""Samples that are kept even if they are older. A compiler may need a minute for a file."""
SHORTEST_S: Final = 1.0
"""Seconds before a rate is shown. What is over by then needs none."""
SAMPLE_S: Final = 0.2
"""Seconds between two samples."""


class Pace:
    """The pace of one thing, which has phases one after the other.

    All times are seconds of a monotonic clock. A phase's progress is {done, total, unit}, of which ``unit`` may be
    missing: "bytes", or a noun in the plural.
    """

    def __init__(self) -> None:
        self._phase: str | None = None
        self._began = 0.0
        self._samples: deque[tuple[float, int]] = deque()

    def text(self, phase: str, progress: Mapping[str, Any] | None, now: float) -> str:
        """Return how far the phase is, its rate and the time left. Without a total, return how long it has lasted; ""
        in its first second."""
        if phase != self._phase:
            self._phase, self._began = phase, now
            self._samples.clear()
        if progress is None or progress["total"] <= 0:
            return duration(now - self._began) if now - self._began >= SHORTEST_S else ""
        done, total, unit = int(progress["done"]), int(progress["total"]), progress.get("unit") or ""
        parts = [_amount(done, total, unit)]
        if (rate := self._rate(done, now)) > 0:
            if unit:
                parts.append(f"{size(round(rate)) if unit == 'bytes' else f'{rate:.3g} {unit}'}/s")
            if done < total:
                parts.append(f"{_whole((total - done) / rate)} left")
        return ", ".join(parts)

    def _rate(self, done: int, now: float) -> float:
        """Note a sample. Return how much is done in a second; 0 if that is not known yet."""
        samples = self._samples
        if samples and done < samples[-1][1]:
            samples.clear()  # it has begun anew
        if not samples or (done > samples[-1][1] and now - samples[-1][0] >= SAMPLE_S):
            samples.append((now, done))
        while len(samples) > FEWEST and now - samples[1][0] > WINDOW_S:
            samples.popleft()
        began, first = samples[0]
        return (done - first) / (now - began) if now - began >= SHORTEST_S else 0.0


def _whole(seconds: float) -> str:
    left = math.ceil(seconds)
    return f"{left} s" if left < 10 else duration(left)


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{size(done)} of {size(total)}"
    return f"{done} of {total} {unit}".rstrip()
