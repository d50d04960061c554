"""Read the body of a request, up to a limit, and parse it as a JSON object."""

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from gateway.http.errors import ApiError


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Return the JSON object in the body of a request.

    limit  most bytes of the body

    Raises ApiError for a body that is too large, or is no JSON object; ClientDisconnect if the client leaves.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    try:
        body = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as e:  # its text says what and where, and quotes nothing of the body
        raise ApiError(400, f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes: send less", code="too_large")


__all__ = ["ClientDisconnect", "read_json"]
