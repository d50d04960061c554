"""Keep the times at which requests expire, in a heap that skips outdated entries. Pure."""

import heapq
from collections.abc import Callable
from itertools import count

from protocol.errors import ErrorCode, WireError
from supervisor.requests.in_flight import InFlight

LIMITS = ("queue_ms", "ttft_ms", "deadline_ms")
"""The time limits that a request's route may have."""
CANCEL = "cancel"
"""The limit of a cancelled request: until then the worker has to confirm that it has let the request go."""


class Deadlines:
    """A heap of entries (time, limit, request), earliest first. Times are monotonic seconds.

    is_live  whether an entry of this request still matters
    alarm    called with each time at which ``take`` has to be called, unless it was called before
    """

    def __init__(self, is_live: Callable[[InFlight], bool], alarm: Callable[[float], object]) -> None:
        self._is_live = is_live
        self._alarm = alarm
        self._heap: list[tuple[float, int, str, InFlight]] = []
        self._ties = count()
        self._clear_at = 1024

    def add_limits(self, request: InFlight) -> None:
        """Watch the limits that a new request has."""
        for limit in LIMITS:
            if (milliseconds := getattr(request.route, limit)) is not None:
                self.add(request.accepted + milliseconds / 1000, limit, request)

    def add(self, when: float, limit: str, request: InFlight) -> None:
        """Watch one limit of a request: one of ``LIMITS``, or ``CANCEL``."""
        heapq.heappush(self._heap, (when, next(self._ties), limit, request))
        if len(self._heap) > self._clear_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[3])]
            heapq.heapify(self._heap)
            self._clear_at = max(1024, 2 * len(self._heap))
        self._alarm(when)

    def take(self, now: float) -> list[tuple[str, InFlight]]:
        """Remove and return everything that is due, as (limit, request). Set the alarm for what is due next."""
        due = []
        while self._heap and (self._heap[0][0] <= now or not self._is_live(self._heap[0][3])):
            _, _, limit, request = heapq.heappop(self._heap)
            if self._is_live(request):
                due.append((limit, request))
        if self._heap:
            self._alarm(self._heap[0][0])
        return due


def is_met(limit: str, request: InFlight) -> bool:
    """Return whether a request already has what its limit is for: a worker (queue_ms), or a token (ttft_ms)."""
    if limit == "queue_ms":
        return request.started is not None
    return limit == "ttft_ms" and request.has_tokens


def too_late(limit: str, request: InFlight) -> WireError:
    """Return the error that ends a request which has exceeded this limit of its route."""
    milliseconds = getattr(request.route, limit)
    if limit == "queue_ms":
        message = f"the request waited for a worker for {milliseconds} ms, which is its queue_ms"
        return WireError(ErrorCode.QUEUE_TIMEOUT, message, field="route.queue_ms")
    awaited = "its first token" if limit == "ttft_ms" else "the end of its answer"
    message = f"{awaited} did not come within {milliseconds} ms, which is the request's {limit}"
    return WireError(ErrorCode.DEADLINE_EXCEEDED, message, field=f"route.{limit}")
