"""/livez, /readyz and /health: for load balancers and watchdogs, without a key and without details of models.

Only ``/readyz?model=`` takes a key. Without one, it would tell everybody which models there are.
"""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.http.callers import Caller, caller_of
from gateway.http.errors import ApiError
from gateway.supervisor_link import SupervisorLink
from protocol.client.model_names import means
from protocol.errors import ErrorCode, WireError

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
