"""A circuit breaker for questions to the GPU driver. Pure: times are arguments, monotonic seconds.

The supervisor asks the driver on its one thread, and every token waits for that thread. So a driver that hangs or has
become slow may cost TIMEOUT_S once. After that, no reading waits for an answer until one has come quickly.
"""

from enum import Enum

TIMEOUT_S = 0.5
"""Seconds that the supervisor waits for an answer. Usual answers take 1 to 30 ms."""
QUIET_S = 2.0
"""Seconds without a question after a late answer. QUIET_S and TIMEOUT_S together limit the time that a driver costs
if it hangs again and again."""


class BreakerState(Enum):
    """The state of the breaker: may the driver be asked now, and does the supervisor wait for the answer?"""

    CLOSED = "closed"
    """Ask, and wait for the answer."""
    HALF_OPEN = "half open"
    """Ask, only to learn how long the driver takes. No reading waits for the answer."""
    OPEN = "open"
    """Do not ask: an older question has no answer yet, or it is too early for another."""


class CircuitBreaker:
    """Decides about the questions to one process. At most one question is without an answer."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._out: BreakerState | None = None
        self._gave_up = False
        self._slow = False
        self._quiet_until = 0.0

    def next(self, now: float) -> BreakerState:
        """Return whether to ask now, and whether to wait for the answer."""
        if self._out is not None or (self._slow and now < self._quiet_until):
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._slow else BreakerState.CLOSED

    def asked(self, asking: BreakerState) -> None:
        """Note that a question was sent, in the state that ``next`` returned."""
        self._out, self._gave_up = asking, False

    def gave_up(self) -> None:
        """Note that the reading waits no longer. The answer, if it comes, is old."""
        self._slow = self._gave_up = True

    def answered(self, took_s: float, now: float) -> None:
        """Note that the answer came.

        took_s  seconds that the driver took
        """
        if self._gave_up or (self._slow and took_s >= self._timeout_s / 2):
            self._quiet_until = now + QUIET_S
        else:
            self._slow = False
        self._out, self._gave_up = None, False

    def forget(self) -> None:
        """Note that the process is gone, with its question. The next process has not been slow yet."""
        self._out, self._gave_up, self._slow = None, False, False

    @property
    def is_out(self) -> bool:
        """Return whether a question has no answer yet."""
        return self._out is not None
