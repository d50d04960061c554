"""Run the application with uvicorn, on sockets that were opened before."""

import asyncio
import gc
import json
import logging
import os
import re
import socket
import time
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, NoReturn

import httptools
import orjson
import uvicorn
from starlette.applications import Starlette
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.app import make_app
from gateway.http.errors import ApiError, error_body
from gateway.orders import Places, connection_limit
from protocol.process.helper_link import HelperLink
from protocol.process.logs import LogOutput, adopt_style, begin_log
from protocol.process.shown import LogStyle
from protocol.process.worker_spec import ENDED, READY, TROUBLE, GatewaySettings

# Speak with the process that started this one.
#
# This process says whether it serves, and which sessions of the page people have ended. The other process says how to
# write the log, and which sessions have ended at other processes of the gateway.


_MOST_CHARACTERS = 1000


class Reports:
    """The link to the process that started this one. Nothing is sent if nobody reads there any more."""

    def __init__(self, link: HelperLink) -> None:
        self._link = link
        os.set_blocking(link.descriptor, False)  # while nobody reads, requests go on

    def hear(self) -> tuple[LogStyle | None, list[str]]:
        """Return what was said since the last call: how the log is to be written from now on (None: as it is), and the
        sessions that were ended elsewhere (``Session.text``)."""
        said = []
        with suppress(EOFError):
            while (record := self._link.receive()) is not None:
                said.append(json.loads(record))
        styles = [each for each in said if "ended" not in each]
        ended = [each["ended"] for each in said if "ended" in each]
        return LogStyle(**styles[-1]) if styles else None, ended

    def serving(self) -> None:
        """Report that the gateway serves. Call this about once a second: silence counts as a hang."""
        self._link.flush()
        self._link.send(READY)

    def ended(self, session: str) -> None:
        """Report that a session of the page was ended. ``session`` is its ``text``."""
        self._link.send(ENDED + session.encode())

    def trouble(self, reason: str) -> None:
        """Report why the gateway cannot serve."""
        self._link.send(TROUBLE + reason[:_MOST_CHARACTERS].encode())


# Keep Python's garbage collector from stopping all streams.


THRESHOLDS: Final = (50_000, 20, 100)
"""Python's own are (700, 10, 10). With a thousand streams their passes over all objects stopped this process's loop for
100 to 230 ms each, on the host of an H200. The 99th percentile of the gap between tokens was 3.5 times the engine's.
With these thresholds it is 1.13 times the engine's (``benchmarks.http_serving --many``).

A full pass then hardly ever comes. So a request must leave no cycle of objects, answered or refused: a cycle would keep
its body. ``tests/gateway/test_refused_bodies.py`` measures that."""


def tune() -> None:
    """Let the collector look at new objects only, and less often. Call this once everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


# One HTTP connection, with limits that uvicorn and httptools lack.
#
# They bound the size of a request's head and the time in which the head must come. A connection also says whom it
# waits for: ``Places`` ends the ones that wait for their clients, if there are too many.


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


class HttpConnection(HttpToolsProtocol):
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


# Accept connections, a few in each turn of the loop, and count them from then on.
#
# uvloop's own server reports a connection with TLS only after the handshake. It also accepts everything that the
# kernel has ready before it closes anything, so a burst would use up every descriptor.


AT_ONCE: Final = 8
"""Connections that are accepted in one turn of the loop. A connection that makes way is closed two turns later, so
there may be three times as many above the limit. ``SPARE`` is more than that."""
REFUSED: Final = 16
"""Most connections that were refused and are not closed yet. They also take of ``SPARE``."""
HANDSHAKE_S: Final = 5.0
"""Seconds in which the TLS handshake must come."""
RETRY_S: Final = 0.2
"""Seconds until the next try, if the system has no descriptor or no memory for a connection."""
NEWS_S: Final = 60.0
"""Least seconds between two lines of the log about connections that made way or found no place."""

_log = logging.getLogger(__name__)


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, with connections that are accepted here.

    places  the places for its connections
    """

    def __init__(self, config: uvicorn.Config, places: Places) -> None:
        super().__init__(config)
        self.places = places
        self._listeners: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: deque[socket.socket] = deque()
        self._told = (0, 0)
        self._told_at = -NEWS_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections from these sockets."""
        await super().startup(sockets=[])
        self._listeners = list(sockets or [])
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._watch(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and complete the answers."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._listeners = []
        for task in self._opening:
            task.cancel()
        while self._refused:
            self._refused.pop().close()
        await super().shutdown(sockets)

    def tell_news(self, now: float) -> None:
        """Log how many connections made way or found no place, at most once in ``NEWS_S``. ``now``: monotonic."""
        known = self.places.made_way, self.places.refused
        if known == self._told or now - self._told_at < NEWS_S:
            return
        made_way, refused = (new - old for new, old in zip(known, self._told, strict=True))
        _log.warning(
            "all %d places for connections were taken: %d connections that waited for their clients made way for new "
            "ones, and %d new ones were refused; raise gateway.processes or the limit of descriptors (ulimit -n) if "
            "these clients are welcome",
            self.places.most, made_way, refused,
        )  # fmt: skip
        self._told, self._told_at = known, now

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                client, _address = listener.accept()
            except BlockingIOError:  # another process may have been faster
                return
            except ConnectionError:  # the client has left already
                continue
            except OSError as e:
                _log.warning("no connection can be accepted for %g s: %s", RETRY_S, e.strerror)
                loop.remove_reader(listener)
                loop.call_later(RETRY_S, self._watch, listener)
                return
            client.setblocking(False)
            connection = HttpConnection(self.config, self.server_state, self.lifespan.state, self.places)
            if self.places.enter(connection):
                connection.opening = loop.create_task(self._open(connection, client))
                self._opening.add(connection.opening)
                connection.opening.add_done_callback(self._opening.discard)
            else:
                self._refuse(client)

    async def _open(self, connection: HttpConnection, client: socket.socket) -> None:
        """Make a connection of an accepted socket, after the TLS handshake if there is one."""
        tls, loop = self.config.ssl, asyncio.get_running_loop()
        handshake_s = None if tls is None else HANDSHAKE_S
        try:
            with suppress(OSError):  # also an error of OpenSSL, and a handshake that took too long
                await loop.connect_accepted_socket(
                    lambda: connection, client, ssl=tls, ssl_handshake_timeout=handshake_s
                )
        finally:
            if not connection.made:
                self.places.leave(connection)

    def _refuse(self, client: socket.socket) -> None:
        """Close the socket of a client that finds no place. Without TLS tell it why, and give it time to read that."""
        if self.config.ssl is not None:
            client.close()
            return
        what = f"this process of the gateway has {self.places.most} connections, which is its limit"
        error = ApiError(503, f"{what}: try again, or raise gateway.processes", code="overloaded")
        with suppress(OSError):
            client.send(error_answer(error))
            client.shutdown(socket.SHUT_WR)
        self._refused.append(client)
        if len(self._refused) > REFUSED:
            self._refused.popleft().close()
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, client)

    def _forget(self, client: socket.socket) -> None:
        if client in self._refused:
            self._refused.remove(client)
            client.close()


IDLE_S = 75
"""Seconds that an idle connection is kept. Clients keep connections in pools, and a connection that the server has
closed meanwhile fails their next request."""
LEAVE_S = 30
"""Seconds that open streams may go on when the process is told to end."""
UNUSABLE = 78
"""Exit code if the settings cannot be used."""


def serve(
    settings: GatewaySettings, listeners: list[socket.socket], reports: Reports, log: LogOutput | None = None
) -> None:
    """Serve until told to end (SIGTERM, SIGINT). Exit with UNUSABLE if the settings cannot be used.

    reports  is told whether the gateway serves
    log      the process's log, which is opened again when somebody has moved it
    """
    begin_log("gateway", settings.log_style)

    async def each_second() -> None:
        reports.serving()
        server.tell_news(time.monotonic())
        style, ended = reports.hear()
        if style is not None:
            adopt_style(style)
        for session in ended:
            app.state.sessions.hear(session)
        if ended:
            app.state.live.check_sessions()
        if log is not None:
            log.follow()

    app = make_app(settings)
    app.state.sessions.tell = reports.ended
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=LEAVE_S,
        timeout_notify=1,
        callback_notify=each_second,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
    )
    try:
        config.load()
    except OSError as e:  # also an error of OpenSSL
        files = f"the certificate {settings.certificate} with the private key {settings.private_key}"
        reports.trouble(f"{files} cannot be used: {e.strerror or e}")
        raise SystemExit(UNUSABLE) from e
    server = _Server(config, app)
    tune()
    try:
        server.run(sockets=listeners)
    except SystemExit:
        if (refusal := getattr(app.state, "refusal", None)) is not None:
            reports.trouble(refusal)
        raise


class _Server(AcceptingServer):
    """The server. When it is told to end, answers are completed, but the updates of open pages have no end of their
    own."""

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config, Places(connection_limit()))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.live.close()
        await super().shutdown(sockets)
