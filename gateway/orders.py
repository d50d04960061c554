"""The verbs of CALL over HTTP, for scripts and for the page; and the names that TabbyAPI and llama-swap have for some.

``protocol.verbs`` has the endpoints of each verb. The supervisor checks the rights of the caller's key. Without keys
every program of this machine would have the right ``admin``, and could make itself a key that lasts. So with
``auth: none`` the verbs are off that an entry there names so.

Whatever changes something takes no GET, because any web page can make a browser send a GET. A POST from a page of
another origin is refused by ``http.cors``, and a foreign name of this host by ``http.host_check``.
"""

import resource
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, Final, Protocol, get_type_hints

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of, caller_of_order, check_keys
from gateway.http.errors import ApiError, checked, invalid
from gateway.openai.models import default_model, listed
from protocol.errors import ErrorCode, WireError
from protocol.names import means, unknown_among
from protocol.verbs import VERBS

_NO_OPTIONS: Final = ("reload",)
"""Orders that take no options over HTTP."""
_HINTS: Final = {"cancel_request": "a cancel takes none"}
_NO_HINT: Final = "models.yaml says how a model is loaded"
"""What an error says to do about an option of an order that takes none."""
_ANSWERS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "cancel_request": lambda path: {"id": path["id"], "cancelled": True},
    "revoke_key": lambda path: {"revoked": path["name"]},
}
"""The answers to orders whose replies are empty. ``path``: the parameters in the path."""
NAMES: Final = ("model_name", "name", "model")
"""The keys that name the model in a body: TabbyAPI's word, its older word, and OpenAI's."""
MOST_ORDER_BYTES: Final = 16_384
RUNNING: Final = {
    "ready": "ready", "starting": "starting", "loading": "starting", "waking": "starting", "backoff": "starting",
    "draining": "stopping", "stopping": "stopping", "falling_asleep": "sleeping", "asleep": "sleeping",
}  # fmt: skip
"""llama-swap's word for the state of a model that has a process. A model in another state has none."""

_CONFLICTS: Final = (ErrorCode.MODEL_NOT_RUNNING, ErrorCode.MODEL_FAILED)
"""Errors of an order that the state of its model does not allow."""

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


async def ask(name: str, request: Request) -> Response:
    """GET of a verb that changes nothing."""
    verb = VERBS[name]
    if verb.off:
        check_keys(request, verb.off)
    caller = caller_of(request)
    reply = await request.app.state.link.call(caller, name, **_query(request, options_of(name)))
    return answer_json({"object": name, **reply})


async def order(name: str, request: Request) -> Response:
    """POST, PATCH or DELETE of a verb. The path names what the order is for, and the body has the options."""
    verb, path = VERBS[name], request.path_params
    if verb.off:
        check_keys(request, verb.off)
    caller = caller_of_order(request)
    body = await _body(request, caller, options_of(name, path), _HINTS.get(name, _NO_HINT))
    if "model" in path:
        return await _give(request, caller, name, path["model"], body)
    try:
        reply = await request.app.state.link.call(caller, name, **path, **body)
    except WireError as e:
        if e.code is ErrorCode.INVALID_REQUEST and e.field in path:
            raise ApiError(404, e.message, param=e.field, code="not_found") from None
        raise
    return answer_json(_ANSWERS[name](path) if name in _ANSWERS else reply)


def options_of(name: str, path: Collection[str] = ()) -> dict[str, type]:
    """Return the parameters of a verb that a query or a body may have, with their types.

    path  the parameters in the path
    """
    known, hints = [] if name in _NO_OPTIONS else VERBS[name].known, _hints(VERBS[name].params)
    return {key: hints[key] for key in known if key not in path and hints[key] is not float}


@cache
def _hints(params: type) -> dict[str, type]:
    return get_type_hints(params)


async def load_named(request: Request) -> Response:
    """POST /v1/model/load: load the model that the body names, or the default model, as TabbyAPI does."""
    caller = caller_of_order(request)
    name = await default_model(request, _name_in(await _body(request, caller, NAMES)))
    if not name:
        raise invalid("model_name", "is missing: name a model, or set default_model")
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


def _routes() -> tuple[tuple[str, str, Endpoint], ...]:
    """Return (method, path after /v1, endpoint). They go before the route for every name of a model."""
    found: dict[tuple[str, str], Endpoint] = {}
    for name, verb in VERBS.items():
        for endpoint in filter(None, verb.http.split(", ")):
            method, _, path = endpoint.partition(" ")
            for part in ("model", "id"):  # may have a slash
                path = path.replace(f"{{{part}}}", f"{{{part}:path}}")
            found[method, path] = partial(ask if method == "GET" else order, name)
    found |= {("POST", "/model/load"): load_named}
    found |= {("POST", path): unload_named for path in ("/model/unload", "/unload")}
    others = {("GET", path): use_post for method, path in found if method == "POST" and ("GET", path) not in found}
    found |= others | {("GET", "/running"): running}
    return tuple((method, path, endpoint) for (method, path), endpoint in found.items())


ROUTES: Final = _routes()


async def _body(request: Request, caller: Caller, known: Collection[str], hint: str = _NO_HINT) -> dict[str, Any]:
    """Return the body of an order, which may be empty. Raises ApiError for an unknown key.

    hint  says in the error what to do, if no key is known
    """
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    body = await read_json(request, MOST_ORDER_BYTES, caller)
    if unknown := sorted(set(body) - set(known)):
        are = "is" if len(known) == 1 else "are"
        why = f"known {are} {', '.join(known)}" if known and known is not NAMES else hint
        message = f"unknown parameter {unknown[0][:32]!r}: {why}"
        raise ApiError(400, message, param=unknown[0][:32])
    return body


def _query(request: Request, known: Mapping[str, type]) -> dict[str, Any]:
    """Return the parameters of the query. Raises ApiError for an unknown one, for one that occurs twice, and for text
    in place of a number."""
    given = request.query_params
    params: dict[str, Any] = dict(given)
    if unknown := sorted(set(params) - set(known)):
        name = unknown[0][:64]
        raise ApiError(400, f"unknown parameter {name!r}: known are {', '.join(known)}", param=name)
    for name, value in params.items():
        if len(given.getlist(name)) > 1:
            raise invalid(name, "occurs twice in the query: send it once")
        if known[name] is int:
            if not (value.isascii() and value.isdecimal() and len(value) < 20):
                raise invalid(name, f"is {value[:64]!r}: must be a whole number, 0 or more")
            params[name] = int(value)
        elif known[name] is bool:
            if value not in ("true", "false"):
                raise invalid(name, f"is {value[:64]!r}: must be true or false")
            params[name] = value == "true"
    return params


def _name_in(body: dict[str, Any]) -> str:
    for key in NAMES:
        if (name := body.get(key)) is not None:
            return checked(key, name, str, "a text")
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


# Decide which connections may exist, and which one makes way for a newcomer.
#
# Nobody needs a token to open a connection. So a client could hold all of them: with no TLS handshake, with half a
# request, or with answers that it does not read. Therefore each connection counts from the moment at which it is
# accepted, and at the limit the gateway ends the connection that it has waited for longest.


MOST_CONNECTIONS: Final = 8192
"""Most connections of one process."""
SPARE: Final = 64
"""Descriptors for other things than connections: sockets to the supervisor, the log, files that are read, and
connections that make way and are not closed yet."""


class Guest(Protocol):
    """A connection, as ``Places`` knows it."""

    def make_way(self) -> None:
        """End now. Whatever was not sent is lost."""


class Places:
    """The places for the connections of a process. Pure.

    most     connections that there may be
    made_way, refused  connections that made way for newcomers, and newcomers that found no place
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.made_way = self.refused = 0
        self._taken: set[Guest] = set()
        # The ones that the gateway waits for, in the order of their last sign of life. An idle connection of a client
        # that has been served is worth more than one that never sent a whole request.
        self._strangers: dict[Guest, None] = {}
        self._waited_for: dict[Guest, None] = {}

    def enter(self, guest: Guest) -> bool:
        """Give a new connection a place, and have another make way if there is none. Return whether it has a place."""
        if len(self._taken) >= self.most:
            waiting = self._strangers or self._waited_for
            if not waiting:
                self.refused += 1
                return False
            oldest = next(iter(waiting))
            self.leave(oldest)
            self.made_way += 1
            oldest.make_way()
        self._taken.add(guest)
        self._strangers[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        """Note that a connection has ended."""
        self._taken.discard(guest)
        self._strangers.pop(guest, None)
        self._waited_for.pop(guest, None)

    def wait_for(self, guest: Guest) -> None:
        """Note that a connection showed life, and that the gateway waits for its client again."""
        if guest in self._strangers:
            self._strangers[guest] = self._strangers.pop(guest)
        elif guest in self._taken:
            self._waited_for.pop(guest, None)
            self._waited_for[guest] = None

    def serve(self, guest: Guest) -> None:
        """Note that a connection has brought a whole request, and that its client waits for the gateway."""
        self._strangers.pop(guest, None)
        self._waited_for.pop(guest, None)


def connection_limit() -> int:
    """Return the number of connections that this process may have. Raise its limit of descriptors for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - SPARE)
    return MOST_CONNECTIONS
