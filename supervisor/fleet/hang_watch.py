"""The watch over all workers: reads their heartbeats, asks a hung one for its stacks, and has it killed. See ``watch``."""

import logging
from collections.abc import Iterable
from typing import Protocol

from supervisor.fleet.replica import Replica
from supervisor.model_logs import about
from supervisor.workers.launcher import Launched
from supervisor.workers.watch import Looks, Verdict, Watched


class Killer(Protocol):
    def __call__(self, replica: Replica, why: str, reason: str, /) -> None: ...


class HangWatch:
    """Looks at workers whenever it is told to.

    kill  ends a worker's process: (replica, why, reason of its exit)
    """

    def __init__(self, kill: Killer, log: logging.Logger) -> None:
        self._kill = kill
        self._log = log
        self._looks = Looks()

    def look(self, replicas: Iterable[Replica], now: float) -> None:
        """Look at every worker that has a process, whatever its state."""
        passed = self._looks.passed(now)
        for replica in replicas:
            process = replica.process
            if process is None or (reading := process.read_lease()) is None:
                replica.watched = None  # nothing there, or started in a way that does not show
                continue
            if replica.watched is None:  # a new process
                replica.watched = Watched(reading)
                continue
            self._act(replica, process, replica.watched, replica.watched.look(reading, passed))

    def _act(self, replica: Replica, process: Launched, watched: Watched, verdict: Verdict) -> None:
        if verdict in (Verdict.HUNG, Verdict.LOST) and (process.is_gone or replica.killed_for is not None):
            return  # it is dead, or dying; the loop is about to hear of it
        if verdict is Verdict.HUNG:
            told = f"{replica.shown}: pid {process.pid} {watched.story()}; {process.condition()}"
            self._log.error("%s", told, extra=about(replica.log_name))
            if watched.can_tell:
                process.dump_stacks()
        elif verdict is Verdict.SPARED:
            told = f"{replica.shown}: pid {process.pid} goes on after all"
            self._log.warning("%s", told, extra=about(replica.log_name))
        elif verdict is Verdict.LOST:
            self._kill(replica, f"{watched.story()}; {process.condition()}", "hung")
