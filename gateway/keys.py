"""The keys of clients over HTTP, for administrators: make, change and revoke them.

The gateway has no access to the list. It asks the supervisor, which checks that the caller's key has the right
``admin``. Without keys every program of this machine would have that right, and could make itself a key that lasts. So
with ``auth: none`` these endpoints are off.
"""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of_order, check_keys
from gateway.http.errors import ApiError
from gateway.orders import answer_json
from protocol.errors import ErrorCode, WireError
from protocol.verbs import KeyFields

MOST_BYTES: Final = 16_384
_OFF: Final = "keys over HTTP"
FIELDS: Final = tuple(KeyFields.__annotations__)


async def make_key(request: Request) -> Response:
    """POST /v1/keys: make a key. This answer alone has its token."""
    check_keys(request, _OFF)
    caller = caller_of_order(request)
    body = await _fields(request, caller, ("name", *FIELDS))
    return answer_json(await request.app.state.link.call(caller, "new_key", **body))


async def change_key(request: Request) -> Response:
    """PATCH /v1/keys/{name}: change the rights and limits that the body names."""
    check_keys(request, _OFF)
    caller = caller_of_order(request)
    return answer_json(await _of_named(request, caller, "set_key", await _fields(request, caller, FIELDS)))


async def revoke_key(request: Request) -> Response:
    """DELETE /v1/keys/{name}: take a key off the list."""
    check_keys(request, _OFF)
    caller = caller_of_order(request)
    await _of_named(request, caller, "revoke_key", {})
    return answer_json({"revoked": request.path_params["name"]})


async def _fields(request: Request, caller: Caller, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of an order. Raises ApiError for an unknown key."""
    body = await read_json(request, MOST_BYTES, caller)
    if unknown := sorted(set(body) - set(known)):
        name = unknown[0][:32]
        raise ApiError(400, f"unknown parameter {name!r}: known are {', '.join(known)}", param=name)
    return body


async def _of_named(request: Request, caller: Caller, verb: str, params: dict[str, Any]) -> dict[str, Any]:
    """Give an order for the key that the path names."""
    name = request.path_params["name"]
    try:
        reply: dict[str, Any] = await request.app.state.link.call(caller, verb, name=name, **params)
    except WireError as e:
        if e.code is ErrorCode.INVALID_REQUEST and e.field == "name":
            raise ApiError(404, e.message, param="name", code="not_found") from None
        raise
    return reply
