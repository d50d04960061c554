"""Show unfinished requests to people, and find the request that a person names. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from protocol.errors import ErrorCode, RequestError, WireError
from supervisor.keys.rights import Identity, may_cancel, may_see
from supervisor.requests.in_flight import InFlight
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.request_table import RequestTable

MOST = 500
"""The most requests in one list. Counting a place in a queue of n requests takes n steps, so a list takes n² steps."""


class RequestList:
    """The unfinished requests of all models and connections, as the verbs ``requests`` and ``cancel_request`` see them.

    table  has the requests in the order in which they were accepted
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def describe(
        self, identity: Identity, limit: int, shown: Callable[[str], str | None], now: float
    ) -> dict[str, Any]:
        """Return the result of the verb ``requests``: the oldest requests that ``identity`` may see.

        limit  the most requests in the list
        shown  returns the name under which people know a worker; None for a worker that was removed
        now    monotonic seconds
        """
        visible = [request for request in self._unfinished() if _is_visible(identity, request)]
        return {
            "requests": [self._describe_one(request, shown, now) for request in islice(visible, limit)],
            "total": len(visible),
        }

    def story(self, name: str, identity: Identity, unix: float) -> list[dict[str, Any]]:
        """Return what became of the requests that a name means, see ``Stories.find``: the result of ``story``.

        unix  what has to be added to monotonic seconds to get seconds since 1970

        Raises RequestError if there is none that ``identity`` may see.
        """
        live = {request.id: request for request in self._unfinished()}
        told = self._table.stories.find(name, identity, (request.record() for request in live.values()))
        return [
            story.describe("ended" if story.ended is not None else self._state(live[story.id])[0], unix)
            for story in told
        ]

    def find(self, identity: Identity, name: str) -> list[InFlight]:
        """Return the unfinished requests that a name means: ``12-3``, or a trace id, which several requests may have.

        Raises RequestError if there is none that ``identity`` may see, and WireError if ``identity`` may cancel none.
        """
        named = [request for request in self._unfinished() if name == request.id or name in request.route.trace_ids]
        visible = [request for request in named if _is_visible(identity, request)]
        if not visible:
            raise RequestError(f"no request {name[:128]!r} is unfinished: it has ended, or never was", field="id")
        found = [request for request in visible if may_cancel(identity, request.owner)]
        if not found:
            text = f"request {name[:128]} is another key's: cancelling it takes the right admin"
            raise WireError(ErrorCode.FORBIDDEN, text, field="id")
        return found

    def count_by_party(self) -> Counter[int]:
        """Return how many unfinished requests each party has, see ``InFlight``."""
        return Counter(request.party for request in self._unfinished())

    def counted_in(self) -> set[int]:
        """Return the places of the counters to which unfinished requests add their tokens."""
        return {request.usage_place for request in self._unfinished()}

    def _unfinished(self) -> Iterator[InFlight]:
        return (request for request in self._table.live.values() if request.phase is not RequestPhase.ENDED)

    def _describe_one(self, request: InFlight, shown: Callable[[str], str | None], now: float) -> dict[str, Any]:
        state, has_worker = self._state(request)
        position = self._table.queues[request.model].position(request) if state == "queued" else None
        worker = shown(request.worker) if has_worker else None
        return {
            "id": request.id,
            "model": request.model,
            "worker": worker,
            "key": request.owner.name,
            "state": state,
            "queue_position": position,
            "age_ms": int(1000 * (now - request.accepted)),
            "prompt_tokens": request.prompt_tokens,
            "prompt_tokens_estimate": request.cost,
            "tokens": request.tokens,
            "priority": request.route.priority,
        }

    def _state(self, request: InFlight) -> tuple[str, bool]:
        """Return (the state of an unfinished request, whether a worker has it)."""
        if request.key in self._table.queues[request.model].parked:
            return "parked", False
        if request.phase is RequestPhase.WAITING:
            return "queued", False
        if request.phase is RequestPhase.HELD:
            return "delivering", False
        if request.cancelled:
            return "cancelling", True
        return "queued" if request in self._table.slot_of(request.worker).ahead else "running", True


def _is_visible(identity: Identity, request: InFlight) -> bool:
    """Return whether an identity may know of a request: of its owner, and of its model."""
    return may_see(identity, request.owner) and identity.may_use(request.model)
