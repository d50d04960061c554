"""Read the body of a request, within limits of size, time and memory."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Final

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from gateway.http.callers import Caller, caller_of
from gateway.http.errors import ApiError
from protocol.process.worker_spec import SHARE, GatewaySettings

# Parse the body of a request as a JSON object, within limits on its values, and refuse keys that occur twice.


MOST_COMMAS: Final = 1_000_000
MOST_BRACKETS: Final = 250_000
MOST_MARKS: Final = 500_000
"""Most commas, brackets and braces, and quotation marks of a body. They bound the values that the parser makes.

No other stream of the process goes on while the parser works, in a thread neither. Measured: a million numbers take
50 ms, 250,000 empty lists 90 ms, 900,000 keys 290 ms, and the 5.5 million empty lists that fit into 16 MiB take 1.6 s.
Text takes 3.5 ms/MiB with the search for keys that occur twice.
"""
MOST_NAMED_BYTES: Final = 1 << 20
"""Largest body that is parsed a second time, by a slower parser: to name the key that occurs twice, or because the
values are nested so deep that orjson does not write them."""

_CONTAINERS: Final = frozenset((dict, list))
_NUMBERS: Final = frozenset((int, float, bool, type(None)))
_NUMBER_BYTES: Final = 32


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in bytes. Raises ApiError if there is none, or if it has too many values."""
    if len(body) > MOST_BRACKETS:
        for limit, count, what in (
            (MOST_COMMAS, body.count(b","), "commas"),
            (MOST_BRACKETS, body.count(b"[") + body.count(b"{"), "brackets and braces"),
            (MOST_MARKS, body.count(b'"'), "quotation marks"),
        ):
            if count > limit:
                message = f"the body has {count} {what}, and {limit} are allowed: send fewer values"
                raise ApiError(413, message, code="too_large")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as e:  # its text says what and where, and quotes nothing of the body
        raise ApiError(400, f"the body is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    _check_keys(body, found)
    return found


def memory_of(value: Any) -> int:
    """Return the bytes that a parsed value takes. They are more than those of its JSON.

    A text takes up to four bytes for each character if one of its characters is beyond ASCII, and its UTF-8 besides. An
    empty object takes 64 bytes. This takes less time than the parser.
    """
    size, left = getsizeof(value), [value]
    while left:
        one = left.pop()
        inner: Collection[Any] = one
        if isinstance(one, dict):
            size += sum(map(len, one))
            inner = one.values()
        kinds = set(map(type, inner))
        if kinds <= _NUMBERS:
            size += _NUMBER_BYTES * len(inner)
            continue
        size += sum(map(getsizeof, inner))
        if not kinds.isdisjoint(_CONTAINERS):
            left += [each for each in inner if each and type(each) in _CONTAINERS]
    return size


def _check_keys(body: bytes | bytearray, found: dict[str, Any]) -> None:
    """Raise ApiError if an object in the body has a key twice. Programs differ in which of the two values they use.

    orjson keeps the last value and says nothing. Written again, the values then have fewer quotation marks than the
    body. This comparison takes 5 us for a chat of 3 KiB; a parser that reports pairs takes 10 us.
    """
    try:
        again = orjson.dumps(found)
    except orjson.JSONEncodeError:  # nested deeper than 254
        if len(body) > MOST_NAMED_BYTES:
            message = f"values are nested deeper than 254, which is for bodies of at most {MOST_NAMED_BYTES} bytes"
            raise ApiError(413, f"{message}: send fewer levels", code="too_large") from None
        _name_repeated_key(body)
        return
    marks = body.count(b'"')
    if b"\\u0022" in body:  # a quotation mark in a text. Without pairs of backslashes, only escapes are left
        marks += body.replace(b"\\\\", b"").count(b"\\u0022")
    if marks != again.count(b'"'):
        if len(body) <= MOST_NAMED_BYTES:
            _name_repeated_key(body)
        raise ApiError(400, "an object in the body has a key twice: send each key once")


def _name_repeated_key(body: bytes | bytearray) -> None:
    """Raise ApiError, with the name of a key that an object in the body has twice, if there is one."""
    try:
        json.loads(body, object_pairs_hook=_once)
    except RecursionError:
        raise ApiError(400, "values in the body are nested too deep: send fewer levels") from None


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ApiError(400, f"the key {key[:64]!r} occurs twice in one object: send it once", param=key[:64])
        seen.add(key)


MOST_BYTES: Final = 256 << 20
"""Most bytes of all bodies together that a process holds at one time, where models.yaml does not say it."""
UNCHECKED_BYTES: Final = 64 << 10
"""Most bytes of a body that are read before the supervisor is asked whether it knows the token. A smaller body costs no
such question: it goes to the supervisor with its token anyway."""
PACE_BYTES: Final = 160 << 10
"""Bytes that must come in each ``GatewaySettings.body_pace_s``, unless the body ends: 16 KiB in a second."""
BODY: Final = "gateway.body"
"""Key of the scope with the request's ``HeldBody``, once its body is being read."""
_UNCHECKED: Final = "unchecked"
"""Owner of the bytes that came with tokens that nobody has checked. Made-up tokens are many keys and have one share."""


@dataclass
class BodyMemory:
    """The memory of all bodies that a process holds. Pure.

    most   most bytes together
    share  most bytes of one owner: a key's id, or ``_UNCHECKED``. With ``auth: none`` nobody can be told from anybody
           else, so all are one owner, whose share is all
    held   bytes of the bodies, by owner
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
                f"the gateway holds as many bytes of other requests of {whose} as it may: try again",
                code="overloaded",
                retry=True,
            )
        self.count(owner, size)

    def count(self, owner: str, size: int) -> None:
        """Count bytes that are there already, however many they are. Those of later requests then have less room."""
        self.held[owner] += size
        if self.makes_room is not None:
            self.makes_room(self.most - self.held.total())

    def give_back(self, owner: str, size: int) -> None:
        """Stop counting bytes of a body."""
        self.held[owner] -= size
        if not self.held[owner]:
            del self.held[owner]


class HeldBody:
    """The memory that the body of one request takes, as it counts in ``BodyMemory``.

    The bytes of the body count as they come. Then the values count that were made of them, and then the frames that the
    supervisor has not read yet. Copies that last for one step of the process, such as those of a parser, do not count:
    there is one such step at a time.

    length  bytes of the body
    values  bytes of the values that were made of it
    """

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self._owner = memory, _UNCHECKED
        self.length = self.values = self._size = 0

    @property
    def owner(self) -> str:
        """The owner: a key's id, or ``_UNCHECKED``."""
        return self._owner

    def add(self, more: int) -> None:
        """Count bytes that have come. Raises ApiError as ``BodyMemory.take`` does."""
        self._memory.take(self._owner, more)
        self._size += more
        self.length += more

    def fits(self, more: int) -> bool:
        """Return whether the owner may have so many bytes more."""
        return self._memory.fits(self._owner, more)

    def belongs_to(self, owner: str) -> None:
        """Count the body for another owner. Raises ApiError as ``BodyMemory.take`` does."""
        self._memory.take(owner, self._size)
        self._memory.give_back(self._owner, self._size)
        self._owner = owner

    def becomes(self, size: int) -> None:
        """Count another number of bytes, because the body has become something else."""
        self._memory.give_back(self._owner, self._size)
        self._size = size
        if size:
            self._memory.count(self._owner, size)

    def sends(self, copies: int) -> None:
        """Count the frames that are about to be made of the body: one for each answer.

        Raises ApiError if there is no room for the frames of several answers.
        """
        more = copies * self.length
        if copies == 1:
            self._memory.count(self._owner, more)
        elif more > self._memory.share:
            message = f"n is {copies}, and the body has {self.length} bytes: together they must be at most"
            raise ApiError(
                413,
                f"{message} {self._memory.share} bytes: ask for fewer answers at a time",
                code="too_large",
                param="n",
            )
        else:
            self._memory.take(self._owner, more)
        self._size += more

    def sent(self, *, keeps: bool) -> None:
        """Count no frames any more, because the supervisor has read them.

        keeps  whether the values of the body are still needed
        """
        self.becomes(self.values if keeps else 0)

    def release(self) -> None:
        """Stop counting the body."""
        self.becomes(0)


def held_body(scope: Scope) -> HeldBody:
    """Return what a request's body takes. One that was not read takes nothing."""
    held: HeldBody | None = scope.get(BODY)
    return HeldBody(BodyMemory(0, 0)) if held is None else held


class BodyTimer:
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


async def caller_and_body(request: Request) -> tuple[Caller, dict[str, Any]]:
    """Return the sender of a request, and the JSON object in its body. Raises the errors of both."""
    caller = caller_of(request)
    return caller, await read_json(request, request.app.state.settings.max_body, caller)


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
    pace = BodyTimer(settings.body_s, settings.body_pace_s, loop.time())
    held = request.scope[BODY] = HeldBody(request.app.state.bodies)
    try:
        async with asyncio.timeout_at(pace.due) as deadline:
            found = parse(await _read(request, limit, caller, held, pace, deadline))
    except TimeoutError:
        raise pace.error() from None
    held.values = memory_of(found)
    held.becomes(held.values)
    return found


async def _read(
    request: Request, limit: int, caller: Caller | None, held: HeldBody, pace: BodyTimer, deadline: asyncio.Timeout
) -> bytearray:
    """Return the whole body."""
    loop, key_id = asyncio.get_running_loop(), None if caller is None else caller.key_id
    body = bytearray()
    async for part in request.stream():
        more = len(part)
        if held.length + more > limit:
            raise _too_large(limit)
        pace.add(more, loop.time())
        if (
            key_id is not None
            and held.owner != key_id
            and (held.length + more > UNCHECKED_BYTES or not held.fits(more))
        ):
            deadline.reschedule(None)
            await request.app.state.link.call(caller, "models")  # raises the supervisor's refusal
            held.belongs_to(key_id)
            pace.restart(loop.time())
        held.add(more)
        body += part
        deadline.reschedule(pace.due)
    return body


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
