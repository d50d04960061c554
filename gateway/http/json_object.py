"""Parse the body of a request as a JSON object, within limits on its values, and refuse keys that occur twice."""

import json
from collections.abc import Collection
from sys import getsizeof
from typing import Any, Final

import orjson

from gateway.http.errors import ApiError

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
