"""Decide which web pages may use the gateway from a browser (CORS), and refuse the requests of all others.

A page of another site can send a POST to http://localhost:8000 without asking first, if the body claims to be plain
text. The page cannot read the answer, but the model works, and with ``auth: none`` no token is missing. A browser
names the page's origin in the header Origin. So a request from an origin that is neither the gateway's own nor on the
list is refused before anything reads its body.
"""

from collections.abc import Iterable
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.answers import ErrorAnswer
from gateway.http.callers import SCRIPT_HEADER
from gateway.http.errors import ApiError
from protocol.process.sockets import is_address, is_same_host, parse_authority

PREFLIGHT_S: Final = 600
"""Seconds for which a browser may remember the answer to a preflight."""
EXPOSED: Final = (
    b"x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, x-modelctl-ignored, x-modelctl-changed"
)
"""Headers of an answer that scripts of a named origin may read."""


class Cors:
    """ASGI middleware that lets pages of named origins use the API, and answers 403 to pages of other origins.

    A preflight is answered without a token, because browsers send none with it. ``Access-Control-Allow-Credentials``
    is never sent, so no cookie of the gateway's page counts for another origin. The events of a stream do not pass
    through this layer (see ``DIRECT``).

    origins  origins whose pages may use the API, such as https://chat.example.org
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"origin"]
        if not given:
            await self._app(scope, receive, send)
            return
        origin = given[0].lower()
        if len(given) == 1 and origin in self._origins:
            await self._serve(scope, receive, send, given[0])
        elif len(given) == 1 and _is_own(origin, scope):
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                403,
                "the header Origin names a web page that may not use this gateway: add its origin to "
                "gateway.cors_origins",
                code="unknown_origin",
            )
            await ErrorAnswer(error)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, origin: bytes) -> None:
        """Answer a preflight, or add the headers that let the page read the answer."""
        allow = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        headers = dict(scope["headers"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            response = Response(status_code=204)
            wanted = headers.get(b"access-control-request-headers", b"")
            response.raw_headers = [
                *allow,
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", _allowed_headers(wanted)),
                (b"access-control-max-age", b"%d" % PREFLIGHT_S),
            ]
            await response(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [*allow, (b"access-control-expose-headers", EXPOSED)]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _is_own(origin: bytes, scope: Scope) -> bool:
    """Return whether an origin is the gateway's own, by the request's Host header."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return is_same_host(origin.decode("latin-1"), host.decode("latin-1"))


def _allowed_headers(wanted: bytes) -> bytes:
    """Return the headers that a page asked to send, without the header that only the gateway's own page may send.

    Clients have headers of their own (x-stainless-...), so no list of them would be complete.
    """
    names = [name.strip() for name in wanted.lower().split(b",")]
    return b", ".join(name for name in names if name and name != SCRIPT_HEADER.encode())


# Refuse requests that name another host than this gateway (DNS rebinding).
#
# A web page from elsewhere can have a name of its own point to 127.0.0.1. The browser then takes the gateway for the
# page's own server, and no rule about origins stops it. But the browser sends that name in the Host header.


class HostCheck:
    """ASGI middleware that answers 421 to a request whose Host header names another host.

    allowed  names besides localhost, the address that the gateway listens on, and IP addresses. A page of another
             site cannot have an IP address as its name, unless it comes from that address
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = {"localhost", *(name.lower() for name in allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_ours(scope):
            error = ApiError(
                421,
                "the Host header names a host that this gateway does not know: use its address or localhost, or add "
                "the name to gateway.allowed_hosts",
                code="unknown_host",
            )
            await ErrorAnswer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        found = parse_authority(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        return found is not None and (found[0] in self._allowed or is_address(found[0]))
