"""The times at which requests expire, as far as the scheduler's tests do not show it."""

from typing import Any
from weakref import ref

from supervisor.requests.table import Deadlines


class Request:
    """What ``Deadlines`` reads of a request: when it was accepted, and the limits of its route."""

    accepted = 0.0
    queue_ms = ttft_ms = None

    def __init__(self, deadline_ms: int | None) -> None:
        self.deadline_ms = deadline_ms

    @property
    def route(self) -> "Request":
        return self


def test_a_new_request_drops_the_limits_of_ended_ones() -> None:
    """Limits may be hours away, and an entry holds its request with all that has happened to it."""
    live: set[Any] = set()
    deadlines = Deadlines(lambda request: request in live, lambda when: None)

    def accept(deadline_ms: int | None) -> "ref[Request]":
        request: Any = Request(deadline_ms)
        live.add(request)
        deadlines.add_limits(request)
        return ref(request)

    ended = [accept(3_600_000 - number) for number in range(100)]
    assert all(request() for request in ended)
    live.clear()
    accept(None)
    assert not any(request() for request in ended)
