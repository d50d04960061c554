"""Progress for people: a bar for each thing, redrawn in place on a terminal; elsewhere a line for each phase."""

import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from modelctl.cli.root import completed
from modelctl.cli.tables import GAP
from protocol.process.shown import steer
from supervisor.config.spelling import duration, size
from supervisor.logs.phases import PhaseLines, percentage_of

# How fast things get on, and how long they still take: ``1.2 GiB of 4.2 GiB, 610 MiB/s, 5 s left``. Pure.


WINDOW_S: Final = 15.0
"""The rate is that of the last seconds, because a load from a cold disk begins more slowly than it goes on."""
FEWEST: Final = 4
"""Samples that are kept even if they are older. A compiler may need a minute for a file."""
SHORTEST_S: Final = 1.0
"""Seconds before a rate is shown. What is over by then needs none."""
SAMPLE_S: Final = 0.2
"""Seconds between two samples."""


class Rate:
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


Progress = Mapping[str, Any]
"""{done, total, unit} of a phase. ``unit`` may be missing: "bytes", or a noun in the plural."""
REDRAW_S: Final = 0.5
"""Seconds between two looks of ``Ticking``."""
WIDEST_BAR: Final = 24
NARROWEST_BAR: Final = 6
"""Characters between the brackets of a bar. If the terminal has no room for so many, the bar is left out."""


def bar(done: int, total: int, width: int = WIDEST_BAR) -> str:
    """Return a progress bar: ``[######------]  50%``."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {int(share * 100):3d}%"


@dataclass(frozen=True)
class Shown:
    """What ``LiveLines`` shows about one thing.

    line      the text for a terminal, before the bar
    phase     the text for a log; a change of this text begins a phase
    progress  None if it is not known
    lasts     false if the command does not wait for the end of the phase
    """

    line: str
    phase: str
    progress: Progress | None = None
    lasts: bool = True


class LiveLines:
    """Lines on stderr. On a terminal they are redrawn in place, with a bar, a rate and the time left. Elsewhere a line
    is printed when a phase begins, and then every ten seconds.

    for_people  false if a program reads the command's output; then lines are shown on a terminal only
    """

    def __init__(self, *, for_people: bool = True) -> None:
        self._drawn: list[str] = []
        self._phases = PhaseLines()
        self._paces: dict[str, Rate] = {}
        self._live = sys.stderr.isatty()
        self._silent = not (for_people or self._live)

    def show(self, shown: Mapping[str, Shown]) -> None:
        """Show lines, by the label of what they are about."""
        if self._silent:
            return
        now = time.monotonic()
        if self._live:
            width = shutil.get_terminal_size().columns
            self._draw([self._line(label, each, now, width) for label, each in shown.items()], width)
        else:
            for label, each in shown.items():
                phase = completed(each.phase)
                percentage = percentage_of(each.progress)
                if line := self._phases.due(label, phase, now, percentage=percentage, lasts=each.lasts):
                    sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the lines from the terminal, because something else is printed there."""
        if self._drawn:
            self._draw([], shutil.get_terminal_size().columns)
            sys.stderr.flush()

    def _line(self, label: str, shown: Shown, now: float, width: int) -> str:
        line = completed(shown.line)
        tail = self._paces.setdefault(label, Rate()).text(shown.phase, shown.progress, now) if shown.lasts else ""
        return with_bar(line, shown.progress, tail, width)

    def _draw(self, lines: list[str], width: int) -> None:
        if self._drawn:
            # A line that is longer than the terminal's width takes several rows. All of them are cleared.
            rows = sum(max(1, -(-len(text) // width)) for text in self._drawn)
            steer(sys.stderr, f"\x1b[{rows}A\x1b[J")
        for text in lines:
            sys.stderr.write(f"{text}\n")
        self._drawn = lines


class Ticking:
    """Redraws a line on a terminal twice a second, while the body of a with statement does something that may take
    long. Then removes the line. Shows nothing elsewhere.

    line  may be replaced meanwhile, and its progress may change
    """

    def __init__(self, line: Shown) -> None:
        self.line = line
        self._lines = LiveLines(for_people=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        with suppress(OSError):
            self._lines.clear()

    def _tick(self) -> None:
        with suppress(OSError):  # the terminal has gone, which is no reason to give up the work
            while not self._over.wait(REDRAW_S):
                self._lines.show({"": self.line})


def with_bar(line: str, progress: Progress | None, tail: str, width: int) -> str:
    """Return a line with a bar that takes the room that the terminal leaves, and the text behind the bar. Pure.

    width  columns of the terminal
    """
    parts = [line]
    if progress is not None and progress["total"] > 0:
        frame = len(bar(0, 1, 0)) + len(GAP) * (1 + bool(tail))
        room = width - 1 - len(line) - len(tail) - frame
        if room >= NARROWEST_BAR:
            parts.append(bar(progress["done"], progress["total"], min(WIDEST_BAR, room)))
        else:
            parts.append(f"{percentage_of(progress)}%")
    return GAP.join([*parts, tail] if tail else parts)
