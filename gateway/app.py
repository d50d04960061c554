"""The ASGI application: its routes, and the link to the supervisor that they share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.anthropic.answers import count_tokens, messages
from gateway.http.answers import HANDLERS, Application, KeepAlive
from gateway.http.body import BodyMemory
from gateway.http.callers import Caller, Sessions, caller_of
from gateway.http.errors import ApiError
from gateway.http.origin import Cors, HostCheck
from gateway.metrics import Scrapes, metrics
from gateway.openai.answers import (
    apply_template,
    chat,
    completion,
    detokenize,
    encode,
    props,
    tokenize,
    tokenizer_info,
    version,
)
from gateway.openai.embeddings import embeddings, rerank
from gateway.openai.models import adapters, current_model, model, models, templates
from gateway.openai.schema import openapi
from gateway.orders import ROUTES
from gateway.page.page import Live, page_routes
from gateway.responses.answers import respond
from gateway.responses.requests import StoredItems
from gateway.supervisor_link import SupervisorLink
from protocol.errors import ErrorCode, WireError
from protocol.names import means
from protocol.process.worker_spec import GatewaySettings

# /livez, /readyz and /health: for load balancers and watchdogs, without a key and without details of models.
#
# Only ``/readyz?model=`` takes a key. Without one, it would tell everybody which models there are.


AT_REST: Final = frozenset({"ready", "failed", "stopped", "unloaded", "asleep"})
"""States in which a model is not on its way to another state."""
ANSWERS: Final = frozenset({"ready", "unloaded", "asleep", "falling_asleep", "waking"})
"""States in which a model answers a request. A request loads a model that is unloaded, and wakes one that sleeps, so a
load balancer that waits until it is ready would wait for ever."""


async def live(request: Request) -> Response:
    """Answer 200 while the gateway's process answers at all. It asks nobody."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Answer 200 if the model that ``?model=`` names answers requests, else 503. Without it: if any model does.

    A model that the key may not use is answered as one that does not exist. If the supervisor's port over TCP is not
    open yet, another line of the answer says why.
    """
    name = request.query_params.get("model")
    reply = await _models(request, None if name is None else caller_of(request))
    found = [model for model in reply["models"] if name is None or means(model, name)]
    answer = _answer(any(model["state"] in ANSWERS for model in found))
    if reply.get("listen"):
        return PlainTextResponse(f"{bytes(answer.body).decode()}{reply['listen']}\n", answer.status_code)
    return answer


async def health(request: Request) -> Response:
    """Answer 200 if a model answers requests, and none is on its way to do so.

    So a script that starts the supervisor can wait for all models. llama-server answers 503 while its model is loading,
    and vLLM once its engine is dead.
    """
    states = [model["state"] for model in (await _models(request))["models"]]
    return _answer(any(state in ANSWERS for state in states) and all(state in AT_REST for state in states))


def _answer(good: bool) -> Response:
    return PlainTextResponse("ok\n" if good else "not ready\n", 200 if good else 503)


async def _models(request: Request, caller: Caller | None = None) -> dict[str, Any]:
    """Return the supervisor's answer to ``models``; one without models if the supervisor does not answer.

    caller  who asks; None to ask for all models. Raises WireError if the supervisor does not know the caller's key
    """
    link: SupervisorLink = request.app.state.link
    try:
        return await (link.client.models() if caller is None else link.call(caller, "models"))
    except (ApiError, WireError, TimeoutError) as e:
        if caller is not None and isinstance(e, WireError) and e.code is ErrorCode.UNAUTHORIZED:
            raise
        return {"models": []}


API: Final[tuple[tuple[str, str, Callable[[Request], Awaitable[ASGIApp]]], ...]] = (
    *ROUTES,
    ("POST", "/chat/completions", chat),
    ("POST", "/completions", completion),
    ("POST", "/responses", respond),
    ("POST", "/messages", messages),
    ("POST", "/messages/count_tokens", count_tokens),
    ("POST", "/embeddings", embeddings),
    ("POST", "/rerank", rerank),
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
