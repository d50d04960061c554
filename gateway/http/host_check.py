"""Refuse requests that name another host than this gateway (DNS rebinding).

A web page from elsewhere can have a name of its own point to 127.0.0.1. The browser then takes the gateway for the
page's own server, and no rule about origins stops it. But the browser sends that name in the Host header.
"""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.http.responses import ErrorAnswer
from protocol.process.web_hosts import is_address, parse_authority


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
