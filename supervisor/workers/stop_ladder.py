"""The stop ladder as a pure plan: what to do to a worker at which time until it is gone.

    0  SHUTDOWN  asks; the worker finishes its step, closes and exits 0. Of no use while it loads: it does not read.
    1  SIGTERM   to the whole group; the default action ends a worker whatever its Python is doing, children too.
    2  SIGKILL   to the whole group; ends stopped (SIGSTOP) and deaf processes.

Each rung is there for what the one before cannot end. Only the last is certain.
"""

from dataclasses import dataclass
from enum import StrEnum


class Rung(StrEnum):
    SHUTDOWN = "SHUTDOWN"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"


@dataclass(frozen=True)
class LadderTimes:
    """Seconds a rung is given before the next."""

    shutdown_s: float = 5.0
    sigterm_s: float = 2.0


PATIENT = LadderTimes()
IMPATIENT = LadderTimes(shutdown_s=0.5, sigterm_s=0.5)
"""For ``stop --now``: gone within about a second even if it hangs."""


def plan(now: float, times: LadderTimes, *, reads_messages: bool) -> list[tuple[float, Rung]]:
    """The rungs of one climb as (monotonic time, rung), first rung due at once.

    reads_messages  the worker is past loading, so that SHUTDOWN can reach it
    """
    rungs: list[tuple[float, Rung]] = []
    at = now
    if reads_messages:
        rungs.append((at, Rung.SHUTDOWN))
        at += times.shutdown_s
    rungs.append((at, Rung.SIGTERM))
    rungs.append((at + times.sigterm_s, Rung.SIGKILL))
    return rungs
