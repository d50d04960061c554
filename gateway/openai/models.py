"""GET /v1/models and /v1/models/{id}, for clients of OpenAI's API and of Anthropic's.

The path is the same in both APIs. So a model has the keys of both lists. Only ``type`` and
``capabilities`` mean two things: clients of Anthropic's API, which send the header anthropic-version, get Anthropic's
values.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.callers import caller_of
from gateway.http.errors import VERSION_HEADER, ApiError, invalid
from protocol.errors import ErrorCode, WireError
from protocol.names import listed_names_of, means, unknown_among

# The list of models as Anthropic's API has it. Its keys stand beside those of OpenAI's list. Pure.


MOST: Final = 1000
"""Largest ``limit``, as at Anthropic."""


def anthropic_keys(name: str, created: int, context: int | None) -> dict[str, Any]:
    """Return the keys of a model in Anthropic's list.

    created  seconds since 1970
    context  most tokens of prompt and answer together; None if they are not known yet
    """
    return {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def capabilities() -> dict[str, Any]:
    """Return the capabilities of a model in Anthropic's shape. What depends on the chat template is said to be there:
    ``thinking`` and ``effort`` change nothing for a model that does not reason."""
    yes, no = {"supported": True}, {"supported": False}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": yes | dict.fromkeys(("low", "medium", "high", "xhigh", "max"), yes),
        "image_input": no,
        "pdf_input": no,
        "server_tools": no | {"web_search": no, "code_execution": no},
        "structured_outputs": yes,
        "thinking": yes | {"types": {"enabled": yes, "adaptive": yes, "between_tools": no, "disabled": yes}},
    }


def page(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list that ``limit``, ``after_id`` and ``before_id`` ask for. Without them, all of it.

    Raises ApiError for a limit that is no number from 1 to 1000, and for an id that is not in the list.
    """
    begin, end = 0, len(models)
    ids = [model["id"] for model in models]
    for name in ("after_id", "before_id"):
        if (given := query.get(name)) is None:
            continue
        if given not in ids:
            raise invalid(name, f"is {given[:64]!r}: no model has this id")
        if name == "after_id":
            begin = ids.index(given) + 1
        else:
            end = ids.index(given)
    limit = len(models) if (given := query.get("limit")) is None else _limit(given)
    chosen = models[begin:end]
    if len(chosen) > limit:  # the models before an id are those directly before it
        chosen = chosen[-limit:] if "before_id" in query else chosen[:limit]
    return {
        "data": chosen,
        "has_more": len(chosen) < max(0, end - begin),
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _limit(given: str) -> int:
    if not given.isdecimal() or not 1 <= int(given[:9]) <= MOST:
        raise invalid("limit", f"is {given[:32]!r}: must be a whole number from 1 to {MOST}")
    return int(given)


STATUS: Final = {
    "ready": "loaded", "loading": "loading", "starting": "loading", "backoff": "loading", "waking": "loading",
    "asleep": "sleeping", "falling_asleep": "sleeping",
}  # fmt: skip
"""llama-server's word for each of our states of a model. Every other state is "unloaded"."""
WORKER: Final = (
    "name", "state", "reason", "state_s", "progress", "active", "queued", "tokens_per_s", "until_s", "generation",
    "lazy", "can_sleep", "engine", "node", "gpu", "placed", "device", "attention", "decoding", "context",
    "max_batch_size", "chat", "template", "end_tokens", "tool_format", "parallel_tool_calls", "reasoning", "pid",
    "restarts", "load_seconds", "wake_s", "host_bytes", "vram_bytes", "vram_estimate_bytes", "folder",
)  # fmt: skip
"""The fields about each worker in the description of one model, by their names in the verb ``status``. Neither the last
lines of a worker nor the path of its log is among them, because logs take another right."""
CREATED = int(time.time())
"""The API asks for a time of creation. Models have none here, so the gateway's start stands for it."""


async def models(request: Request) -> Response:
    """GET /v1/models: every model that models.yaml lists. It is answered from memory, and no model is started for it.

    Each alias and each variant is an entry of its own, because clients choose among the ids that they find.
    """
    usable = await listed(request)
    entries = [_described(model, name, request) for model in usable for name in listed_names_of(model)]
    shown = {"object": "list"} | page(entries, request.query_params)
    return Response(orjson.dumps(shown), media_type="application/json")


async def model(request: Request) -> Response:
    """GET /v1/models/{id}. A key with the right status or admin also gets what ``_details`` returns."""
    name, known = request.path_params["name"], await listed(request)
    for one in known:
        if means(one, name):
            described = _described(one, name, request)
            described["modelctl"] |= await _details(request, one["name"])
            return Response(orjson.dumps(described), media_type="application/json")
    raise unknown_among(known, name)


async def _details(request: Request, model: str) -> dict[str, Any]:
    """Return the workers, the keys of models.yaml and the figures of a model. None in place of each if the sender may
    not know them."""
    link, caller = request.app.state.link, caller_of(request)
    try:
        status = await link.call(caller, "status", model=model)
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
        return {"workers": None, "settings": None, "figures": None}
    workers = status["models"]
    settings = await link.call(caller, "settings", model=model)
    metrics = await link.call(caller, "metrics", model=model)
    return {
        "workers": [{name: worker.get(name) for name in WORKER} for worker in workers],
        "settings": settings["settings"],
        "figures": figures_of(metrics["models"][model], workers[0]["totals"]),
    }


def figures_of(ended: dict[str, Any], totals: dict[str, int]) -> dict[str, Any]:
    """Return what the requests of a model have taken since the supervisor's start. A mean of nothing is None.

    ended   the figures of the ended requests, as the verb ``metrics`` has them
    totals  the counts of the model in the verb ``status``
    """
    histograms, tokens = ended["histograms"], ended["tokens"]
    between_s = _mean(histograms.get("inter_token_latency_seconds"))
    return {
        **totals,
        "ends": ended["ends"],
        "errors_by_name": ended["errors"],
        "prompt_tokens": tokens["prompt"],
        "cached_tokens": tokens["cached"],
        "cached_share": tokens["cached"] / tokens["prompt"] if tokens["prompt"] else None,
        "queue_s": _mean(histograms.get("request_queue_time_seconds")),
        "time_to_first_token_s": _mean(histograms.get("time_to_first_token_seconds")),
        "tokens_per_s": 1 / between_s if between_s else None,
    }


def _mean(histogram: dict[str, Any] | None) -> float | None:
    return None if histogram is None else histogram["sum"] / sum(histogram["counts"])


async def current_model(request: Request) -> Response:
    """GET /v1/model: the model that a request without a name reaches, or else one that is loaded, as TabbyAPI shows it.

    ``?model=NAME`` asks for another one.
    """
    name, one = await shown_model(request)
    parameters = {"max_seq_len": one["context"], "prompt_template": one["name"] if one["chat"] else None}
    return Response(
        orjson.dumps(_described(one, name, request) | {"parameters": parameters}), media_type="application/json"
    )


async def templates(request: Request) -> Response:
    """GET /v1/template/list: the models that have a chat template, in TabbyAPI's shape."""
    names = [one["name"] for one in await listed(request) if one["chat"] and one["name"] in listed_names_of(one)]
    return Response(orjson.dumps({"object": "list", "data": names}), media_type="application/json")


async def adapters(request: Request) -> Response:
    """GET /v1/loras: no adapter, in TabbyAPI's shape, because in models.yaml adapters belong to a model."""
    caller_of(request)
    return Response(orjson.dumps({"object": "list", "data": []}), media_type="application/json")


async def shown_model(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the name, and the description in the supervisor's list, of the model that a GET without a body concerns.

    The parameter ``model`` of the query names it. Without the parameter, it is the default model, else the first one
    that is loaded and listed, else the first listed one. Raises WireError if there is none.
    """
    known = await listed(request)
    if name := request.query_params.get("model", ""):
        found = [one for one in known if means(one, name)]
    else:
        shown = [one for one in known if one.get("default") or listed_names_of(one)]
        found = sorted(shown, key=lambda one: (one.get("default") is None, one["state"] != "ready"))
    if not found:
        raise unknown_among(known, name)
    return name or found[0].get("default") or listed_names_of(found[0])[0], found[0]


async def listed(request: Request) -> list[dict[str, Any]]:
    """Return the models that the sender may use, as the supervisor describes them. Some may have no listed name."""
    state = request.app.state
    reply = await state.link.call(caller_of(request), "models")
    found = reply.get("models")
    if not isinstance(found, list):
        raise ApiError(502, "the supervisor's list of models cannot be read", code="internal")
    return found


async def default_model(request: Request, name: str) -> str:
    """Return the name that a request has given. For the empty name, return the name of the default model.

    Only the supervisor decides which model that is. If it lists none, the empty name is returned, and the supervisor
    refuses the request in its own words.
    """
    if name:
        return name
    return next((one["default"] for one in await listed(request) if one.get("default")), "")


async def is_never_unloaded(request: Request, name: str) -> bool:
    """Return whether a model stays loaded however long it has no requests. False for an unknown model."""
    return any(means(one, name) and not one.get("unloads", True) for one in await listed(request))


def _described(one: dict[str, Any], name: str, request: Request) -> dict[str, Any]:
    """Return a model, also with the keys that clients of llama-swap, llama-server, LM Studio and vLLM look for.

    ``state`` is LM Studio's, ``status`` is llama-swap's and llama-server's. Our own state is in ``modelctl``.

    name  the name under which the model is listed: its own, an alias, or that of a variant
    """
    state, context, shown, makes = one["state"], one["context"], listed_names_of(one), one.get("makes")
    described: dict[str, Any] = anthropic_keys(name, CREATED, context) | {
        "id": name,
        "object": "model",
        "created": CREATED,
        "owned_by": "modelctl",
        "name": name,
        "type": "embeddings" if makes == "vectors" else "llm",
        "state": "loaded" if state == "ready" else "not-loaded",
        "status": {"value": STATUS.get(state, "unloaded")},
        "capabilities": {
            "chat": one["chat"],
            "completion": makes is None,
            "json_schema": makes is None,
            "vision": False,
            "function_calling": one.get("tools"),
            "reranker": makes == "scores",
            "audio_transcriptions": False,
            "audio_speech": False,
            "image_generation": False,
            "image_to_image": False,
        },
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"], "modality": "text->text"},
        "modelctl": {
            "state": state,
            "model": one["name"],
            "aliases": [alias for alias in one.get("aliases", []) if alias in shown],
            "variants": [v for v in one.get("variants", []) if f"{one['name']}:{v}" in shown],
            "default": one.get("default"),
        },
    }
    if one.get("description"):
        described["description"] = one["description"]
    if context is not None:
        described |= {"max_model_len": context, "context_length": context, "max_context_length": context}
        described["meta"] = {"n_ctx": context}
        if state == "ready":
            described["loaded_context_length"] = context
    if VERSION_HEADER in request.headers:
        return described | {"type": "model", "capabilities": capabilities()}
    return described
