"""Keep the items of responses in memory, for clients that refer to them instead of sending them again.

Nothing is written to a disk, and nothing outlives the process. What is kept belongs to the caller's key. Times and
sizes are bounded, and the oldest goes first.
"""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import orjson

from gateway.http.body import BodyMemory
from gateway.http.errors import ApiError
from protocol.process.gateway_settings import GatewaySettings

LIFETIME_S: Final = 3600.0
"""Seconds for which an item is kept at most."""
SHARES: Final = 8
"""One key may have the eighth part of all that is kept: 16 MiB of 128 MiB."""
OVERHEAD: Final = 512
"""Bytes that an entry takes besides its JSON."""


class _Entry(NamedTuple):
    data: bytes
    made_at: float

    @property
    def size(self) -> int:
        return len(self.data) + OVERHEAD


class StoredItems:
    """What is kept for all callers.

    most    most bytes together; 0 keeps nothing
    share   most bytes of one owner
    longest most bytes of one request's input with all that it refers to
    bodies  the memory of the bodies that are being read. Together with them, what is kept never takes more than
            ``bodies.most``: it gives way
    clock   seconds that only grow
    """

    def __init__(
        self, most: int, share: int, longest: int, bodies: BodyMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._share, self._longest, self._bodies, self._clock = most, share, longest, bodies, clock
        self._owned: dict[str | None, dict[str, _Entry]] = {}
        """The entries of each owner by their ids, the oldest first."""
        self._sizes: dict[str | None, int] = {}
        self._size = 0
        bodies.makes_room = self.shrink

    @classmethod
    def of(cls, settings: GatewaySettings, bodies: BodyMemory) -> "StoredItems":
        """Return what a process with these settings keeps. With ``auth: none``, all callers are one owner."""
        most = settings.stored_items
        return cls(most, most if settings.auth == "none" else most // SHARES, settings.max_body, bodies)

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return self._size

    def input_of(self, owner: str | None, body: dict[str, Any]) -> Any:
        """Return the ``input`` of a request with the items that it refers to in the places of the references.

        With ``previous_response_id``, the input and the output of that response come first. Raises ApiError 404 for
        what is not kept, whatever the reason is, and 413 if there would be too much of it.
        """
        given, previous = body.get("input"), body.get("previous_response_id")
        found: list[Any] = []
        size = 0
        if previous:
            entry = self._entry(owner, previous, "previous_response_id")
            size = self._within(len(entry.data), "previous_response_id")
            found = orjson.loads(entry.data)
        elif not isinstance(given, list):
            return given
        for i, item in enumerate([_message(given)] if isinstance(given, str) else given or ()):
            if not _is_reference(item):
                found.append(item)
                continue
            entry = self._entry(owner, item.get("id"), f"input[{i}]")
            size = self._within(size + len(entry.data), f"input[{i}]")
            found.append(orjson.loads(entry.data))
        return found

    def keep(self, owner: str | None, given: Any, response: dict[str, Any]) -> None:
        """Keep a complete response, and each item of its output.

        given     the request's ``input``, as ``input_of`` has returned it
        response  the response
        """
        if not self._most:
            return
        output = response["output"]
        for item in output:
            self._put(owner, item["id"], item)
        asked = [_message(given)] if isinstance(given, str) else given
        self._put(owner, response["id"], [*asked, *output])

    def shrink(self, size: int) -> None:
        """Drop the oldest entries until at most so many bytes are kept."""
        while self._size > max(0, size):
            owner = min(self._owned, key=lambda one: next(iter(self._owned[one].values())).made_at)
            self._drop(owner, next(iter(self._owned[owner])))

    def _within(self, size: int, place: str) -> int:
        if size > self._longest:
            raise ApiError(
                413, f"what the request refers to has more than {self._longest} bytes: send fewer items, themselves",
                code="too_large", param=place,
            )  # fmt: skip
        return size

    def _put(self, owner: str | None, name: str, what: Any) -> None:
        now = self._clock()
        entry = _Entry(orjson.dumps(what), now)
        self._expire(now)
        most = max(0, min(self._most, self._bodies.most - self._bodies.held.total()))
        if entry.size > min(self._share, most):
            return
        mine = self._owned.get(owner, {})
        while mine and self._sizes[owner] + entry.size > self._share:
            self._drop(owner, next(iter(mine)))
        self.shrink(most - entry.size)
        self._owned.setdefault(owner, {})[name] = entry
        self._sizes[owner] = self._sizes.get(owner, 0) + entry.size
        self._size += entry.size

    def _entry(self, owner: str | None, name: Any, place: str) -> _Entry:
        self._expire(self._clock())
        entry = self._owned.get(owner, {}).get(name) if isinstance(name, str) else None
        if entry is None:
            raise ApiError(
                404, f"{place} refers to something that is not kept here, or is not kept any more: send the items "
                "themselves (many clients do so with the option store: false)", code="not_found", param=place,
            )  # fmt: skip
        return entry

    def _expire(self, now: float) -> None:
        """Drop the entries that are too old. The oldest of each owner comes first."""
        for owner in list(self._owned):
            mine = self._owned[owner]
            while mine and now - next(iter(mine.values())).made_at > LIFETIME_S:
                self._drop(owner, next(iter(mine)))

    def _drop(self, owner: str | None, name: str) -> None:
        mine = self._owned[owner]
        size = mine.pop(name).size
        self._size -= size
        self._sizes[owner] -= size
        if not mine:
            del self._owned[owner], self._sizes[owner]


def _is_reference(item: Any) -> bool:
    """Return whether an item only names another one. Its type may be left out."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or ("type" not in item and "role" not in item and "id" in item)


def _message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}
