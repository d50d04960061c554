"""Keep the times at which requests expire, in a heap that skips outdated entries. Pure."""

import heapq
from collections.abc import Callable
from itertools import count

from supervisor.requests.in_flight import InFlight


class Deadlines:
    """(when, what, whose), earliest first.

    is_live  whether an entry of this request still matters
    """

    def __init__(self, is_live: Callable[[InFlight], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, str, InFlight]] = []
        self._ties = count()
        self._clear_at = 1024

    def add(self, when: float, what: str, request: InFlight) -> None:
        """what: "queue_ms", "ttft_ms" or "deadline_ms"."""
        heapq.heappush(self._heap, (when, next(self._ties), what, request))
        if len(self._heap) > self._clear_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[3])]
            heapq.heapify(self._heap)
            self._clear_at = max(1024, 2 * len(self._heap))

    @property
    def earliest(self) -> float | None:
        """When to ask next, monotonic seconds; None: there is nothing to wait for."""
        while self._heap and not self._is_live(self._heap[0][3]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> list[tuple[str, InFlight]]:
        """Everything that is due."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, _, what, request = heapq.heappop(self._heap)
            if self._is_live(request):
                due.append((what, request))
        return due
