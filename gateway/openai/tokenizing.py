"""POST /tokenize and /detokenize."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_json
from gateway.http.callers import caller_of
from gateway.http.errors import ApiError
from gateway.openai.messages import read_messages
from protocol.client.answers import text_in, token_ids_in
from protocol.client.request_builder import pack_token_ids, tokenize_params

_KEYS = frozenset({"model", "prompt", "content", "messages", "tools", "chat_template_kwargs", "add_generation_prompt"})


async def tokenize(request: Request) -> Response:
    """POST /tokenize: the token ids of a prompt, or of a conversation as the model's chat template renders it."""
    settings = request.app.state.settings
    caller = caller_of(request)
    body = await read_json(request, settings.max_body)
    if unknown := sorted(set(body) - _KEYS):
        raise ApiError(400, f"unknown option {unknown[0][:64]!r}", param=unknown[0][:64])
    given: dict[str, Any] = {
        "prompt": body.get("prompt", body.get("content")),
        "tools": body.get("tools"),
        "template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": body.get("add_generation_prompt"),
    }
    if body.get("messages") is not None:
        given["messages"] = read_messages(body["messages"])
    reply = await request.app.state.link.call(caller, "tokenize", **tokenize_params(_model(body), given))
    ids = token_ids_in(reply)
    return Response(orjson.dumps({"tokens": ids, "count": len(ids)}), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids."""
    settings = request.app.state.settings
    caller = caller_of(request)
    body = await read_json(request, settings.max_body)
    if unknown := sorted(set(body) - {"model", "tokens"}):
        raise ApiError(400, f"unknown option {unknown[0][:64]!r}", param=unknown[0][:64])
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
        raise ApiError(400, "tokens must be an array of token ids, which are whole numbers", param="tokens")
    ids = pack_token_ids(tokens)
    text = text_in(await request.app.state.link.call(caller, "detokenize", model=_model(body), token_ids=ids))
    return Response(orjson.dumps({"prompt": text, "content": text}), media_type="application/json")


def _model(body: dict[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise ApiError(400, "model must be the name of a model: GET /v1/models lists them", param="model")
    return model
