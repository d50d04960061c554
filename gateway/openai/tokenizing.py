"""The tokenizer and the chat template of a model, under the paths and in the shapes of the servers that people know.

    vLLM          POST /tokenize, POST /detokenize, GET /tokenizer_info
    llama-server  POST /tokenize, POST /detokenize, POST /apply-template, GET /props
    TabbyAPI      POST /v1/token/encode, POST /v1/token/decode

An answer has the keys of all servers that have its path. Questions about tokens wait for a lazy model, which they have
loaded, as a request does. ``/props`` and ``/tokenizer_info`` load nothing, because some clients ask for them often.
"""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of
from gateway.http.errors import ApiError
from gateway.http.event_stream import WholeAnswer
from gateway.http.notes import Notes, notes_of
from gateway.openai.messages import read_messages
from gateway.openai.models import shown_model
from gateway.openai.options import read_model
from protocol import __version__
from protocol.client.answers import text_in, token_ids_in
from protocol.client.request_builder import pack_token_ids, tokenize_params
from protocol.errors import WireError


async def tokenize(request: Request) -> WholeAnswer:
    """POST /tokenize: the token ids of a prompt, or of a conversation as the model's chat template renders it."""
    caller, body = await _asked(request)
    given = _text_of(body, "prompt" if body.get("content") is None else "content", notes_of(request))
    with_ids, with_strings = _bool(body, "with_pieces"), _bool(body, "return_token_strs")
    if "prompt" in given and not (_bool(body, "add_special_tokens", True) and _bool(body, "add_special", True)):
        given["add_special"] = False
    if with_ids or with_strings:
        given["with_pieces"] = True

    def shown(reply: dict[str, Any]) -> dict[str, Any]:
        ids = token_ids_in(reply)
        pieces = [piece.decode(errors="replace") for piece in reply.get("pieces", ())]
        tokens = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)] if with_ids else ids
        strings = {"token_strs": pieces} if with_strings else {}
        return {"tokens": tokens, "count": len(ids), "max_model_len": reply.get("context")} | strings

    return _answer(request, caller, body, given, shown)


async def encode(request: Request) -> WholeAnswer:
    """POST /v1/token/encode: the token ids of a text or of messages, as TabbyAPI answers it."""
    caller, body = await _asked(request)
    text = body.get("text")
    if isinstance(text, list):
        given: dict[str, Any] = {"messages": read_messages(text, notes_of(request)), "add_generation_prompt": False}
    else:
        given = _text_of(body, "text", notes_of(request))
        given["add_special"] = _bool(body, "add_bos_token", True)

    def shown(reply: dict[str, Any]) -> dict[str, Any]:
        ids = token_ids_in(reply)
        return {"tokens": ids, "length": len(ids)}

    return _answer(request, caller, body, given, shown)


async def apply_template(request: Request) -> WholeAnswer:
    """POST /apply-template: the text that the model's chat template makes of a conversation."""
    caller, body = await _asked(request)
    if body.get("messages") is None:
        raise ApiError(400, "messages is missing: give the conversation to render", param="messages")
    given = _text_of(body, "prompt", notes_of(request)) | {"with_text": True}
    return _answer(request, caller, body, given, lambda reply: {"prompt": text_in(reply)})


async def detokenize(request: Request) -> WholeAnswer:
    """POST /detokenize and /v1/token/decode: the text of token ids, without special tokens."""
    caller, body = await _asked(request)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
        raise ApiError(400, "tokens must be an array of token ids, which are whole numbers", param="tokens")
    params = {"model": read_model(body.get("model")), "token_ids": pack_token_ids(tokens)}

    async def compute() -> Response:
        try:
            text = text_in(await request.app.state.link.ask(caller, "detokenize", **params))
        except WireError as e:
            e.field = "tokens" if e.field == "token_ids" else e.field
            raise
        return _json({"prompt": text, "content": text, "text": text})

    return WholeAnswer(compute)


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info?model=NAME: the chat template and special tokens of a loaded model, as vLLM shows them."""
    _, _, template = await _template(request)
    return _json(template["special_tokens"] | {"chat_template": template["source"]})


async def props(request: Request) -> Response:
    """GET /props?model=NAME: a loaded model, as llama-server shows it."""
    name, context, template = await _template(request)
    tools = template.get("tool_source")
    return _json(
        {
            "model_alias": name,
            "default_generation_settings": {"n_ctx": context},
            "modalities": {"vision": False, "audio": False},
            "chat_template": template["source"] or "",
            "bos_token": template["special_tokens"].get("bos_token", ""),
            "eos_token": template["special_tokens"].get("eos_token", ""),
            "build_info": f"modelctl {__version__}",
        }
        | ({} if tools is None else {"chat_template_tool_use": tools})
    )


async def version(request: Request) -> Response:
    """GET /version: the version of the gateway."""
    caller_of(request)
    return _json({"version": __version__})


async def _template(request: Request) -> tuple[str, int | None, dict[str, Any]]:
    """Return the name, the context and the chat template of the model that a request names."""
    name, one = await shown_model(request)
    reply = await request.app.state.link.call(caller_of(request), "chat_template", model=name)
    if not isinstance(reply.get("special_tokens"), dict) or "source" not in reply:
        raise ApiError(502, "the worker's answer cannot be read", code="internal")
    return name, one["context"], reply


async def _asked(request: Request) -> tuple[Caller, dict[str, Any]]:
    caller = caller_of(request)
    return caller, await read_json(request, request.app.state.settings.max_body, caller)


def _text_of(body: dict[str, Any], called: str, notes: Notes) -> dict[str, Any]:
    """Return the keys of ``tokenize`` for the prompt under the key ``called``, or for the messages of a body."""
    if body.get("messages") is None:
        if not isinstance(body.get(called), str):
            raise ApiError(400, f"{called} must be a string", param=called)
        return {"prompt": body[called]}
    if body.get(called) is not None:
        raise ApiError(400, f"give {called} or messages, not both", param=called)
    return {
        "messages": read_messages(body["messages"], notes),
        "tools": body.get("tools"),
        "template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": body.get("add_generation_prompt"),
        "continue_final_message": body.get("continue_final_message"),
    }


def _bool(body: dict[str, Any], name: str, usual: bool = False) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise ApiError(400, f"{name} must be true or false", param=name)
    return usual if value is None else value


def _answer(request: Request, caller: Caller, body: dict[str, Any], given: dict[str, Any], shown: Any) -> WholeAnswer:
    params = tokenize_params(read_model(body.get("model")), given)

    async def compute() -> Response:
        return _json(shown(await request.app.state.link.ask(caller, "tokenize", **params)))

    return WholeAnswer(compute)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
