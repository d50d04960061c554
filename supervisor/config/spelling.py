"""How people write values, and how they are shown to people. Pure.

This module reads durations (``5m``) and sizes (``20GiB``, ``20GB``, ``24G``, ``90%``) of files, requests and commands.
It spells values in error messages as YAML and JSON do. Python's spelling differs."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DURATION_S = 7 * 24 * 3600.0
"""The longest duration in seconds. No key of models.yaml needs a longer one, and no clock overflows."""
CLOCK_UNITS = ("ms", "s", "m", "h")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_PARTS = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|[smhdw]))+")
_PART = re.compile(r"([0-9.]+)(ms|[smhdw])")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?) ?(B|[KMGT]|[KMGT]iB|[kKMGT]B)$")
_SHARE = re.compile(r"^(\d+(?:\.\d+)?) ?%$")
MAX_BYTES = 1 << 50
MOST_SHOWN = 60
"""The most characters of a value that a message repeats. If a value is longer, the message names its type."""


def seconds_of(text: str, units: Collection[str] = CLOCK_UNITS, *, several: bool = False) -> float | None:
    """Return the seconds of a text such as ``5m``; None for another text.

    units    those that the text may have, of ms, s, m, h, d and w
    several  whether the text may have several numbers, as ``1h30m`` has
    """
    found = _PART.findall(text) if _PARTS.fullmatch(text) else []
    if not found or (len(found) > 1 and not several) or not {unit for _, unit in found} <= set(units):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in found)


def parse_duration(value: object, units: Collection[str] = CLOCK_UNITS) -> float:
    """Return the seconds of ``5m``, ``90s``, ``250ms``, ``1h``, or of a number of seconds. Raises ValueError."""
    seconds = seconds_of(value, units) if isinstance(value, str) else math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    if seconds is None or not 0 <= seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration such as 250ms, 30s, 5m or 1h, a week at most")
    return float(seconds)


def duration(seconds: float) -> str:
    """Return a duration as text: ``0.2 s``, ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, of, smaller, smaller_of in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= of:
            return f"{whole // of} {unit} {whole % of // smaller_of} {smaller}"
    return f"{whole} s"


def parse_size(value: object) -> int:
    """Return a size in bytes. ``GiB`` and ``G`` are 2**30, ``GB`` is 10**9, a number is bytes. Raises ValueError."""
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.match(value)):
        unit = match[2]
        base = 1000 if len(unit) == 2 else 1024
        power = 0 if unit == "B" else "KMGT".index(unit[0].upper()) + 1
        size = int(float(match[1]) * base**power)
    if not 0 < size <= MAX_BYTES:
        raise ValueError("must be a size such as 20GiB, 512MiB or 20GB")
    return size


@dataclass(frozen=True, slots=True)
class Limit:
    """A part of a GPU's memory: a number of bytes, or a share of all its memory (above 0, at most 1)."""

    bytes: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        """Return the limit in bytes on a GPU of ``total`` bytes."""
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return int(total * self.share)


def parse_limit(value: object) -> Limit:
    """Return the limit that a text such as ``20GiB`` or ``90%`` means. Raises ValueError."""
    if isinstance(value, str) and (match := _SHARE.match(value)) and 0 < float(match[1]) <= 100:
        return Limit(share=float(match[1]) / 100)
    try:
        return Limit(bytes=parse_size(value))
    except ValueError:
        raise ValueError("must be a size such as 20GiB or 20GB, or a share of the GPU such as 90%") from None


def size(count: int) -> str:
    """Return bytes in a readable unit: ``2.7 GiB``, ``120 MiB``, ``0 bytes``."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count} bytes"


def spelled(value: object) -> str:
    """Return a value as YAML and JSON write it, or its type where that would be long."""
    try:
        shown = _written(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; very deep lists
        shown = ""
    if 0 < len(shown) <= MOST_SHOWN:
        return shown
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "a long number"


def quotes_for(value: object) -> str:
    """Return what to do if a file's value that is no text was meant as text: YAML reads some words as other values."""
    if isinstance(value, bool):
        words = "yes, on and true are true" if value else "no, off and false are false"
        return f"; without quotes, {words} in YAML: put the word into quotes"
    return "; put it into quotes" if isinstance(value, (int, float)) else ""


def spelled_name(name: object) -> str:
    """Return a map's key, shortened. A key from the wire may be a bin, and names are strings."""
    if isinstance(name, bytes):
        return f"{name[:MOST_SHOWN].decode(errors='replace')!r} (a bin, and names are strings)"
    return repr(str(name)[:MOST_SHOWN])


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(part)}' for key, part in value.items())}}}"
    if isinstance(value, bytes):
        return f"a bin of {len(value)} byte{'' if len(value) == 1 else 's'}"
    return repr(value)


# How far the phase of a worker is, and when it gets a line in a log: when it begins, and every ten seconds.


PHASE_EVERY_S = 10.0
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
        if not lasts or now - known.told < PHASE_EVERY_S:
            return ""
        known.told = now
        share = "for" if percentage is None else f"{percentage}% after"
        return f"{phase} ({share} {now - known.began:.0f} s)"

    def forget(self, label: str) -> None:
        """Forget a label, so that its next phase gets a line."""
        self._phases.pop(label, None)
