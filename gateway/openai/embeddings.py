"""Serve vectors of texts in OpenAI's shape, and scores of documents in that of Jina, Cohere, vLLM and llama-server."""

import asyncio
import base64
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.asking import ignore_stay, named, trace_ids_of, with_model
from gateway.http.answers import WholeAnswer, notes_of
from gateway.http.body import caller_and_body, held_body
from gateway.http.callers import Caller
from gateway.http.errors import checked, checked_or_none, invalid
from gateway.openai.requests import ApiRequest, read_model
from protocol.client.answers import Embeddings
from protocol.client.async_client import AsyncClient

MOST_INPUTS: Final = 2048
"""Most texts of one request, as at OpenAI."""
ROUTE: Final = ("resume", "priority", "queue_ms", "deadline_ms", "keep_alive", "ttl")
"""Options that say how a request is served, as for chats."""
_WORDS: Final = {int: "a whole number", str: "a text", bool: "true or false"}
_AT_ONCE: Final = 16
"""Vectors that are turned into JSON and sent before other requests have their turn: about 10 ms for 4096 numbers
each."""


async def embeddings(request: Request) -> WholeAnswer:
    """POST /v1/embeddings."""
    caller, body = await caller_and_body(request)
    texts = _read_input(body.pop("input", None))
    form = body.pop("encoding_format", None)
    form = "float" if form is None else form
    if form not in ("float", "base64"):
        raise invalid("encoding_format", "must be float or base64")
    wanted = _read_rest(request, body, {"dimensions": int, "prompt_name": str, "truncate": bool})
    wanted.names.update(texts="input", token_ids="input")

    def answer(found: Embeddings, name: str, _: str) -> ASGIApp:
        return VectorList(found, name, packed=form == "base64")

    async def ask(client: AsyncClient, model: str, options: dict[str, Any]) -> Embeddings:
        return await client.embed(model, texts, **options)

    return _answer(request, caller, wanted, ask, answer)


async def rerank(request: Request) -> WholeAnswer:
    """POST /v1/rerank and /rerank."""
    caller, body = await caller_and_body(request)
    query = checked("query", body.pop("query", None), str)
    documents = _read_documents(body.pop("documents", None))
    top = checked_or_none("top_n", body.pop("top_n", None), int, _WORDS[int])
    if top is not None and top < 0:
        raise invalid("top_n", f"is {top}: must be the number of results, or 0 for all")
    returns = checked_or_none("return_documents", body.pop("return_documents", None), bool)
    wanted = _read_rest(request, body, {"instruction": str, "truncate": bool})

    def answer(found: Embeddings, name: str, answer_id: str) -> ASGIApp:
        ranked = sorted(enumerate(found.scores), key=lambda each: -each[1])[: top or None]
        results = [
            {"index": number, "relevance_score": score} | ({"document": {"text": documents[number]}} if returns else {})
            for number, score in ranked
        ]
        shown = {"id": answer_id, "object": "list", "model": name, "results": results, "usage": _usage(found)}
        return Response(orjson.dumps(shown), media_type="application/json")

    async def ask(client: AsyncClient, model: str, options: dict[str, Any]) -> Embeddings:
        return await client.rerank(model, query, documents, **options)

    return _answer(request, caller, wanted, ask, answer)


def _answer(request: Request, caller: Caller, wanted: ApiRequest, ask: Any, answer: Any) -> WholeAnswer:
    """Return the response of a request.

    ask     sends it; called with the client, the model and the options
    answer  returns the answer; called with what came, the name of the model and the id of the answer
    """

    async def compute() -> ASGIApp:
        answer_id = f"emb-{uuid4().hex}"
        known = await with_model(request, wanted)
        await ignore_stay(request, known)
        options: dict[str, Any] = {**known.options, **caller.on_behalf_of()}
        options |= {"trace_ids": trace_ids_of(request, answer_id), "notes": known.notes.for_story() or None}
        held_body(request.scope).sends(1)
        with named(known):
            found = await ask(request.app.state.link.client, known.model, options)
        shown: ASGIApp = answer(found, known.model, answer_id)
        return shown

    return WholeAnswer(compute)


class VectorList:
    """The JSON of a list of vectors, written while it is sent. As text, numbers take five times as many bytes, and a
    client may read slowly. An ASGI application.

    packed  whether vectors are written as base64
    """

    def __init__(self, found: Embeddings, model: str, *, packed: bool) -> None:
        self._found, self._model, self._packed = found, model, packed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for first in range(0, len(self._found), _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, len(self._found)))
            entries = orjson.dumps([self._entry(number) for number in numbers])[1:-1]
            before = b"," if first else b'{"object":"list","data":['
            await send({"type": "http.response.body", "body": before + entries, "more_body": True})
            await asyncio.sleep(0)  # other requests have their turn
        end = orjson.dumps({"model": self._model, "usage": _usage(self._found)})
        await send({"type": "http.response.body", "body": b"]," + end[1:], "more_body": False})

    def _entry(self, number: int) -> dict[str, Any]:
        size = 4 * self._found.size
        vector = self._found.data[size * number : size * (number + 1)]
        shown: Any = base64.b64encode(vector).decode() if self._packed else memoryview(vector).cast("f").tolist()
        return {"object": "embedding", "index": number, "embedding": shown}


def _usage(found: Embeddings) -> dict[str, int]:
    tokens = found.usage.get("prompt_tokens", 0)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _read_input(given: Any) -> list[str | list[int]]:
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(each) is int for each in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be a text, an array of texts, or token ids as an array or as an array of arrays")
    if len(given) > MOST_INPUTS:
        raise invalid("input", f"has {len(given)} texts: at most {MOST_INPUTS}; send several requests")
    is_text = isinstance(given[0], str)
    for number, each in enumerate(given):
        if is_text and not isinstance(each, str):
            raise invalid(f"input[{number}]", "must be a text, as input[0] is")
        if is_text and not each:
            raise invalid(f"input[{number}]", "is empty: leave it out")
        if not is_text and not (isinstance(each, list) and all(type(i) is int and 0 <= i < 1 << 32 for i in each)):
            raise invalid(f"input[{number}]", "must be a text, or an array of token ids, which are whole numbers")
    return given


def _read_documents(given: Any) -> list[str]:
    if not isinstance(given, list) or not given:
        raise invalid("documents", "must be an array of at least one text")
    if len(given) > MOST_INPUTS:
        raise invalid("documents", f"has {len(given)} texts: at most {MOST_INPUTS}; send several requests")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in given]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid(f"documents[{number}]", "must be a text, or an object with the key text")
    return texts


def _read_rest(request: Request, body: dict[str, Any], known: dict[str, type]) -> ApiRequest:
    """Return the model and the options that are left in a body. ``known``: further options with their types."""
    notes, options = notes_of(request), dict[str, Any]()
    model = read_model(body.pop("model", None))
    for name, value in body.items():
        if value is None or name == "user":
            continue
        if name in known:
            options[name] = checked(name, value, known[name], _WORDS[known[name]])
        elif name in ROUTE:
            if not isinstance(value, str | int | float):
                raise invalid(name, "must be a number, a text, or true or false")
            options[name] = value
        else:
            notes.ignore(name)
    return ApiRequest(model, options, {}, 1, False, False, notes=notes)  # type: ignore[arg-type]
