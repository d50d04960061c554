"""POST /tokenize and /detokenize."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_json
from gateway.http.callers import caller_of
from gateway.http.errors import ApiError
from gateway.openai.messages import read_messages
from gateway.openai.options import read_model
from protocol.client.answers import text_in, token_ids_in
from protocol.client.request_builder import pack_token_ids, tokenize_params
from protocol.errors import WireError

_KEYS = frozenset({"model", "prompt", "content", "messages", "tools", "chat_template_kwargs", "add_generation_prompt"})


async def tokenize(request: Request) -> Response:
    """POST /tokenize: the token ids of a prompt, or of a conversation as the model's chat template renders it."""
    settings = request.app.state.settings
    caller = caller_of(request)
    body = await read_json(request, settings.max_body, caller)
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
    reply = await request.app.state.link.call(
        caller, "tokenize", **tokenize_params(read_model(body.get("model")), given)
    )
    ids = token_ids_in(reply)
    return Response(orjson.dumps({"tokens": ids, "count": len(ids)}), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids."""
    settings = request.app.state.settings
    caller = caller_of(request)
    body = await read_json(request, settings.max_body, caller)
    if unknown := sorted(set(body) - {"model", "tokens"}):
        raise ApiError(400, f"unknown option {unknown[0][:64]!r}", param=unknown[0][:64])
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
        raise ApiError(400, "tokens must be an array of token ids, which are whole numbers", param="tokens")
    params = {"model": read_model(body.get("model")), "token_ids": pack_token_ids(tokens)}
    try:
        text = text_in(await request.app.state.link.call(caller, "detokenize", **params))
    except WireError as e:
        e.field = "tokens" if e.field == "token_ids" else e.field
        raise
    return Response(orjson.dumps({"prompt": text, "content": text}), media_type="application/json")
