"""One HTTP connection, with limits that uvicorn and httptools lack.

They bound the size of a request's head and the time in which the head must come. A connection also says whom it waits
for: ``Places`` ends the ones that wait for their clients, if there are too many.
"""

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final, NoReturn

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http.errors import ApiError, error_body
from gateway.places import Places

HEAD_BYTES: Final = 64 << 10
"""Most bytes of a request's head: its first line and its headers. httptools keeps a head of any size in memory."""
HEAD_S: Final = 15.0
"""Seconds in which the head of a request must come. uvicorn waits for ever once the first byte has come."""
MOST_PIPELINED: Final = 16
"""Requests of a connection that may wait for the answer to an earlier one. Each takes some kilobytes. The connection
ends if there are more, or if a body among them is larger than ``HEAD_BYTES``."""
LINGER_S: Final = 1.0
"""Seconds between an error and the end of its connection. If a socket is closed before everything that the client sent
was read, the kernel resets the connection, and the client may lose the error."""


class Connection(HttpToolsProtocol):
    """The connection of a client. A request that breaks a limit gets an error, and then its connection ends.

    opening  the task that makes the connection. It takes as long as the TLS handshake
    made     whether the connection has been made
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        places: Places,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.opening: asyncio.Task[None] | None = None
        self.made = False
        self._places = places
        self._running: RequestResponseCycle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._kept_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._error: ApiError | None = None

    def make_way(self) -> None:
        """End now. Whatever was not sent is lost."""
        if self.made:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.made = True
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        self._cancel_timer()
        if self._running is not None and self._running is not self.cycle:  # uvicorn tells only the newest request
            self._running.disconnected = True
            self._running.message_event.set()
        self._unset_keepalive_if_required()  # uvicorn leaves it if the connection was reset: it kept 8 KiB for 75 s
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what the client has sent."""
        if self._error is not None:
            return
        self._unset_keepalive_if_required()
        # httptools keeps the pieces of an unfinished header. So count what has come since it last made something known.
        self._kept_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            in_body = not self._in_head and self.cycle is not None and self.cycle.more_body
            what = "the chunks of the body are" if in_body else "this request is"
            self._refuse(self._error or ApiError(400, f"{what} not valid HTTP/1.1: {e}", code="invalid_http"))
            return
        if self._kept_bytes > HEAD_BYTES:
            self._refuse(_too_large())
        elif self.cycle is None or self.cycle.response_complete:
            # Only a part of the next request has come, or the rest of a body that nobody wants.
            self._await_head()
        self._settle()

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._kept_bytes = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop a trailer.

        A trailer comes after a chunked body. uvicorn would add it to the headers, which the application has checked.
        """
        self._count(len(name) + len(value))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it asks for what is not offered."""
        self._in_head = False
        self._kept_bytes = 0
        self._cancel_timer()
        version, codings = self.parser.get_http_version(), self._values(b"transfer-encoding")
        if version not in ("1.0", "1.1"):
            what = f"HTTP/{version} was asked for: use HTTP/1.1"
            self._fail(ApiError(505, what, code="unsupported"))
        if self.parser.should_upgrade():  # the parser takes no body then, and the application would wait for it
            what = "another protocol than HTTP/1.1 was asked for (Upgrade, CONNECT): ask for none"
            self._fail(ApiError(400, what, code="unsupported"))
        if codings and version == "1.0":
            what = "HTTP/1.0 has no header Transfer-Encoding: send Content-Length"
            self._fail(ApiError(400, what, code="invalid_http"))
        if codings and codings != [b"chunked"]:
            coding = b", ".join(codings).decode("latin-1")[:64]
            what = f"the transfer coding {coding!r} is not offered: send the body with Content-Length, or only chunked"
            self._fail(ApiError(501, what, code="unsupported"))
        if version == "1.0":
            self.expect_100_continue = False
        if not self.url.startswith(b"/") and b"://" in self.url:  # the host that counts is that of the target
            host = re.split(rb"[/?#]", self.url.partition(b"://")[2], maxsplit=1)[0]
            self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn would not see that the client leaves
            if len(self.pipeline) > MOST_PIPELINED:
                what = f"more than {MOST_PIPELINED} requests wait for the answer to an earlier one: wait for the answer"
                self._fail(ApiError(429, what, code="overloaded"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the request's body."""
        self._kept_bytes = 0
        if self.pipeline and len(self.cycle.body) + len(body) > HEAD_BYTES:
            what = "a large body came before the answer to an earlier request: wait for the answer"
            self._fail(ApiError(429, what, code="overloaded"))
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Take the next request."""
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        """Stop sending to a client that does not read."""
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        """Send to a client that reads again."""
        super().resume_writing()
        self._settle()

    def _settle(self) -> None:
        """Say whether the gateway waits for this client, or the client for the gateway."""
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        # A pipelined request that came in part waits for the answer to an earlier one, which came as a whole.
        if idle or self.flow.write_paused or (cycle.more_body and not self.pipeline):
            self._places.wait_for(self)
        else:
            self._places.serve(self)

    def _values(self, wanted: bytes) -> list[bytes]:
        """Return the values of a header that is a list, in lower case."""
        given = [value for name, value in self.headers if name == wanted]
        return [each.strip().lower() for value in given for each in value.split(b",")]

    def _fail(self, error: ApiError) -> NoReturn:
        """Have the parser stop. Only the exception's being one reaches ``data_received``."""
        self._error = error
        raise error

    def _count(self, size: int) -> None:
        """Count bytes of a head. Raise ApiError if they are too many."""
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._fail(_too_large())

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._time_out)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if not self._kept_bytes and not self._in_head:  # browsers open connections in advance
            self.transport.close()
            return
        self._refuse(ApiError(408, f"the head of the request did not come within {HEAD_S:.0f} s", code="too_slow"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error, and end the connection. While an earlier request is being answered, end it without the error:
        the client could take the error for that answer, or for a part of it."""
        self._error = error.with_traceback(None)  # its frames have this connection, and what came last
        self._cancel_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline or not cycle.more_body:
                self.transport.close()
                return
            # The application waits for the rest of this body. What it answers now goes nowhere.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(error_answer(error))
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


def without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return the application for a request of HTTP/1.0, which has no chunks: the end of an answer without a length is
    the end of the connection."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def send_plain(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:  # uvicorn compares what comes with what was announced
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def error_answer(error: ApiError) -> bytes:
    """Return the whole answer to something that did not become a request. It says that the connection ends."""
    body = orjson.dumps(error_body(error))
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (error.status, HTTPStatus(error.status).phrase.encode(), len(body)) + body


def _too_large() -> ApiError:
    return ApiError(431, f"the head of the request is larger than {HEAD_BYTES} bytes: send less", code="too_large")
