"""The ASGI application: its routes, and the link to the supervisor that they share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.anthropic.answers import count_tokens, messages
from gateway.http.body import BodyMemory
from gateway.http.cors import Cors
from gateway.http.health import health, live, ready
from gateway.http.host_check import HostCheck
from gateway.http.keep_alive import KeepAlive
from gateway.http.refusals import HANDLERS
from gateway.http.responses import Application
from gateway.http.sessions import Sessions
from gateway.metrics import Scrapes, metrics
from gateway.openai.answers import chat, completion
from gateway.openai.models import adapters, current_model, model, models, templates
from gateway.openai.schema import openapi
from gateway.openai.tokenizing import (
    apply_template,
    detokenize,
    encode,
    props,
    tokenize,
    tokenizer_info,
    version,
)
from gateway.orders import ROUTES
from gateway.page.live import Live
from gateway.page.routes import page_routes
from gateway.responses.answers import respond
from gateway.responses.stored_items import StoredItems
from gateway.supervisor_link import SupervisorLink
from protocol.errors import WireError
from protocol.process.gateway_settings import GatewaySettings

API: Final[tuple[tuple[str, str, Callable[[Request], Awaitable[ASGIApp]]], ...]] = (
    *ROUTES,
    ("POST", "/chat/completions", chat),
    ("POST", "/completions", completion),
    ("POST", "/responses", respond),
    ("POST", "/messages", messages),
    ("POST", "/messages/count_tokens", count_tokens),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/apply-template", apply_template),
    ("GET", "/tokenizer_info", tokenizer_info),
    ("GET", "/props", props),
    ("GET", "/version", version),
    ("POST", "/token/encode", encode),
    ("POST", "/token/decode", detokenize),
    ("GET", "/model", current_model),
    ("GET", "/model/list", models),
    ("GET", "/template/list", templates),
    ("GET", "/templates", templates),
    ("GET", "/lora", adapters),
    ("GET", "/loras", adapters),
    ("GET", "/lora/list", adapters),
    ("GET", "/models", models),
    ("GET", "/models/{name:path}", model),
)
"""OpenAI's APIs and Anthropic's, and paths of vLLM, llama-server and TabbyAPI. Clients are told its base URL with /v1,
without it, and with two of them."""


def make_app(settings: GatewaySettings) -> Starlette:
    """Return the application. Its ``state`` has ``settings``, ``sessions``, ``link``, ``live``, ``keep_alive``,
    ``scrapes``, ``bodies`` and ``stored_items``."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        link = SupervisorLink(settings)
        try:
            await link.connect()
        except (WireError, ValueError) as e:
            app.state.refusal = f"the supervisor refuses the gateway: {e}"
            raise
        app.state.link = link
        app.state.live = Live(link, settings.auth, app.state.sessions)
        keep_alive = asyncio.create_task(app.state.keep_alive.run())
        try:
            yield
        finally:
            keep_alive.cancel()
            app.state.live.close()
            await link.close()

    app = Application(
        routes=[
            *page_routes(),
            *(route for prefix in ("", "/v1", "/v1/v1") for route in _api(prefix)),
            Route("/openapi.json", openapi),
            Route("/metrics", metrics),
            Route("/livez", live),
            Route("/readyz", ready),
            Route("/health", health),
        ],
        middleware=[
            Middleware(HostCheck, allowed=settings.allowed_hosts),
            Middleware(Cors, origins=settings.cors_origins),
        ],
        exception_handlers=HANDLERS,
        lifespan=connected,
    )
    app.state.settings = settings
    app.state.sessions = Sessions(settings)
    app.state.scrapes = Scrapes()
    app.state.bodies = BodyMemory.of(settings)
    app.state.stored_items = StoredItems.of(settings, app.state.bodies)
    app.state.keep_alive = KeepAlive(0 if settings.keepalive == "off" else settings.keepalive_s)
    app.router.redirect_slashes = False
    return app


def _api(prefix: str) -> list[Route]:
    """Return the routes of the APIs. Some clients end a path with a slash, and lose the body in a redirect."""
    return [
        Route(f"{prefix}{path}{slash}", endpoint, methods=[method])
        for method, path, endpoint in API
        for slash in ("/", "")
    ]
