"""Write to the log how the starts of workers go on, so that the log of a slow load shows that something happens."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from supervisor.fleet.replica import Replica
from supervisor.model_logs import about
from supervisor.phase_lines import PhaseLines, percentage_of, phase_of
from supervisor.workers.lifecycle import WorkerState


@runtime_checkable
class ShowsStarts(Protocol):
    """A handler of the log that also shows on a terminal how far each start is."""

    def show_starts(self, starts: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Show name → (phase, progress) of each worker that starts. ``progress`` is that of the worker's report."""


class StartLines:
    """Logs each part of a load, and every ten seconds how far it is. Other lines tell of the states themselves."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines = PhaseLines()
        self._screens = [handler for handler in log.handlers if isinstance(handler, ShowsStarts)]

    def check(self, replicas: Iterable[Replica], now: float) -> None:
        """Log the lines that are due, and show on a terminal how far the starts are."""
        starts = {}
        for replica in replicas:
            if replica.state not in (WorkerState.STARTING, WorkerState.LOADING):
                self._lines.forget(replica.name)
                continue
            progress = replica.how_far()
            phase = phase_of(replica.state, progress)
            starts[replica.shown] = phase, progress
            line = self._lines.due(replica.name, phase, now, percentage=percentage_of(progress))
            if line and line != replica.state:
                self._log.info("%s: %s", replica.shown, line, extra=about(replica.log_name))
        for screen in self._screens:
            screen.show_starts(starts)
