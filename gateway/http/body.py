"""Read the body of a request, within limits of size, time and memory, and parse it as a JSON object."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request

from gateway.http.errors import ApiError

BODY_S: Final = 60.0
"""Seconds in which the whole body must come."""
MOST_BYTES: Final = 256 << 20
"""Most bytes of all bodies together that a process reads at one time."""
MOST_COMMAS: Final = 1_000_000
MOST_BRACKETS: Final = 250_000
"""Most commas, and most brackets and braces, of a body. They bound the values that the parser makes.

No other stream of the process goes on while the parser works, in a thread neither. Measured: a million numbers take
50 ms, 250,000 empty lists 90 ms, and the 5.5 million empty lists that fit into 16 MiB take 1.6 s. Text takes 2 ms/MiB.
"""


@dataclass
class BodyMemory:
    """The memory of all bodies that a process is reading.

    most  most bytes together
    held  bytes of the unfinished bodies
    """

    most: int = MOST_BYTES
    held: int = 0

    def take(self, size: int) -> None:
        """Count bytes of a body. Raises ApiError if the bodies together are too large."""
        if self.held + size > self.most:
            raise ApiError(
                429,
                "the gateway is reading as many bytes of other requests as it may: try again",
                code="overloaded",
                retry=True,
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Stop counting bytes of a body."""
        self.held -= size


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Return the JSON object in the body of a request.

    limit  most bytes of the body

    Raises ApiError for a body that is too large or too slow, or is no JSON object; ClientDisconnect if the client
    leaves.
    """
    check_encoding(request.headers)
    declared = request.headers.get("content-length", "0")
    if len(declared) > 19 or (declared.isdecimal() and int(declared) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s: send it faster", code="too_slow") from None
    return parse(body)


async def _read(request: Request, limit: int) -> bytes:
    """Return the whole body."""
    memory: BodyMemory = request.app.state.bodies
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            if size + len(part) > limit:
                raise _too_large(limit)
            memory.take(len(part))
            size += len(part)
            parts.append(part)
        return b"".join(parts)
    finally:
        memory.give_back(size)


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


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in bytes. Raises ApiError if there is none, or if it has too many values."""
    if len(body) > MOST_BRACKETS:
        for limit, count, what in (
            (MOST_COMMAS, body.count(b","), "commas"),
            (MOST_BRACKETS, body.count(b"[") + body.count(b"{"), "brackets and braces"),
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
    return found


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes: send less", code="too_large")
