"""The routes of the page: its files, sign-in, and live updates. For the rest it asks as scripts do."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of
from gateway.http.errors import ApiError
from gateway.http.event_stream import EventStream, StreamedAnswer
from gateway.http.sessions import check_own_script
from gateway.page.live import Live

STATIC: Final = Path(__file__).parent / "static"
PAGES: Final = {"/": "index.html", "/docs": "api.html"}
"""The documents. Every other file is at `/static/` and its place in the directory."""
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
MOST_ORDER_BYTES: Final = 4096


def page_routes() -> list[BaseRoute]:
    """Return the routes."""
    files = [path for path in STATIC.rglob("*") if path.suffix in TYPES and path.name not in PAGES.values()]
    return [
        *(Route(path, partial(_file, STATIC / name)) for path, name in PAGES.items()),
        *(Route(f"/static/{path.relative_to(STATIC)}", partial(_file, path)) for path in files),
        Route("/page/sign-in", sign_in, methods=["POST"]),
        Route("/page/sign-out", sign_out, methods=["POST"]),
        Route("/page/events", events),
    ]


async def _file(path: Path, request: Request) -> Response:
    """Answer with a file, or with 304 if the browser has it."""
    content = path.read_bytes()
    headers = HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


async def sign_in(request: Request) -> Response:
    """Exchange a token for a session. The supervisor is asked whether it knows the token.

    The answer holds the half of the session that the page keeps, and sets the cookie, which is the other half.
    """
    check_own_script(request)
    state = request.app.state
    body = await read_json(request, MOST_ORDER_BYTES, None)
    token = body.get("token")
    if not isinstance(token, str) or not token.strip():
        raise ApiError(400, "token must be a text", param="token")
    caller = Caller.of_token(token.strip())
    await state.link.call(caller, "models")  # raises the supervisor's refusal
    assert caller.key_id is not None
    kept, cookie = state.sessions.begin(request, caller.key_id)
    answer = orjson.dumps({"session": kept})
    response = Response(answer, media_type="application/json", headers={"cache-control": "no-store"})
    response.set_cookie(**cookie)
    return response


async def sign_out(request: Request) -> Response:
    """End the session, at the server and in this browser."""
    check_own_script(request)
    response = Response(status_code=204, headers={"cache-control": "no-store"})
    request.app.state.sessions.end(request, response)
    request.app.state.live.check_sessions()
    return response


async def events(request: Request) -> StreamedAnswer:
    """Server-sent events: ``picture`` is all that the page shows, ``change`` the parts that have changed."""
    live: Live = request.app.state.live
    caller = caller_of(request)
    await request.app.state.link.call(caller, "models")  # raises the supervisor's refusal

    async def produce(stream: EventStream) -> None:
        await live.send_to(caller, stream)

    return StreamedAnswer(produce)
