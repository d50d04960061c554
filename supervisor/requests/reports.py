"""Tell clients that wait how far their requests are. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from protocol.codec import encode, pack_body
from protocol.messages import Report
from supervisor.requests.in_flight import Awaited, Effect, InFlight, ToClient
from supervisor.requests.model_queue import ModelQueue

MOST_REPORTS = 256
"""The most reports that are made at once for one model. Counting the places of n requests takes n² steps."""


def report(request: InFlight, fields: dict[str, object]) -> ToClient:
    """Return the effect that sends REPORT to the client of a request."""
    return ToClient(request.channel, encode(Report(request.request, pack_body(fields))))


def loading(queue: ModelQueue, progress: Mapping[str, Any]) -> list[Effect]:
    """Report how far the load of a model is to the clients that wait for it. ``progress`` is as ``status`` shows it."""
    if queue.is_ready:
        return []  # another worker is up: the clients wait for room there
    fields = {"phase": "loading", "part": progress["phase"], "done": progress["done"], "total": progress["total"]}
    fields |= {name: progress[name] for name in ("unit", "per_s") if progress.get(name)}
    return [report(request, fields) for request in _interested(queue.all_waiting())]


def positions(queue: ModelQueue) -> list[Effect]:
    """Report the place in the queue to each client whose request has moved on since the last report, or whose model
    waits for something else."""
    effects: list[Effect] = []
    for request in chain(_interested(queue.ahead), _interested(queue.all_waiting())):
        position, told = queue.position(request), awaited_text(queue.waits_for, request.owner.may_use)
        if position != request.reported or told != request.told:
            request.reported, request.told = position, told
            fields: dict[str, object] = {"phase": "queued", "queue_position": position}
            effects.append(report(request, fields | ({"waits_for": told} if told else {})))
    return effects


def awaited_text(awaited: Awaited, may_use: Callable[[str], bool] = lambda model: True) -> str:
    """Return what a model waits for before it can be loaded, for people: "a to finish 2 requests"; "" for nothing.

    may_use  whether the reader may know of a model. Others have no name in the text
    """
    parts = []
    for model, running in awaited:
        work = f"finish {running} request{'s' if running > 1 else ''}" if running else "make room"
        parts.append(f"{model if may_use(model) else 'another model'} to {work}")
    return " and ".join(parts)


def _interested(waiting: Iterable[InFlight]) -> Iterator[InFlight]:
    """Yield the requests with ``progress``, except those that have a token already."""
    return islice((r for r in waiting if r.route.progress and not r.has_tokens), MOST_REPORTS)
