"""Decide when a phase that may last for minutes gets a line in a log: when it begins, and every ten seconds. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVERY_S = 10.0
"""Seconds between two lines about one phase."""


def phase_of(state: str, progress: Mapping[str, Any] | None) -> str:
    """Return the phase of a worker: its state, and the part of the load if the state does not say that already."""
    return state if progress is None or progress["phase"] == state else f"{state}: {progress['phase']}"


def percentage_of(progress: Mapping[str, Any] | None) -> int | None:
    """Return how much of a worker's phase is done; None if that is not known."""
    if progress is None or progress["total"] <= 0:
        return None
    done, total = int(progress["done"]), int(progress["total"])
    return min(100, done * 100 // total)


@dataclass
class _Phase:
    text: str
    began: float
    told: float


class PhaseLines:
    """The phases of several workers, and when each was last told."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}

    def due(self, label: str, phase: str, now: float, *, percentage: int | None = None, lasts: bool = True) -> str:
        """Return the line about a phase if one is due now, else an empty text.

        label       the name of what is in the phase
        now         seconds of a monotonic clock
        percentage  how much of the phase is done; None if that is not known
        lasts       false if nobody waits for the end of the phase. Then only its beginning gets a line
        """
        known = self._phases.get(label)
        if known is None or known.text != phase:
            self._phases[label] = _Phase(phase, now, now)
            return phase
        if not lasts or now - known.told < EVERY_S:
            return ""
        known.told = now
        share = "for" if percentage is None else f"{percentage}% after"
        return f"{phase} ({share} {now - known.began:.0f} s)"

    def forget(self, label: str) -> None:
        """Forget a label, so that its next phase gets a line."""
        self._phases.pop(label, None)
