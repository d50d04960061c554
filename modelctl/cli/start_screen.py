"""The log of ``serve`` on a terminal, with a line below it for each model that starts, which is redrawn in place."""

import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from modelctl.cli.live_lines import LiveLines, Shown
from protocol.process.logs import OUTSIDE


class StartScreen(logging.StreamHandler[TextIO]):
    """Writes records to stderr, which has to be a terminal. ``supervisor.fleet.fleet`` calls ``show_starts``.

    Make one after ``logs.never_wait``.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lines = LiveLines(for_people=False)
        self._drawn = False

    def show_starts(self, starts: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Draw a line for each worker that starts: name → (phase, progress). Remove the lines of before.

        Draw nothing while the terminal takes no output (Ctrl-S): the lines would take the room of the log's lines.
        """
        shown = {name: Shown(f"{name:<16} {phase:<9}", phase, progress) for name, (phase, progress) in starts.items()}
        if (shown or self._drawn) and not OUTSIDE[2].is_behind:
            self._lines.show(shown)
            self._drawn = bool(shown)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record where the lines are. The next look draws them below it."""
        self._lines.clear()
        super().emit(record)
