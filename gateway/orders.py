"""Orders for models over HTTP, for scripts and for programs that know TabbyAPI or llama-swap.

Whatever changes something takes POST only, because any web page can make a browser send a GET. A POST from a page of
another origin is refused by ``http.cors``, and a foreign name of this host by ``http.host_check``. The supervisor
checks that the key has the right ``admin``.
"""

import shlex
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of_order
from gateway.http.errors import ApiError
from gateway.openai.models import default_model, listed
from protocol.client.model_names import means, unknown_among
from protocol.errors import ErrorCode, WireError

VERBS: Final = {
    "load": "start", "unload": "unload", "reload": "reload", "sleep": "sleep", "wake": "wake", "stop": "stop",
    "restart": "restart",
}  # fmt: skip
"""The end of the path → the verb of CALL."""
OPTIONS: Final[dict[str, tuple[str, ...]]] = {"stop": ("now",)}
"""The verbs that take options in the body, by their names there and in CALL."""
NAMES: Final = ("model_name", "name", "model")
"""The keys that name the model in a body: TabbyAPI's word, its older word, and OpenAI's."""
MOST_BYTES: Final = 4096
RUNNING: Final = {
    "ready": "ready", "starting": "starting", "loading": "starting", "waking": "starting", "backoff": "starting",
    "draining": "stopping", "stopping": "stopping", "falling_asleep": "sleeping", "asleep": "sleeping",
}  # fmt: skip
"""llama-swap's word for the state of a model that has a process. A model in another state has none."""

_CONFLICTS: Final = (ErrorCode.MODEL_NOT_RUNNING, ErrorCode.MODEL_FAILED)
"""Errors of an order that the state of its model does not allow."""

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


async def order(verb: str, request: Request) -> Response:
    """POST /v1/models/{name}/VERB."""
    caller = caller_of_order(request)
    options = await _body(request, caller, OPTIONS.get(verb, ()))
    return await _give(request, caller, verb, request.path_params["name"], options)


async def reload_all(request: Request) -> Response:
    """POST /v1/reload: read models.yaml again, and apply what it changes."""
    caller = caller_of_order(request)
    await _body(request, caller, ())
    return answer_json(await request.app.state.link.call(caller, "reload"))


async def cancel_request(request: Request) -> Response:
    """POST /v1/requests/{id}/cancel: the client of the request gets what was computed until then."""
    caller = caller_of_order(request)
    await _body(request, caller, (), "a cancel takes none")
    name = request.path_params["id"]
    try:
        await request.app.state.link.call(caller, "cancel_request", id=name)
    except WireError as e:
        if e.code is not ErrorCode.INVALID_REQUEST:
            raise
        raise ApiError(404, e.message, param="id", code="not_found") from None
    return answer_json({"id": name, "cancelled": True})


async def load_named(request: Request) -> Response:
    """POST /v1/model/load: load the model that the body names, or the default model, as TabbyAPI does."""
    caller = caller_of_order(request)
    name = await default_model(request, _name_in(await _body(request, caller, NAMES)))
    if not name:
        raise ApiError(400, "model_name is missing: name a model, or set default_model", param="model_name")
    return await _give(request, caller, "start", name)


async def unload_named(request: Request) -> Response:
    """POST /v1/model/unload and /unload: unload the model that the body names, else every model with a process."""
    caller = caller_of_order(request)
    if name := _name_in(await _body(request, caller, NAMES)):
        return await _give(request, caller, "unload", name)
    names = [one["name"] for one in await listed(request) if one["state"] in RUNNING]
    for name in names:
        await request.app.state.link.call(caller, "unload", model=name)
    return answer_json({"unloaded": names})


async def running(request: Request) -> Response:
    """GET /running: the models that have a process, as llama-swap lists them."""
    found = [
        {"model": one["name"], "state": RUNNING[one["state"]]}
        for one in await listed(request)
        if one["state"] in RUNNING
    ]
    return answer_json({"running": found})


async def use_post(request: Request) -> Response:
    """Refuse a GET of a path that changes something, with the line to use."""
    token = "" if request.app.state.settings.auth == "none" else " -H 'Authorization: Bearer TOKEN'"
    address = shlex.quote(str(request.url.replace(query=""))[:512])
    raise HTTPException(405, f"curl -X POST{token} {address}", {"Allow": "POST"})


def _orders() -> tuple[tuple[str, Endpoint], ...]:
    return (
        *((f"/models/{{name:path}}/{end}", partial(order, verb)) for end, verb in VERBS.items()),
        ("/requests/{id:path}/cancel", cancel_request),
        ("/reload", reload_all),
        ("/model/load", load_named),
        ("/model/unload", unload_named),
        ("/unload", unload_named),
    )


ROUTES: Final[tuple[tuple[str, str, Endpoint], ...]] = (
    *(("POST", path, endpoint) for path, endpoint in _orders()),
    *(("GET", path, use_post) for path, _ in _orders()),
    ("GET", "/running", running),
)
"""Method, path after /v1, and endpoint. They go before the route for every name of a model."""


async def _body(
    request: Request, caller: Caller, known: tuple[str, ...], hint: str = "models.yaml says how a model is loaded"
) -> dict[str, Any]:
    """Return the body of an order, which may be empty. Raises ApiError for an unknown key.

    hint  says in the error what to do, if no key is known
    """
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    body = await read_json(request, MOST_BYTES, caller)
    if unknown := sorted(set(body) - set(known)):
        why = f"known is {', '.join(known)}" if known not in ((), NAMES) else hint
        message = f"unknown parameter {unknown[0][:32]!r}: {why}"
        raise ApiError(400, message, param=unknown[0][:32])
    return body


def _name_in(body: dict[str, Any]) -> str:
    for key in NAMES:
        if (name := body.get(key)) is not None:
            if not isinstance(name, str):
                raise ApiError(400, f"{key} must be a text", param=key)
            return name
    return ""


async def _give(
    request: Request, caller: Caller, verb: str, name: str, options: dict[str, Any] | None = None
) -> Response:
    """Give an order for the model that a name means: its own name, an alias, or that of a variant."""
    known = await listed(request)
    model = next((one["name"] for one in known if means(one, name)), None)
    if model is None:
        raise unknown_among(known, name)
    try:
        reply = await request.app.state.link.call(caller, verb, model=model, **(options or {}))
    except WireError as e:
        if e.code in _CONFLICTS:  # for a request it would be 503, and a later one may be served
            raise ApiError(409, e.message, param="model", code=e.code.name.lower()) from None
        raise
    return answer_json({"model": model} | reply)


def answer_json(content: dict[str, Any]) -> Response:
    """Return an answer that no cache keeps."""
    return Response(orjson.dumps(content), media_type="application/json", headers={"cache-control": "no-store"})
