"""The stop ladder: what is sent to a worker, and when, until its process has ended. Pure.

    0  SHUTDOWN  asks the worker. It finishes its step, closes and exits with 0. A worker that loads does not read it.
    1  SIGTERM   to the whole group. Its default action ends a worker whatever its Python does, and its children.
    2  SIGKILL   to the whole group. It also ends processes that are stopped (SIGSTOP) or ignore SIGTERM.

Each rung is there for what the rung before cannot end. Only the last one is certain.
"""

from dataclasses import dataclass
from enum import StrEnum


class Rung(StrEnum):
    SHUTDOWN = "SHUTDOWN"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"


@dataclass(frozen=True)
class LadderTimes:
    """Seconds that each rung gets before the next one is due."""

    shutdown_s: float = 5.0
    sigterm_s: float = 2.0


PATIENT = LadderTimes()
IMPATIENT = LadderTimes(shutdown_s=0.5, sigterm_s=0.5)
"""For ``stop --now``: ends a worker within about a second, even if it hangs."""


def plan(now: float, times: LadderTimes, *, reads_messages: bool) -> list[tuple[float, Rung]]:
    """Return the rungs of one climb, as pairs of monotonic time and rung. The first rung is due at once.

    reads_messages  whether the worker is loaded, so that it reads SHUTDOWN
    """
    rungs: list[tuple[float, Rung]] = []
    at = now
    if reads_messages:
        rungs.append((at, Rung.SHUTDOWN))
        at += times.shutdown_s
    rungs.append((at, Rung.SIGTERM))
    rungs.append((at + times.sigterm_s, Rung.SIGKILL))
    return rungs
