"""The log of ``serve`` on a terminal, with a line below it for each model that starts, which is redrawn in place."""

import logging
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from supervisor.cli.live_lines import LiveLines, Shown


class StartScreen(logging.StreamHandler[TextIO]):
    """Writes records to stderr, which has to be a terminal. ``supervisor.fleet.start_lines`` calls ``show_starts``."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lines = LiveLines(for_people=False)
        self._drawn = False
        self._writable = select.poll()
        self._writable.register(sys.stderr.fileno(), select.POLLOUT)

    def show_starts(self, starts: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Draw a line for each worker that starts: name → (phase, progress). Remove the lines of before.

        Draw nothing while the terminal takes no output (Ctrl-S), because the supervisor's loop would wait for it.
        """
        shown = {name: Shown(f"{name:<16} {phase:<9}", phase, progress) for name, (phase, progress) in starts.items()}
        if shown or self._drawn:
            with suppress(OSError):  # the terminal has gone
                if self._writable.poll(0):
                    self._lines.show(shown)
                    self._drawn = bool(shown)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record where the lines are. The next look draws them below it."""
        with suppress(OSError):
            self._lines.clear()
        super().emit(record)
