"""GET /v1/requests, /v1/usage, /v1/events, /v1/logs, /v1/config and /v1/keys: what happens, models.yaml, and the keys.

Scripts and the page ask for them. The supervisor checks the rights. The requests and tokens are those of the caller's
key, and with the right status or admin those of all keys. Events take one of these two rights. Logs, models.yaml and
keys take admin.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import caller_of, check_keys
from gateway.http.errors import ApiError

_REQUESTS: Final = {"limit": int}
_ENDED: Final = {"after": int, "limit": int}
_USAGE: Final = {"key": str, "model": str, "since": str}
_EVENTS: Final = {"model": str, "after": int, "limit": int}
_LOGS: Final = {"model": str, "lines": int, "after": str}
_CONFIG: Final = {"all": bool}
_KEYS: Final = {"after": str, "limit": int}
"""The parameters of each path, which are those of its verb."""


async def requests(request: Request) -> Response:
    """GET /v1/requests: the unfinished requests."""
    return await _answer(request, "requests", _REQUESTS)


async def ended_requests(request: Request) -> Response:
    """GET /v1/requests/ended: the last requests that have ended, or those after the number ``after``."""
    return await _answer(request, "ended_requests", _ENDED)


async def usage(request: Request) -> Response:
    """GET /v1/usage."""
    return await _answer(request, "usage", _USAGE)


async def events(request: Request) -> Response:
    """GET /v1/events: the newest events, or those behind the number ``after``."""
    return await _answer(request, "events", _EVENTS)


async def logs(request: Request) -> Response:
    """GET /v1/logs: the last lines of a log, or those behind the position ``after``."""
    check_keys(request, "logs over HTTP")
    return await _answer(request, "logs", _LOGS)


async def configuration(request: Request) -> Response:
    """GET /v1/config: models.yaml, its values and faults, and what a reload would change."""
    check_keys(request, "answers about models.yaml")
    return await _answer(request, "config", _CONFIG)


async def keys(request: Request) -> Response:
    """GET /v1/keys: names, rights and limits, and no token."""
    check_keys(request, "keys over HTTP")
    return await _answer(request, "keys", _KEYS)


async def _answer(request: Request, verb: str, known: Mapping[str, type]) -> Response:
    reply = await request.app.state.link.call(caller_of(request), verb, **_parameters(request, known))
    return Response(
        orjson.dumps({"object": verb, **reply}), media_type="application/json", headers={"cache-control": "no-store"}
    )


def _parameters(request: Request, known: Mapping[str, type]) -> dict[str, Any]:
    """Return the parameters of the query. Raises ApiError for an unknown one, for one that occurs twice, and for text
    in place of a number."""
    given = request.query_params
    params: dict[str, Any] = dict(given)
    if unknown := sorted(set(params) - set(known)):
        name = unknown[0][:64]
        raise ApiError(400, f"unknown parameter {name!r}: known are {', '.join(known)}", param=name)
    for name, value in params.items():
        if len(given.getlist(name)) > 1:
            raise ApiError(400, f"{name} occurs twice in the query: send it once", param=name)
        if known[name] is int:
            if not (value.isascii() and value.isdecimal() and len(value) < 20):
                raise ApiError(400, f"{name} is {value[:64]!r}: must be a whole number, 0 or more", param=name)
            params[name] = int(value)
        elif known[name] is bool:
            if value not in ("true", "false"):
                raise ApiError(400, f"{name} is {value[:64]!r}: must be true or false", param=name)
            params[name] = value == "true"
    return params
