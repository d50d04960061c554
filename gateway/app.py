"""The ASGI application: its routes, and the link to the supervisor that they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http.errors import ApiError, error_response
from gateway.http.health import health, live, ready
from gateway.http.host_check import HostCheck
from gateway.http.keep_alive import KeepAlive
from gateway.openai.answers import chat, completion
from gateway.openai.models import model, models
from gateway.openai.tokenizing import detokenize, tokenize
from gateway.page.live import Live
from gateway.page.routes import page_routes
from gateway.supervisor_link import SupervisorLink
from protocol.errors import WireError
from protocol.process.gateway_settings import GatewaySettings


def make_app(settings: GatewaySettings) -> Starlette:
    """Return the application. Its ``state`` has ``settings`` and ``link``."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        link = SupervisorLink(settings)
        await link.connect()
        app.state.link = link
        app.state.live = Live(link, settings.auth)
        keep_alive = asyncio.create_task(app.state.keep_alive.run())
        try:
            yield
        finally:
            keep_alive.cancel()
            app.state.live.close()
            await link.close()

    app = Starlette(
        routes=[
            *page_routes(),
            *_api(""),
            *_api("/v1"),
            *_api("/v1/v1"),
            Route("/livez", live),
            Route("/readyz", ready),
            Route("/health", health),
        ],
        middleware=[Middleware(HostCheck, allowed=settings.allowed_hosts)],
        exception_handlers={ApiError: _refused, WireError: _refused},
        lifespan=connected,
    )
    app.state.settings = settings
    app.state.keep_alive = KeepAlive(0 if settings.keepalive == "off" else settings.keepalive_s)
    app.router.redirect_slashes = False
    return app


def _api(prefix: str) -> list[Route]:
    """Return the routes of OpenAI's API. Clients are told the base URL with /v1, without it, and with two of them."""
    return [
        Route(f"{prefix}/chat/completions", chat, methods=["POST"]),
        Route(f"{prefix}/completions", completion, methods=["POST"]),
        Route(f"{prefix}/models", models),
        Route(f"{prefix}/models/{{name:path}}", model),
        Route(f"{prefix}/tokenize", tokenize, methods=["POST"]),
        Route(f"{prefix}/detokenize", detokenize, methods=["POST"]),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | WireError)
    return error_response(error)
