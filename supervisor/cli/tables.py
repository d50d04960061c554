"""What people read: tables and progress bars."""

import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; None shows as '-'. Numbers are right-aligned."""
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(header))
    ]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(header)), *map(line, cells)])


def bar(done: int, total: int, width: int = 24) -> str:
    """``[######------]  50%``."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {int(share * 100):3d}%"


class LiveLines:
    """Lines on stderr that are redrawn in place on a terminal, and printed once per change elsewhere.

    for_people  false: a program reads what the command prints, so a terminal is the only place for them
    """

    def __init__(self, *, for_people: bool = True) -> None:
        self._drawn = 0
        self._last: dict[str, str] = {}
        self._live = sys.stderr.isatty()
        self._silent = not (for_people or self._live)

    def show(self, lines: dict[str, str], steady: dict[str, str]) -> None:
        """lines   label → text with what moves, for a terminal
        steady  label → text without what moves, printed elsewhere when it changes
        """
        if self._silent:
            return
        if self._live:
            if self._drawn:
                sys.stderr.write(f"\x1b[{self._drawn}A")
            for text in lines.values():
                sys.stderr.write(f"\x1b[2K{text}\n")
            self._drawn = len(lines)
        else:
            for label, text in steady.items():
                if self._last.get(label) != text:
                    sys.stderr.write(f"{text}\n")
            self._last = dict(steady)
        sys.stderr.flush()
