"""How an answer leaves: with an id for each request, and with as few steps for each token as possible.

An error leaves in the shape of the API that its request belongs to.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from gateway.http.body import held_body
from gateway.http.callers import caller_of
from gateway.http.errors import (
    FAULT,
    ApiError,
    anthropic_body,
    anthropic_status,
    error_body,
    error_headers,
    for_caller,
    is_anthropic,
    status_of,
    without_version,
)
from protocol.client.answers import Progress
from protocol.client.stream_base import StreamBase
from protocol.errors import WireError
from protocol.presets import changed_option

# Collect what the gateway ignored in a request, and what the gateway changed, and tell the client and the operator.
#
# The readers of all three APIs fill one ``Notes`` object for each request. It becomes the headers
# ``x-modelctl-ignored`` and ``x-modelctl-changed`` of the answer, notes in the request's story, and lines in the
# gateway's log.


_log = logging.getLogger(__name__)
IGNORED: Final = "x-modelctl-ignored"
CHANGED: Final = "x-modelctl-changed"
NOTES: Final = "gateway.notes"
"""Key of the scope with the request's ``Notes``."""
MOST_NAMED: Final = 16
"""Names that one header says. Further ones are counted."""
LONGEST_CHANGE: Final = 200
"""Characters of one change that are written."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that are written. Any other name is only counted, since it could be a text of the request."""


class IgnoredLog:
    """Tells the operator which options are ignored, or what is left out: each name once a minute.

    clock  seconds that only grow
    """

    EVERY_S: Final = 60.0
    MOST: Final = 256
    """Names that are remembered. While all of them are younger than a minute, further names are not logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each name was logged last, the oldest first."""

    def tell(self, name: str, message: str = "requests have the unknown option %s, which is ignored") -> None:
        """Log a name, unless that was done less than a minute ago. ``message`` has its place."""
        now = self._clock()
        if name in self._told and now - self._told[name] < self.EVERY_S:
            return
        if name not in self._told and len(self._told) >= self.MOST:
            oldest = next(iter(self._told))
            if now - self._told[oldest] < self.EVERY_S:
                return
            del self._told[oldest]
        self._told.pop(name, None)
        self._told[name] = now
        _log.info(message, name)


_ignored_log = IgnoredLog()
_changed_log = IgnoredLog()


class Notes:
    """The notes of one request. The readers of its body fill them.

    refuse  whether unknown options are refused (``gateway.unknown_options`` of models.yaml)
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        self._ignored: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._omitted: dict[str, int] = {}
        self._streams: Sequence[StreamBase] = ()
        self._names: Mapping[str, str] = {}
        self._budget: str | None = None

    def ignore(self, name: str, param: str | None = None) -> None:
        """Note an unknown option that is ignored.

        name   the option. A key within an object has the object's name before it: ``messages.foo``
        param  where the option stands, such as ``messages[3].foo``, for the error; unset: ``name``

        Raises ApiError where unknown options are refused.
        """
        if self.refuse:
            shown = (param or name)[:128]
            raise ApiError(400, f"unknown option {shown!r}: leave it out", param=shown)
        if name not in self._ignored:
            self._ignored[name] = None
            if len(self._ignored) <= MOST_NAMED and _NAME.fullmatch(name):
                _ignored_log.tell(name)

    def change(self, what: str) -> None:
        """Note something that was cut, left out or replaced.

        what  an option (``metadata``), an option with its new value (``max_tokens=3071``), or what was
              left out of an option (``tools: web_search``). Only ``named`` texts of the request may
              stand in it
        """
        self._changed[what] = None
        _changed_log.tell(what[:LONGEST_CHANGE], "of requests this is changed or left out: %s")

    def omit(self, what: str) -> None:
        """Note that a thing was left out that has no name of its own. The things are counted: ``images: 2``."""
        self._omitted[what] = self._omitted.get(what, 0) + 1
        _changed_log.tell(what, "of requests this is changed or left out: %s")

    def watch(self, streams: Sequence[StreamBase], names: Mapping[str, str], budget: str | None = None) -> None:
        """Note also what only the worker knows, as soon as a stream tells it: that the context has cut the answers of
        these streams, that models.yaml forces the value of an option, and that a model whose reasoning is not known has
        ignored a budget for it.

        names   options that the sender calls otherwise: {our name: the sender's}
        budget  the sender's name of ``reasoning_budget``, if the request has ``budget_if_reasoning``
        """
        self._streams, self._names, self._budget = streams, names, budget

    @property
    def ignored_names(self) -> int:
        """The number of names that were ignored so far."""
        return len(self._ignored)

    @property
    def ignored(self) -> str:
        """The ignored options, in one line; empty if there are none."""
        left_out = self._budget is not None and any("reasoning_budget" in stream.left_out for stream in self._streams)
        names = [*self._ignored, *([self._budget] if left_out else [])]
        return _listed(name if name is not None and _NAME.fullmatch(name) else None for name in names)

    @property
    def changed(self) -> str:
        """The changes, in one line; empty if there are none."""
        cut = [stream.max_tokens for stream in self._streams if stream.max_tokens is not None]
        by_worker = {name: value for stream in self._streams for name, value in stream.forced.items()}
        by_worker |= {"max_tokens": min(cut)} if cut else {}
        told = (changed_option(named(self._names.get(name, name)), value) for name, value in by_worker.items())
        return _listed([*self._all_changed(), *told])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer that tell the notes."""
        told = ((IGNORED, self.ignored), (CHANGED, self.changed))
        return [(name.encode(), text.encode("ascii", "replace")) for name, text in told if text]

    def for_story(self) -> list[str]:
        """Return the notes as the request's story has them. The supervisor adds what only the worker knows."""
        named = [name for name in self._ignored if _NAME.fullmatch(name)][:MOST_NAMED]
        changed = [what[:LONGEST_CHANGE] for what in self._all_changed()][:MOST_NAMED]
        return [f"ignored {name}" for name in named] + [f"changed {what}" for what in changed]

    def _all_changed(self) -> list[str]:
        return [*self._changed, *(f"{what}: {count}" for what, count in self._omitted.items())]


def named(name: object) -> str:
    """Return a name of the request as headers and logs may have it: as it is, or else a word in its place."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "other"


def notes_of(request: Request) -> Notes:
    """Return the notes of a request. The first call makes them."""
    notes = request.scope.get(NOTES)
    if not isinstance(notes, Notes):
        refuse = request.app.state.settings.unknown_options == "refuse"
        notes = request.scope[NOTES] = Notes(refuse=refuse)
    return notes


def headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell the notes of a request."""
    notes = scope.get(NOTES)
    return notes.headers() if isinstance(notes, Notes) else []


def _listed(entries: Iterable[str | None]) -> str:
    """Return at most ``MOST_NAMED`` entries, and the number of further ones. An entry that is None only counts."""
    all_of_them = list(entries)
    shown = [each[:LONGEST_CHANGE] for each in all_of_them if each is not None][:MOST_NAMED]
    more = len(all_of_them) - len(shown)
    return ", ".join([*shown, *([f"{more} more" if shown else f"{more} of other names"] if more else [])])


DIRECT: Final = "gateway.direct_send"
"""Key of the scope with the server's own ``send``. Each layer around ``send`` would cost every token a coroutine, so an
event stream sends its first message, with the headers, through all layers, and its events with this function."""
REQUEST_ID: Final = "gateway.request_id"
"""Key of the scope with the id of the request."""


class Application(Starlette):
    """Starlette's application. Every answer has the request's id in the header ``x-request-id``, which is OpenAI's, and
    in ``request-id``, which is Anthropic's, and tells the request's notes (``gateway.http.answers``)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[REQUEST_ID] = f"req_{uuid4().hex}"
        request_id = scope[REQUEST_ID].encode()

        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(b"x-request-id", request_id), (b"request-id", request_id)]
                message["headers"] = [*message.get("headers", ()), *ids, *headers_of(scope)]
            await send(message)

        scope[DIRECT] = send
        try:
            await super().__call__(scope, receive, send_with_id)
        finally:
            held_body(scope).release()
            del scope[DIRECT]  # the server's function holds the scope: a cycle, with all that the scope has
            took_ms = 1000 * (time.monotonic() - began)
            # The path as it came has no line ends. The query is left out, because a client may have put a token there.
            path = scope["raw_path"].decode("ascii", "replace")
            _log.debug("%s %s: %d after %.0f ms, %s", scope["method"], path, status, took_ms, scope[REQUEST_ID])


class ErrorAnswer(Response):
    """The answer to a request that failed before its first byte was sent.

    error  what went wrong; the caller is told what ``for_caller`` makes of it
    """

    def __init__(self, error: ApiError | WireError) -> None:
        self._error = for_caller(error)
        super().__init__(
            orjson.dumps(error_body(self._error)),
            status_of(self._error),
            error_headers(self._error),
            "application/json",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope):
            self.status_code = anthropic_status(self._error)
            self.body = orjson.dumps(anthropic_body(self._error, scope[REQUEST_ID]))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_event(error: ApiError | WireError, scope: Scope) -> bytes:
    """Return the server-sent event that ends a stream with an error. Client packages raise it."""
    error = for_caller(error)
    if is_anthropic(scope):
        return b"event: error\ndata: " + orjson.dumps(anthropic_body(error, scope[REQUEST_ID])) + b"\n\n"
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


# Turn every exception of a request into an answer of its API's shape, also for unknown paths and our own faults.


OFFERED: Final = (
    "GET /v1/models, POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
    "/v1/messages/count_tokens, /v1/embeddings, /v1/rerank, /tokenize and /detokenize; /openapi.json lists all"
)
NOT_OFFERED: Final = (
    ("/audio", "audio is not offered: these models read and write text"),
    ("/images", "images are not offered: these models read and write text"),
    ("/videos", "videos are not offered: these models read and write text"),
    ("/realtime", "the realtime API is not offered"),
    ("/moderations", "moderation is not offered"),
    ("/responses", "responses cannot be fetched: only POST /v1/responses is offered, which takes previous_response_id"),
    ("/conversations", "conversations are not stored: send the earlier items in the input of /v1/responses"),
    ("/messages/batches", "batches are not offered: send the messages one by one"),
    ("/complete", "Anthropic's older API is not offered: use /v1/messages"),
    ("/assistants", "the Assistants API is not offered: use /v1/chat/completions"),
    ("/threads", "the Assistants API is not offered: use /v1/chat/completions"),
    ("/batches", "batches are not offered: the option priority has the value batch"),
    ("/files", "files are not offered"),
    ("/uploads", "files are not offered"),
    ("/fine_tuning", "fine-tuning is not offered"),
    ("/vector_stores", "vector stores are not offered"),
    ("/model", "models are loaded by their first request, or by POST /v1/models/NAME/load"),
    ("/lora", "adapters belong to their model in models.yaml, and cannot be exchanged"),
    ("/template", "a chat template is its model's own, and cannot be exchanged"),
    ("/api", "the own APIs of Ollama and LM Studio are not offered: choose OpenAI's API, with the base URL /v1"),
)
"""Beginnings of the paths of other APIs, after /v1, each with the reason of the refusal."""


async def refused(request: Request, error: Exception) -> Response:
    """Answer a request that the gateway or the supervisor refuses."""
    assert isinstance(error, ApiError | WireError)
    return ErrorAnswer(error)


async def not_routed(request: Request, error: Exception) -> Response:
    """Answer a request for a path or a method that does not exist. Only a caller with a token hears what there is."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        reason = _not_offered(path)
        nothing = f"there is nothing at {path[:128]!r}"
        if reason is None and not path.startswith("/v1/"):
            return ErrorAnswer(ApiError(404, nothing, code="not_found"))
        code = "unsupported" if reason else "not_found"
        refusal = ApiError(404, f"{reason or nothing}. Offered are {OFFERED}", code=code)
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        line = "" if error.detail == "Method Not Allowed" else f": {error.detail}"
        message = f"{request.method} is not offered here: use {allowed}{line}"
        refusal = ApiError(405, message, code="method_not_allowed")
    else:
        refusal = ApiError(error.status_code, error.detail)
    try:
        caller_of(request)
    except ApiError as e:
        return ErrorAnswer(e)
    response = ErrorAnswer(refusal)
    response.headers.update(error.headers or {})
    return response


def _not_offered(path: str) -> str | None:
    """Return why a path of another API is refused. None for a path of no API that is known."""
    path = without_version(path)
    return next((why for begin, why in NOT_OFFERED if path == begin or path.startswith(f"{begin}/")), None)


async def left(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected while it sent its request. Nobody reads the answer."""
    return ErrorAnswer(ApiError(408, "the body did not arrive", code="incomplete_body"))


async def failed(request: Request, error: Exception) -> Response:
    """Answer a request that a fault of the gateway ended. The server logs the traceback, and the answer has none."""
    return ErrorAnswer(FAULT)


HANDLERS: Final[dict[type[Exception], ExceptionHandler]] = {
    ApiError: refused,
    WireError: refused,
    HTTPException: not_routed,
    ClientDisconnect: left,
    Exception: failed,
}
"""What answers each exception, for Starlette's ``exception_handlers``."""


# Answers that take time: streams of server-sent events, and whole answers that a client may stop waiting for.
#
# Both leave the engine when the client disconnects. An event goes to the server with one ``send``. Starlette's
# StreamingResponse would add a task group, and a generator with two more coroutine switches for each event.


log = logging.getLogger(__name__)

HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class EventStream:
    """The server-sent events of one answer. The first one sends the headers.

    send    sends the headers, through every layer of the application
    direct  sends the events, without these layers

    begun    whether the headers were sent. The status cannot change after that
    sent_at  time of the loop's clock when something was sent last
    """

    def __init__(self, send: Send, direct: Send) -> None:
        self._begin = send
        self._send = direct
        self._loop = asyncio.get_running_loop()
        self._sending = False
        self.begun = False
        self.sent_at = self._loop.time()

    async def send(self, data: bytes) -> None:
        """Send whole events. Wait while the client reads more slowly than events come."""
        self._sending = True
        try:
            if not self.begun:
                self.begun = True
                await self._begin({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._sending = False
        self.sent_at = self._loop.time()

    def is_silent(self, for_s: float) -> bool:
        """Return whether nothing was sent for so many seconds, and nothing waits for the client to read."""
        return not self._sending and self._loop.time() - self.sent_at >= for_s

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamedAnswer:
    """A response whose events a coroutine function sends. Like Starlette's responses it is an ASGI application.

    An error that the function raises becomes an HTTP error before the first event, and an event after it.
    """

    def __init__(self, produce: Callable[[EventStream], Coroutine[Any, Any, None]]) -> None:
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send, scope.get(DIRECT, send))
        try:
            done = await until_disconnect(receive, self._produce(events))
        except (ApiError, WireError) as e:
            if not events.begun:
                await ErrorAnswer(e)(scope, receive, send)
                return
            await events.send(error_event(e, scope))
        except Exception:
            if not events.begun:
                raise
            log.exception("a stream ended")
            await events.send(error_event(FAULT, scope))
        else:
            if not done:
                return
        await events.end()


class WholeAnswer:
    """A response that a coroutine function computes, unless the client disconnects before. An ASGI application."""

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, ASGIApp]]) -> None:
        self._compute = compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                response: ASGIApp = await self._compute()
            except (ApiError, WireError) as e:
                response = ErrorAnswer(e)
            await response(scope, receive, send)

        await until_disconnect(receive, answer())


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, and cancel it when the client disconnects. Return whether the work was done, and raise its errors.

    The request's body must have been read: ``receive`` then waits for the disconnect.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    watch.add_done_callback(lambda _, task=task: task.cancel())  # type: ignore[misc]
    try:
        await asyncio.wait([task])
    finally:  # this task may have been cancelled, too
        watch.cancel()
        task.cancel()
    if task.cancelled():
        return False
    try:
        task.result()
    finally:
        del task  # it holds its error, whose traceback holds this frame
    return True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Keep silent streams open: proxies and clients end a connection that brings nothing for a while.
#
# Chats may also tell of the load of their model (``LoadLines``), for people whose client shows no comments.


CHECK_S: Final = 1.0
"""Seconds between two checks of all open streams."""


def comment(progress: Progress | None) -> bytes:
    """Return a comment of server-sent events that says what a request waits for. No client takes it for text."""
    if progress is None:
        return b": waiting\n\n"
    if progress.phase == "queued" and progress.waits_for:
        return b": queued: waits for %s\n\n" % progress.waits_for.encode()
    if progress.phase == "queued":
        return b": queued %d\n\n" % (progress.queue_position or 0)
    if progress.total:
        return b": %s %d%%\n\n" % (progress.phase.encode(), 100 * (progress.done or 0) // progress.total)
    return b": %s\n\n" % progress.phase.encode()


OURS: Final = "modelctl: "
"""The beginning of each line that the gateway adds to the reasoning of an answer."""
_LINES: Final = re.compile(rf"(?:{re.escape(OURS)}[^\n]*\n)+")


def without_load_lines(reasoning: str) -> str:
    """Return the reasoning of an earlier answer without the lines of ``LoadLines``. The model has not written them."""
    return reasoning[found.end() :] if (found := _LINES.match(reasoning)) is not None else reasoning


class LoadLines:
    """The lines that tell a person of the load of a model. Pure.

    model  the name that the request has for it

    There is a line for each part of the load, and for each tenth of it that is done.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._told: tuple[str, int] | None = None

    def next(self, progress: Progress | None) -> str:
        """Return the line about a new state; "" if the last line says enough, or if the request waits for no load."""
        if progress is None:
            return ""
        tenth = -1
        if progress.phase == "loading":
            part = "" if progress.part in (None, "loading") else f": {progress.part}"
            text = f"loading {self._model}{part}"
            if progress.total:
                done = 100 * (progress.done or 0) // progress.total
                text, tenth = f"{text}{' ' if part else ': '}{done}%", done // 10
            state = (part or "loading", tenth)
        elif progress.phase == "queued" and progress.waits_for:
            text = f"{self._model} waits for {progress.waits_for}"
            state = (text, tenth)
        else:
            return ""
        if state == self._told:
            return ""
        self._told = state
        return f"{OURS}{text}\n"


@dataclass(eq=False)
class OpenStream:
    """A stream that is not finished.

    events    where to send to
    silent    returns what to send when the stream was silent for too long
    news      returns what to send at once; b"" for nothing. What it has returned, it does not return again. None for a
              stream without news
    """

    events: EventStream
    silent: Callable[[], bytes]
    news: Callable[[], bytes] | None


@dataclass
class KeepAlive:
    """All open streams of this process. One task looks at them once a second, so that a token costs nothing more.

    after_s  seconds of silence after which something is sent; 0 for streams that have nothing but their news
    """

    after_s: float
    streams: set[OpenStream] = field(default_factory=set)
    _sends: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def keeping(
        self, events: EventStream, silent: Callable[[], bytes], news: Callable[[], bytes] | None = None
    ) -> Iterator[None]:
        """Keep a stream open while the block runs. ``silent`` and ``news`` are as in OpenStream."""
        stream = OpenStream(events, silent, news)
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)

    async def run(self) -> None:
        """Look at the streams until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self.after_s or CHECK_S))
            for stream in self.streams:
                data = stream.news() if stream.news is not None and stream.events.is_silent(0) else b""
                if not data and self.after_s and stream.events.is_silent(self.after_s):
                    data = stream.silent()
                if data:
                    send = asyncio.create_task(self._send(stream, data, stream.events.sent_at))
                    self._sends.add(send)
                    send.add_done_callback(self._sends.discard)

    async def _send(self, stream: OpenStream, data: bytes, after: float) -> None:
        # The stream may have ended, or sent something, since this task was made.
        if stream in self.streams and stream.events.is_silent(0) and stream.events.sent_at == after:
            await stream.events.send(data)
