"""End requests when their time is over: one timer of the loop, set to the earliest deadline of all requests."""

import time

from supervisor.requests.effect_queue import EffectQueue
from supervisor.requests.scheduler import Scheduler
from supervisor.timers import Timer, Timers


class DeadlineTimer:
    """The timer that calls ``Scheduler.expire`` when the earliest deadline has come."""

    def __init__(self, scheduler: Scheduler, timers: Timers, effects: EffectQueue) -> None:
        self._scheduler = scheduler
        self._timers = timers
        self._effects = effects
        self._timer: Timer | None = None

    def set(self) -> None:
        """Set the timer to the earliest deadline. Call this when a request may have brought an earlier one."""
        due = self._scheduler.next_due
        if due is None or (self._timer is not None and self._timer.at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timers.at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._effects.add(self._scheduler.expire(time.monotonic()))
        self.set()
