"""The routes of the page: its files, sign-in, and live updates. For the rest it asks as scripts do."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.http.answers import EventStream, StreamedAnswer
from gateway.http.body import read_json
from gateway.http.callers import Caller, Sessions, caller_of, check_own_script
from gateway.http.errors import FAULT, ApiError, for_caller, invalid
from gateway.supervisor_link import SupervisorLink
from protocol.errors import ErrorCode, WireError

# What the page shows, kept up to date by server-sent events.
#
# The supervisor is asked once a second for all open pages with the same key together, and only while a page is open. A
# page gets the whole picture first, and then only what has changed: parts, values of a worker, and new events. Each
# picture and each change is encoded once for all pages.


log = logging.getLogger(__name__)
EVERY_S: Final = 1.0
QUIET_S: Final = 10.0
"""Seconds after which a page gets a comment if nothing has changed, so that proxies keep the connection."""
KEPT_CHANGES: Final = 8
"""Changes that are kept for pages that read slowly. A page that has missed more gets the whole picture."""
MOST_PAGES: Final = 512
"""Open pages of one key at one process: more than people open. Sending them a change of 2.5 KB takes 10 ms, and other
requests wait meanwhile."""
VOLATILE: Final = frozenset(
    {
        "state_s",
        "beat_s",
        "phase",
        "idle_s",
        "until_s",
        "uptime_s",
        "held_bytes",
        "counters",
        "vram_returned_ms",
        "cluster",
    }
)
"""Values that change all the time. They would make every picture a new one. Where a page needs one of them, the picture
has a time since 1970 in its place."""
ONLY_WHOLE: Final = "speeds"
"""The part of a picture that changes never have: by worker, its tokens/s in each of the last seconds. It moves on by
one value a second, which a page appends itself."""
SPEEDS: Final = 120
"""The seconds that it covers."""
SHOWN_STATS: Final = frozenset({"prompt_tokens", "cached_tokens"})
"""The engines' figures that are shown."""

Picture = dict[str, Any]


class Screen:
    """The picture that all open pages of one key show.

    pages    number of the open pages
    picture  the newest picture
    number   its number; 0 before the first one
    """

    def __init__(self) -> None:
        self.pages = 0
        self.picture: Picture = {}
        self.number = 0
        self._changes: deque[bytes] = deque(maxlen=KEPT_CHANGES)
        """The changes that led to the newest pictures, the last one to ``picture``. All are encoded."""
        self._whole: bytes | None = None
        """The encoded picture, once a page has needed it."""
        self._news = asyncio.Event()

    def show(self, picture: Picture) -> None:
        """Take a new picture, and wake the pages if it differs from the one before."""
        before, self.picture, self._whole = self.picture, picture, None
        changed = _changes(before, picture)
        if not changed:
            return
        if "trouble" in before:
            self._changes.clear()  # the speeds of the time in between are in a whole picture only
        elif self.number:
            self._changes.append(_event(b"change", changed))
        self.number += 1
        self.wake()

    def wake(self) -> None:
        """Wake the pages that wait for news."""
        self._news.set()
        self._news.clear()

    def since(self, seen: int) -> bytes:
        """Return the events for a page that has seen the picture of this number; 0: none."""
        missed = self.number - seen
        if seen and missed <= len(self._changes):
            return b"".join(list(self._changes)[-missed:])
        if self._whole is None:
            self._whole = _event(b"picture", self.picture)
        return self._whole

    async def wait(self) -> bool:
        """Wait until the pages are woken. Return False if that takes longer than QUIET_S.

        asyncio.wait_for of Python 3.11 must not be used here. It swallows a cancellation that comes together with
        news, and the task of a page that was closed then ran for ever.
        """
        try:
            async with asyncio.timeout(QUIET_S):
                await self._news.wait()
        except TimeoutError:
            return False
        return True


class Live:
    """The open pages, and one task for each key that asks the supervisor."""

    def __init__(self, link: SupervisorLink, auth: str, sessions: Sessions) -> None:
        self._link = link
        self._auth = auth
        self._sessions = sessions
        self._closed = False
        self._screens: dict[str | None, Screen] = {}
        """By key, what its pages show. There is a screen for each key with an open page, and no other."""
        self._tasks: dict[str | None, asyncio.Task[None]] = {}

    async def send_to(self, caller: Caller, stream: EventStream) -> None:
        """Send news to one open page until the task is cancelled, which happens when the page is closed.

        Raises ApiError if the key has too many open pages, and when the session or the gateway ends.
        """
        key, seen = caller.key_id, 0
        screen = self._screen(caller)
        screen.pages += 1
        try:
            while not self._closed:
                if caller.session is not None and self._sessions.is_over(caller.session):
                    raise ApiError(401, "this session has ended: sign in again", code="unauthorized")
                if seen != screen.number:
                    news = screen.since(seen)
                    seen = screen.number
                    await stream.send(news)
                elif not await screen.wait():
                    await stream.send(b": nothing new\n\n")
            raise ApiError(503, "the gateway is ending: connect anew", code="overloaded", retry=True)
        finally:
            screen.pages -= 1
            if not screen.pages:
                del self._screens[key]
                self._tasks.pop(key).cancel()

    def close(self) -> None:
        """End the news to all open pages. A page connects anew, perhaps to another process."""
        self._closed = True
        self.check_sessions()

    def check_sessions(self) -> None:
        """End the news to pages whose session has ended."""
        for screen in self._screens.values():
            screen.wake()

    def _screen(self, caller: Caller) -> Screen:
        """Return the screen of a key. Raises ApiError if no more pages may be open."""
        screen = self._screens.get(caller.key_id)
        if screen is None:
            screen = self._screens[caller.key_id] = Screen()
            self._tasks[caller.key_id] = asyncio.create_task(self._ask(caller, screen))
        elif screen.pages >= MOST_PAGES:
            whose = "" if caller.key_id is None else " of this key"
            raise ApiError(
                429,
                f"{MOST_PAGES} pages{whose} are open, which is the limit of a process of the gateway: close some",
                code="overloaded",
                retry=True,
            )
        return screen

    async def _ask(self, caller: Caller, screen: Screen) -> None:
        """Ask the supervisor for pictures until cancelled."""
        after = 0
        while True:
            begun = time.monotonic()
            try:
                picture, after = await take_picture(self._link, caller, screen.picture, after)
            except Exception as e:
                # Whatever goes wrong, the pages say so. Without this task they would show the last picture for ever.
                if not isinstance(e, ApiError | WireError):
                    log.exception("no picture for the page")
                after = 0
                picture = {"trouble": for_caller(e if isinstance(e, ApiError | WireError) else FAULT).message}
            screen.show(picture | {"auth": self._auth, "key": (caller.key_id or "")[:16]})
            await asyncio.sleep(max(0.1, EVERY_S - (time.monotonic() - begun)))


def _changes(before: Picture, after: Picture) -> Picture:
    """Return the parts that differ. A part that is gone is null.

    Of a worker that both pictures have, it returns the values that differ. Of events of the same session it returns the
    new ones.
    """
    changed = _differing(before, after)
    changed.pop(ONLY_WHOLE, None)
    for name, value in changed.items():
        old = before.get(name)
        if name.startswith("model ") and value and old:
            changed[name] = _differing(old, value)
        elif name == "events" and value and old and "session" not in changed:
            changed[name] = [event for event in value if event["number"] > old[-1]["number"]]
    return changed


def _differing(before: Picture, after: Picture) -> Picture:
    return {name: after.get(name) for name in after | before if before.get(name) != after.get(name)}


def _event(name: bytes, content: Picture) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, orjson.dumps(content))


async def take_picture(link: SupervisorLink, caller: Caller, before: Picture, after: int) -> tuple[Picture, int]:
    """Return what the page shows now, and the number of the newest event in it. Raises WireError, ApiError.

    before  the picture before this one
    after   the number of the newest event in it; 0 for none

    A key without the rights ``status`` and ``admin`` sees the names, states and descriptions of the models, and its own
    requests.
    """
    listed = await link.call(caller, "requests")
    picture: Picture = {"requests": listed["requests"], "requests_total": listed["total"]}
    try:
        status = await link.call(caller, "status", **({} if after else {"history": True}))
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
        models = (await link.call(caller, "models"))["models"]
        for model in models:
            picture[f"model {model['name']}"] = model | {"model": model["name"]}
        picture["order"] = [model["name"] for model in models]
        return picture, 0
    picture["order"] = [worker["name"] for worker in status["models"]]
    speeds = picture[ONLY_WHOLE] = {}
    for worker in status["models"]:
        name = worker["name"]
        if (told := worker.pop("speeds", None)) is None:
            told = [*before.get(ONLY_WHOLE, {}).get(name, ()), worker["tokens_per_s"]][-SPEEDS:]
        speeds[name] = told
        picture[f"model {name}"] = _shown(worker, before.get(f"model {name}", {}))
    picture["gpus"] = [gpu | {"power_watts": _rounded(gpu["power_watts"])} for gpu in status["gpus"]]
    supervisor = status["supervisor"]
    started = _at(-supervisor["uptime_s"], before.get("supervisor", {}).get("started"))
    picture["supervisor"] = _steady(supervisor) | {"started": started}
    picture["admin"] = "admin" in status["rights"]
    news = await link.call(caller, "events", after=after, limit=100) if after else await link.call(caller, "events")
    picture["events"] = [*before.get("events", []), *news["events"]][-100:] if after else news["events"]
    if news["session"] != before.get("session") and after:
        news = await link.call(caller, "events")
        picture["events"] = news["events"]
    picture["session"] = news["session"]
    return picture, int(news["last"])


def _steady(described: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name not in VOLATILE}


def _shown(worker: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return what a picture holds of a worker, which the picture before showed as ``before``."""
    idle_s, until_s = worker["idle_s"], worker["until_s"]
    return _steady(worker) | {
        "engine_stats": {name: value for name, value in worker["engine_stats"].items() if name in SHOWN_STATS},
        "since": _at(-worker["state_s"], before.get("since")),
        "idle_since": None if idle_s is None else _at(-idle_s, before.get("idle_since")),
        "until": None if until_s is None else _at(until_s, before.get("until")),
    }


def _at(in_s: float, before: int | None) -> int:
    """Return a time from now in seconds since 1970. A second more or less than ``before`` is no change."""
    at = round(time.time() + in_s)
    return before if before is not None and abs(before - at) < 2 else at


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


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
        raise invalid("token", "must be a text")
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
