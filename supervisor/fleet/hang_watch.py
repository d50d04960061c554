"""Watch all workers: read their leases, ask a hung worker for its stacks, and have it killed.

``supervisor.workers.hang_detector`` decides which worker hangs.
"""

import logging
from collections.abc import Callable, Iterable

from supervisor.event_history import EventKind, noted
from supervisor.fleet.replica import Replica
from supervisor.workers.hang_detector import CheckClock, HangDetector, HangVerdict
from supervisor.workers.launcher import Launched


class HangWatch:
    """The checks of all workers for hangs, done whenever ``check`` is called.

    kill  ends a worker's process: (worker, message for the log, reason in the exit report)
    """

    def __init__(self, kill: Callable[[Replica, str, str], None], log: logging.Logger) -> None:
        self._kill = kill
        self._log = log
        self._clock = CheckClock()

    def check(self, replicas: Iterable[Replica], now: float) -> None:
        """Check every worker that has a process, whatever its state."""
        passed = self._clock.passed(now)
        for replica in replicas:
            process = replica.process
            if process is None or (reading := process.read_lease()) is None:
                replica.detector = None  # no process, or one that has no lease
                continue
            if replica.detector is None:  # a new process
                replica.detector = HangDetector(reading)
                continue
            self._act(replica, process, replica.detector, replica.detector.check(reading, passed))

    def _act(self, replica: Replica, process: Launched, detector: HangDetector, verdict: HangVerdict) -> None:
        if verdict in (HangVerdict.HUNG, HangVerdict.LOST) and (process.is_gone or replica.killed_for is not None):
            return  # it has ended, or was killed: the loop is about to see its end
        if verdict is HangVerdict.HUNG:
            message = f"{replica.shown}: pid {process.pid} {detector.story()}; {process.condition()}"
            self._log.error("%s", message, extra=noted(EventKind.HANG, replica.log_name))
            if detector.can_tell:
                process.dump_stacks()
        elif verdict is HangVerdict.SPARED:
            message = f"{replica.shown}: pid {process.pid} goes on after all"
            self._log.warning("%s", message, extra=noted(EventKind.HANG, replica.log_name))
        elif verdict is HangVerdict.LOST:
            self._kill(replica, f"{detector.story()}; {process.condition()}", "hung")
