"""Decide from a worker's leases (``protocol.process.progress_lease``) whether it makes progress or hangs. Pure.

Time is counted in checks. Each check counts the time since the check before it, at most twice the intended interval. If
the supervisor was stopped or the machine suspended, the workers may have been stopped too, and must not be killed.

A worker that renews its leases in time is slow at worst. When a lease runs out, the worker hangs. The supervisor asks
the worker for its stacks, and kills it DUMP_S later, unless the worker has made progress meanwhile.
"""

from dataclasses import dataclass
from enum import StrEnum

from protocol.process.progress_lease import Reading, WorkerPhase

CHECK_S = 0.1
"""Seconds between two checks of all workers."""
DUMP_S = 1.0
"""Seconds that a hung worker gets to write its stacks before it is killed. Writing them takes a millisecond of
processor time. On a machine whose cores were all busy, a worker did not get that within 0.3 s."""
_DOING = {
    WorkerPhase.STARTING: "before it came up",
    WorkerPhase.LOADING: "while loading",
    WorkerPhase.IDLE: "while idle",
    WorkerPhase.STEP: "in a step",
    WorkerPhase.MOVING: "while going to sleep or waking",
}


class CheckClock:
    """Counts the time between checks."""

    def __init__(self, interval_s: float = CHECK_S) -> None:
        self._most = 2 * interval_s
        self._last: float | None = None

    def passed(self, now: float) -> float:
        """Return the seconds to count since the last check; 0 at the first check, and if the clock went back."""
        last, self._last = self._last, now
        return 0.0 if last is None else max(0.0, min(now - last, self._most))


class HangVerdict(StrEnum):
    FINE = "fine"
    HUNG = "hung"
    """The worker's lease has just run out: ask the worker for its stacks."""
    DOOMED = "doomed"
    """The worker hangs, and still has time to write its stacks."""
    SPARED = "spared"
    """The worker hung at the check before, and has made progress since."""
    LOST = "lost"
    """The worker hangs, and the time for its stacks is over: kill it. Every later check returns LOST again."""


@dataclass
class HangDetector:
    """The state of one process: the last reading of its lease, and the seconds counted since the reading changed."""

    reading: Reading
    silent_s: float = 0.0
    hung: bool = False
    overdue_s: float = 0.0
    """Seconds counted since the worker was found hung."""

    def check(self, reading: Reading, passed_s: float) -> HangVerdict:
        """Return the verdict on a lease that was read ``passed_s`` seconds after the check before."""
        if reading.word != self.reading.word:
            spared = self.hung
            self.reading, self.silent_s, self.hung, self.overdue_s = reading, 0.0, False, 0.0
            return HangVerdict.SPARED if spared else HangVerdict.FINE
        self.silent_s += passed_s
        if self.hung:
            self.overdue_s += passed_s
            return HangVerdict.LOST if self.overdue_s >= DUMP_S else HangVerdict.DOOMED
        if self.silent_s <= reading.lease_s:
            return HangVerdict.FINE
        self.hung = True
        return HangVerdict.HUNG

    @property
    def can_tell(self) -> bool:
        """Return whether the worker can write its stacks. Before its first lease, the signal for that would end it."""
        return self.reading.phase is not WorkerPhase.STARTING

    def story(self) -> str:
        """Return, for people, a text that says in which phase a worker hangs, and for how long."""
        phase = self.reading.phase
        doing = "in no known phase" if phase is None else _DOING[phase]
        return f"hung: no progress for {self.silent_s:.1f} s {doing} (lease {self.reading.lease_s:g} s)"

    def describe(self) -> dict[str, str | float]:
        """Return phase (the name of a ``WorkerPhase``, or "unknown") and beat_s, seconds since the last progress."""
        phase = self.reading.phase
        return {"phase": "unknown" if phase is None else phase.name.lower(), "beat_s": round(self.silent_s, 1)}
