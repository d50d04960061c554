"""Whether a worker gets on or hangs, decided from its heartbeats (``protocol.progress_lease``). Pure: time comes in as an argument.

Time is counted in looks. Each look counts what has passed since the one before, but at most twice the interval at which
looks are meant to come: while the supervisor itself was stopped, or the machine suspended, workers may have been so
too, and none is to die of that.

A worker is slow as long as it keeps the leases that it writes, and hung when one is over: its stacks are asked for, and
a moment later it is killed, unless it has gone on meanwhile.
"""

from dataclasses import dataclass
from enum import StrEnum

from protocol.progress_lease import Reading, WorkerPhase

CHECK_S = 0.1
"""Between looks at all workers."""
DUMP_S = 1.0
"""How long a hung worker is given to write its stacks before it is killed. Writing them takes a millisecond of
processor time. On a machine whose cores were all taken, a worker did not get that within 0.3 s."""
_DOING = {
    WorkerPhase.STARTING: "before it came up",
    WorkerPhase.LOADING: "while loading",
    WorkerPhase.IDLE: "while idle",
    WorkerPhase.STEP: "in a step",
}


class CheckClock:
    """The clock of the looks."""

    def __init__(self, interval_s: float = CHECK_S) -> None:
        self._most = 2 * interval_s
        self._last: float | None = None

    def passed(self, now: float) -> float:
        """Seconds to count since the last look; 0 for the first, and if the clock went back."""
        last, self._last = self._last, now
        return 0.0 if last is None else max(0.0, min(now - last, self._most))


class HangVerdict(StrEnum):
    FINE = "fine"
    HUNG = "hung"
    """Its lease has just run out: have it write its stacks."""
    DOOMED = "doomed"
    """Hung, and being given time for that."""
    SPARED = "spared"
    """It was hung at the last look, and has gone on."""
    LOST = "lost"
    """Hung, and the time for its stacks is over: kill it. Said at every look from then on."""


@dataclass
class HangDetector:
    """One process. ``reading`` is the last one; ``silent_s`` the seconds counted since it changed."""

    reading: Reading
    silent_s: float = 0.0
    hung: bool = False
    overdue_s: float = 0.0
    """Counted since it was found hung."""

    def check(self, reading: Reading, passed_s: float) -> HangVerdict:
        """Take in what was read ``passed_s`` after the look before."""
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
        """Whether it has come far enough to write its stacks when asked; before, being asked ends it."""
        return self.reading.phase is not WorkerPhase.STARTING

    def story(self) -> str:
        """What is wrong with a hung one, for people."""
        phase = self.reading.phase
        doing = "in no known phase" if phase is None else _DOING[phase]
        return f"hung: no progress for {self.silent_s:.1f} s {doing} (lease {self.reading.lease_s:g} s)"

    def describe(self) -> dict[str, str | float]:
        """phase: "starting", "loading", "idle" or "step"; beat_s: seconds since it was last seen to get on."""
        phase = self.reading.phase
        return {"phase": "unknown" if phase is None else phase.name.lower(), "beat_s": round(self.silent_s, 1)}
