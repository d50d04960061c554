"""GET /v1/usage: the tokens of the caller's key by day and model; with the right status or admin, those of all keys."""

from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import caller_of
from gateway.http.errors import ApiError

_KEYS: Final = ("key", "model", "since")


async def usage(request: Request) -> Response:
    """Answer for clients, and for the page."""
    params = dict(request.query_params)
    if unknown := sorted(set(params) - set(_KEYS)):
        raise ApiError(
            400, f"unknown parameter {unknown[0][:64]!r}: known are {', '.join(_KEYS)}", param=unknown[0][:64]
        )
    reply = await request.app.state.link.call(caller_of(request), "usage", **params)
    return Response(
        orjson.dumps({"object": "usage", **reply}), media_type="application/json", headers={"cache-control": "no-store"}
    )
