"""How an answer leaves: with an id for each request, and with as few steps for each token as possible.

An error leaves in the shape of the API that its request belongs to.
"""

import logging
import time
from typing import Final
from uuid import uuid4

import orjson
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.http.body import held_body
from gateway.http.dialect import anthropic_body, anthropic_status, is_anthropic
from gateway.http.errors import ApiError, error_body, error_headers, for_caller, status_of
from gateway.http.notes import headers_of
from protocol.errors import WireError

_log = logging.getLogger(__name__)
DIRECT: Final = "gateway.direct_send"
"""Key of the scope with the server's own ``send``. Each layer around ``send`` would cost every token a coroutine, so an
event stream sends its first message, with the headers, through all layers, and its events with this function."""
REQUEST_ID: Final = "gateway.request_id"
"""Key of the scope with the id of the request."""


class Application(Starlette):
    """Starlette's application. Every answer has the request's id in the header ``x-request-id``, which is OpenAI's, and
    in ``request-id``, which is Anthropic's, and tells the request's notes (``gateway.http.notes``)."""

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
