"""One heap of pending calls for the whole loop. Times are monotonic seconds, and the caller passes them."""

import heapq
import itertools
from collections.abc import Callable

CLEAR_AT = 256
"""Number of pending calls at which cancelled ones are removed for the first time. Later they are removed when the
number has doubled. Otherwise a cancelled call would stay until its time, perhaps for a day. Such calls are frequent,
because each short deadline cancels the call at a longer one."""


class Timer:
    """A pending call. ``cancel`` may be called twice, and also after the call has become due and before it runs."""

    __slots__ = ("at", "callback", "cancelled")

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """The pending calls, each at a given time. Calls with equal times run in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._clear_at = CLEAR_AT

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        if len(self._heap) > self._clear_at:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._clear_at = max(CLEAR_AT, 2 * len(self._heap))
        return timer

    def due(self, now: float) -> list[Timer]:
        """Take out every timer whose time has come."""
        timers = []
        while self._heap and self._heap[0][0] <= now:
            timers.append(heapq.heappop(self._heap)[2])
        return timers

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next call; None if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None


class EarliestTimer:
    """One pending call, at the earliest of the times that were asked for since its last call."""

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self._callback = callback
        self._timer: Timer | None = None

    def set(self, when: float) -> None:
        """Make the call at this time, unless an earlier one is pending."""
        if self._timer is not None:
            if self._timer.at <= when:
                return
            self._timer.cancel()
        self._timer = self._timers.at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        self._callback()
