"""A circuit breaker for questions to the GPU driver. Pure: times are arguments, monotonic seconds.

The supervisor asks the driver on its one thread, on which every token waits. A driver that hangs or has become slow may
therefore cost TIMEOUT_S once. After that nobody waits for an answer until one has come quickly.
"""

from enum import Enum

TIMEOUT_S = 0.5
"""How long the supervisor waits for an answer. Usual answers take 1 to 30 ms."""
QUIET_S = 2.0
"""How long nothing is asked after a late answer. With a driver that hangs again and again, this and TIMEOUT_S say how
much time is lost."""
RESTART_S, RESTART_MAX_S = 5.0, 300.0
"""From one time that the process that asks the driver is started again to the next, at least; twice as long after each
of those that follow closely, such as where it ends whenever it opens the driver."""


class BreakerState(Enum):
    """Whether the driver may be asked now, and whether the supervisor waits for the answer."""

    CLOSED = "closed"
    """Ask, and wait for the answer."""
    HALF_OPEN = "half open"
    """Ask, only to learn how long the driver takes: nobody waits."""
    OPEN = "open"
    """There is a question out that nobody waits for any more, or it is too early for another."""


class CircuitBreaker:
    """Decides about the questions to one process. At most one question is out at a time."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._out: BreakerState | None = None
        self._gave_up = False
        self._slow = False
        self._quiet_until = 0.0

    def next(self, now: float) -> BreakerState:
        if self._out is not None or (self._slow and now < self._quiet_until):
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._slow else BreakerState.CLOSED

    def asked(self, asking: BreakerState) -> None:
        """A question went out, as ``next`` said."""
        self._out, self._gave_up = asking, False

    def gave_up(self) -> None:
        """Its time is over. Its answer, if one comes, is old."""
        self._slow = self._gave_up = True

    def answered(self, took_s: float, now: float) -> None:
        """The answer came. ``took_s``: how long the driver took."""
        if self._gave_up or (self._slow and took_s >= self._timeout_s / 2):
            self._quiet_until = now + QUIET_S
        else:
            self._slow = False
        self._out, self._gave_up = None, False

    def forget(self) -> None:
        """The process is gone, and what was asked with it. The next one has not been slow yet."""
        self._out, self._gave_up, self._slow = None, False, False

    @property
    def is_out(self) -> bool:
        """Whether an answer is due."""
        return self._out is not None


class Restarts:
    """Of a process that may end again and again. The first is at once."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._pause_s = RESTART_S

    def next(self, now: float) -> bool:
        """Whether it is started again now."""
        since = None if self._last is None else now - self._last
        if since is not None and since < self._pause_s:
            return False
        follows = since is not None and since < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S) if follows else RESTART_S
        self._last = now
        return True
