"""Read the body of a request, within limits of size, time and memory."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request

from gateway.http.callers import Caller
from gateway.http.errors import ApiError
from gateway.http.json_object import parse
from protocol.process.gateway_settings import SHARE, GatewaySettings

MOST_BYTES: Final = 256 << 20
"""Most bytes of all bodies together that a process reads at one time, where models.yaml does not say it."""
UNCHECKED_BYTES: Final = 64 << 10
"""Most bytes of a body that are read before the supervisor is asked whether it knows the token. A smaller body costs no
such question: it goes to the supervisor with its token anyway."""
PACE_BYTES: Final = 160 << 10
"""Bytes that must come in each ``GatewaySettings.body_pace_s``, unless the body ends: 16 KiB in a second."""
_UNCHECKED: Final = "unchecked"
"""Owner of the bytes that came with tokens that nobody has checked. Made-up tokens are many keys and have one share."""


@dataclass
class BodyMemory:
    """The memory of all bodies that a process is reading. Pure.

    most   most bytes together
    share  most bytes of one owner: a key's id, or ``_UNCHECKED``. With ``auth: none`` nobody can be told from anybody
           else, so all are one owner, whose share is all
    held   bytes of the unfinished bodies, by owner
    makes_room  is told how many bytes the bodies leave, whenever more of a body comes. What else takes memory gives way
    """

    most: int
    share: int
    held: Counter[str] = field(default_factory=Counter)
    makes_room: Callable[[int], None] | None = None

    @classmethod
    def of(cls, settings: GatewaySettings) -> "BodyMemory":
        """Return the memory of a process. Each share has room for the largest body, which ``modelctl check`` makes sure
        of where models.yaml gives the memory."""
        most, auth = settings.body_memory or max(MOST_BYTES, SHARE * settings.max_body), settings.auth
        return cls(most, most if auth == "none" else most // SHARE)

    def fits(self, owner: str, size: int) -> bool:
        """Return whether an owner may have so many bytes more."""
        return self.held[owner] + size <= self.share and self.held.total() + size <= self.most

    def take(self, owner: str, size: int) -> None:
        """Count bytes of a body. Raises ApiError if its owner, or all together, would have too many."""
        if not self.fits(owner, size):
            whose = "this key" if self.held[owner] + size > self.share else "others"
            raise ApiError(
                429,
                f"the gateway is reading as many bytes of other requests of {whose} as it may: try again",
                code="overloaded",
                retry=True,
            )
        self.held[owner] += size
        if self.makes_room is not None:
            self.makes_room(self.most - self.held.total())

    def give_back(self, owner: str, size: int) -> None:
        """Stop counting bytes of a body."""
        self.held[owner] -= size
        if not self.held[owner]:
            del self.held[owner]


class Pace:
    """The times in which a body must come. Pure: times are seconds of one clock.

    whole_s  seconds for the whole body
    each_s   seconds for each PACE_BYTES of it. A body that stalls holds its memory no longer than that
    """

    def __init__(self, whole_s: float, each_s: float, now: float) -> None:
        self._whole_s, self._each_s = whole_s, each_s
        self._begun = self._last = now
        self._came = 0

    def add(self, size: int, now: float) -> None:
        """Take note of bytes that have come."""
        self._came += size
        if self._came >= PACE_BYTES:
            self.restart(now)

    def restart(self, now: float) -> None:
        """Let the time for the next bytes begin."""
        self._came, self._last = 0, now

    @property
    def due(self) -> float:
        """Return when the body is too slow unless more of it has come."""
        return min(self._begun + self._whole_s, self._last + self._each_s)

    def error(self) -> ApiError:
        """Return the error of a body that is too slow."""
        wanted = f"in {self._whole_s:g} s"
        if self.due < self._begun + self._whole_s:
            wanted = f"with at least {PACE_BYTES} bytes in each {self._each_s:g} s"
        return ApiError(408, f"the body must come {wanted}: send it faster", code="too_slow")


async def read_json(request: Request, limit: int, caller: Caller | None) -> dict[str, Any]:
    """Return the JSON object in the body of a request.

    limit   most bytes of the body
    caller  the sender; None if the body itself tells who that is

    Raises ApiError for a body that is too large or too slow, or is no JSON object; WireError for a large body of a
    sender whom the supervisor does not know; ClientDisconnect if the client leaves.
    """
    check_encoding(request.headers)
    declared = request.headers.get("content-length", "0")
    if len(declared) > 19 or (declared.isdecimal() and int(declared) > limit):
        raise _too_large(limit)
    settings, loop = request.app.state.settings, asyncio.get_running_loop()
    pace = Pace(settings.body_s, settings.body_pace_s, loop.time())
    try:
        async with asyncio.timeout_at(pace.due) as deadline:
            return parse(await _read(request, limit, caller, pace, deadline))
    except TimeoutError:
        raise pace.error() from None


async def _read(request: Request, limit: int, caller: Caller | None, pace: Pace, deadline: asyncio.Timeout) -> bytes:
    """Return the whole body."""
    state, loop = request.app.state, asyncio.get_running_loop()
    memory: BodyMemory = state.bodies
    owner, key_id = _UNCHECKED, None if caller is None else caller.key_id
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            more = len(part)
            if size + more > limit:
                raise _too_large(limit)
            pace.add(more, loop.time())
            if (
                key_id is not None
                and owner != key_id
                and (size + more > UNCHECKED_BYTES or not memory.fits(owner, more))
            ):
                deadline.reschedule(None)
                await state.link.call(caller, "models")  # raises the supervisor's refusal
                memory.take(key_id, size)
                memory.give_back(owner, size)
                owner = key_id
                pace.restart(loop.time())
            memory.take(owner, more)
            size += more
            parts.append(part)
            deadline.reschedule(pace.due)
        return b"".join(parts)
    finally:
        memory.give_back(owner, size)


def check_encoding(headers: Headers) -> None:
    """Raise ApiError if the headers say that the body is compressed, or is not UTF-8."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"the header Content-Encoding is {encoding[:64]!r}: send the body uncompressed",
            code="unsupported",
            param="Content-Encoding",
        )
    for parameter in headers.get("content-type", "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in ("utf-8", "utf8", "us-ascii"):
            raise ApiError(
                415,
                f"the charset in the header Content-Type is {charset[:64]!r}: send UTF-8",
                code="unsupported",
                param="Content-Type",
            )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes: send less", code="too_large")
