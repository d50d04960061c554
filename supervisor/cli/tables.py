"""Tables and progress bars for people."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supervisor.cli.hints import completed
from supervisor.phase_lines import PhaseLines

GAP = "  "
"""The space between two columns."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if standard output is no terminal and so has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None, *, labels: int = 1) -> str:
    """Return the rows as text: columns padded to their widest cell, None as '-', numbers right-aligned.

    width   columns of the terminal. A wider table is divided into parts, because a terminal would break lines in the
            middle of a cell. None: the table is not divided, because programs read one line per row
    labels  the number of first columns that tell what a row is about. Each part repeats them
    """
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(header))
    ]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]

    def line(values: Sequence[str], columns: Sequence[int]) -> str:
        padded = [values[i].rjust(widths[i]) if right[i] else values[i].ljust(widths[i]) for i in columns]
        return GAP.join(padded).rstrip()

    parts = [[line(values, columns) for values in (header, *cells)] for columns in _divided(widths, width, labels)]
    return "\n\n".join("\n".join(part) for part in parts)


def _divided(widths: Sequence[int], width: int | None, labels: int) -> list[list[int]]:
    """Return the columns of each part of a table, by their numbers. Each part begins with the columns of labels."""
    first = list(range(labels))
    room = None if width is None else width - sum(widths[:labels]) - len(GAP) * (labels - 1)
    parts, taken = [[*first]], 0
    for column in range(labels, len(widths)):
        needed = len(GAP) + widths[column]
        if room is not None and taken + needed > room and taken:
            parts.append([*first])
            taken = 0
        parts[-1].append(column)
        taken += needed
    return parts


def bar(done: int, total: int, width: int = 24) -> str:
    """Return a progress bar: ``[######------]  50%``."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {int(share * 100):3d}%"


class LiveLines:
    """Lines on stderr. On a terminal they are redrawn in place. Elsewhere a line is printed when a phase begins, and
    then every ten seconds.

    for_people  false if a program reads the command's output; then lines are shown on a terminal only
    """

    def __init__(self, *, for_people: bool = True) -> None:
        self._drawn: list[str] = []
        self._phases = PhaseLines()
        self._live = sys.stderr.isatty()
        self._silent = not (for_people or self._live)

    def show(self, shown: Mapping[str, "Shown"]) -> None:
        """Show lines, by the label of what they are about."""
        if self._silent:
            return
        if self._live:
            self._draw([completed(each.line) for each in shown.values()])
        else:
            now = time.monotonic()
            for label, each in shown.items():
                phase = completed(each.phase)
                if line := self._phases.due(label, phase, now, percentage=each.percentage, lasts=each.lasts):
                    sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _draw(self, lines: list[str]) -> None:
        if self._drawn:
            # A line that is longer than the terminal's width takes several rows. All of them are cleared.
            width = shutil.get_terminal_size().columns
            rows = sum(max(1, -(-len(text) // width)) for text in self._drawn)
            sys.stderr.write(f"\x1b[{rows}A\x1b[J")
        for text in lines:
            sys.stderr.write(f"{text}\n")
        self._drawn = lines


@dataclass(frozen=True)
class Shown:
    """What ``LiveLines`` shows about one thing.

    line        the text for a terminal, with figures that change
    phase       the text for a log, without them
    percentage  how much of the phase is done; None if that is not known
    lasts       false if the command does not wait for the end of the phase
    """

    line: str
    phase: str
    percentage: int | None = None
    lasts: bool = True
