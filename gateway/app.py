"""The ASGI application: its routes, and the link to the supervisor that they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.http.errors import ApiError, error_response
from gateway.settings import Settings
from gateway.supervisor_link import SupervisorLink
from protocol.errors import WireError


def make_app(settings: Settings) -> Starlette:
    """Return the application. Its ``state`` has ``settings`` and ``link``."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        link = SupervisorLink(settings)
        await link.connect()
        app.state.link = link
        try:
            yield
        finally:
            await link.close()

    app = Starlette(
        routes=[Route("/livez", live)],
        exception_handlers={ApiError: _refused, WireError: _refused},
        lifespan=connected,
    )
    app.state.settings = settings
    app.router.redirect_slashes = False
    return app


async def live(request: Request) -> Response:
    """Answer that the process is alive. It asks nobody."""
    return PlainTextResponse("ok\n")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | WireError)
    return error_response(error)
