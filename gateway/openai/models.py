"""GET /v1/models and /v1/models/{id}."""

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import caller_of
from gateway.http.errors import ApiError
from protocol.errors import ErrorCode, WireError

CREATED = int(time.time())
"""The API asks for a time of creation. Models have none here, so the gateway's start stands for it."""


async def models(request: Request) -> Response:
    """GET /v1/models: every configured model. It is answered from memory, and no model is started for it."""
    listed = [_described(model) for model in await _listed(request)]
    return Response(orjson.dumps({"object": "list", "data": listed}), media_type="application/json")


async def model(request: Request) -> Response:
    """GET /v1/models/{id}."""
    name = request.path_params["name"]
    for one in await _listed(request):
        if one["name"] == name:
            return Response(orjson.dumps(_described(one)), media_type="application/json")
    raise WireError(ErrorCode.MODEL_NOT_FOUND, f"no model {name[:64]!r} is configured", field="model")


async def _listed(request: Request) -> list[dict[str, Any]]:
    state = request.app.state
    reply = await state.link.call(caller_of(request), "models")
    found = reply.get("models")
    if not isinstance(found, list):
        raise ApiError(502, "the supervisor's list of models cannot be read", code="internal")
    return found


def _described(one: dict[str, Any]) -> dict[str, Any]:
    """Return a model with the keys that clients of other servers look for, too."""
    described: dict[str, Any] = {
        "id": one["name"],
        "object": "model",
        "created": CREATED,
        "owned_by": "modelctl",
        "name": one["name"],
        "state": one["state"],
        "status": {"value": "loaded" if one["state"] == "ready" else "unloaded"},
        "capabilities": {"chat": one["chat"], "completion": True, "vision": False, "function_calling": False},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    if one["context"] is not None:
        context = one["context"]
        described |= {"max_model_len": context, "context_length": context, "max_context_length": context}
        described["meta"] = {"n_ctx": context}
    return described
