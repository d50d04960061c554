"""The stop ladder: the messages and signals that a worker gets, and when, until its process has ended. Pure.

    0  SHUTDOWN  asks the worker. The worker finishes its step, closes and exits with 0. While it loads, it does not
                 read messages.
    1  SIGTERM   to the whole group. The default action ends the worker, whatever its Python does, and its children.
    2  SIGKILL   to the whole group. This also ends processes that are stopped (SIGSTOP) or ignore SIGTERM.

Each rung ends processes that the rung before cannot end. Only the last one is certain.
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
"""The times for ``stop --now``. They end a worker within about a second, even if it hangs."""


def plan(now: float, times: LadderTimes, *, reads_messages: bool) -> list[tuple[float, Rung]]:
    """Return the rungs of one climb, as pairs of monotonic time and rung. The first rung is due at once.

    reads_messages  whether the worker has loaded its model, and so reads SHUTDOWN
    """
    rungs: list[tuple[float, Rung]] = []
    at = now
    if reads_messages:
        rungs.append((at, Rung.SHUTDOWN))
        at += times.shutdown_s
    rungs.append((at, Rung.SIGTERM))
    rungs.append((at + times.sigterm_s, Rung.SIGKILL))
    return rungs
