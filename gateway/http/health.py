"""/livez, /readyz and /health: for load balancers and watchdogs, without a key and without details."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from protocol.errors import WireError

AT_REST: Final = frozenset({"ready", "failed", "stopped", "unloaded"})
"""States in which a model is not on its way to another state."""
ANSWERS: Final = frozenset({"ready", "unloaded"})
"""States in which a model answers a request. A request loads a model that is unloaded, so a load balancer that waits
until it is ready would wait for ever."""


async def live(request: Request) -> Response:
    """Answer 200 while the gateway's process answers at all. It asks nobody."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Answer 200 if the model that ``?model=`` names answers requests, else 503. Without it: if any model does."""
    models = await _states(request)
    name = request.query_params.get("model")
    found = any(state in ANSWERS for model, state in models.items() if name in (None, model))
    return _answer(found)


async def health(request: Request) -> Response:
    """Answer 200 if a model answers requests, and none is on its way to do so.

    So a script that starts the supervisor can wait for all models. llama-server answers 503 while its model is loading,
    and vLLM once its engine is dead.
    """
    states = (await _states(request)).values()
    return _answer(any(state in ANSWERS for state in states) and all(state in AT_REST for state in states))


def _answer(good: bool) -> Response:
    return PlainTextResponse("ok\n" if good else "not ready\n", 200 if good else 503)


async def _states(request: Request) -> dict[str, str]:
    """Return the state of each model by its name; nothing if the supervisor does not answer."""
    try:
        reply: dict[str, Any] = await request.app.state.link.client.models()
    except (WireError, TimeoutError):
        return {}
    return {model["name"]: model["state"] for model in reply["models"]}
