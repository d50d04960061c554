"""Answers that take time: streams of server-sent events, and whole answers that a client may stop waiting for.

Both leave the engine when the client disconnects. An event goes to the server with one ``send``. Starlette's
StreamingResponse would add a task group, and a generator with two more coroutine switches for each event.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.errors import FAULT, ApiError
from gateway.http.responses import DIRECT, ErrorAnswer, error_event
from protocol.errors import WireError

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

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, Response]]) -> None:
        self._compute = compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                response = await self._compute()
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
