"""The OpenAPI document of the gateway, at /openapi.json.

The options of this project come from the model that the worker validates requests with, so no limit stands twice.
"""

import asyncio
from functools import cache
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.anthropic.schema import ERROR, MESSAGES, RENDERED
from gateway.openai.foreign_options import NO_EFFECT, SYNONYMS
from gateway.openai.options import MOST_ANSWERS, OWN
from gateway.openai.tools import MOST_TOOLS, NAME
from gateway.responses.options import KNOWN
from gateway.responses.schema import RESPONSES
from protocol import __version__

Schema = dict[str, Any]
_TEXT: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}
_MODEL: Final[Schema] = {"type": "string", "description": "The name of a model: GET /v1/models lists them."}
_MESSAGES: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["developer", "system", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": _TEXT},
                        },
                    },
                    {"type": "null"},
                ]
            },
            "name": _TEXT,
            "tool_calls": {"type": "array", "items": _OBJECT},
            "tool_call_id": _TEXT,
            "reasoning_content": {"anyOf": [_TEXT, {"type": "null"}]},
        },
    },
}
_NAMED: Final[Schema] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_TOOL: Final[Schema] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": _TEXT,
                "parameters": {**_OBJECT, "description": "The JSON schema of the arguments."},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_ALLOWED: Final[Schema] = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": _NAMED},
            },
        },
    },
}
_OF_TOOLS: Final[Schema] = {
    "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": _TOOL},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED, _ALLOWED]},
    "parallel_tool_calls": {"type": "boolean", "default": True},
    "reasoning_effort": _TEXT,
    "reasoning_budget": {"type": "integer", "minimum": 0},
    **{name: {"type": "integer", "minimum": 0} for name, ours in SYNONYMS.items() if ours == "reasoning_budget"},
}
_COMMON: Final[Schema] = {
    "model": _MODEL,
    "stream": {"type": "boolean", "default": False, "description": "Send the answer as server-sent events."},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "n": {"type": "integer", "minimum": 1, "maximum": MOST_ANSWERS, "default": 1},
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _OBJECT},
    },
}
_ROUTE: Final[Schema] = {
    "resume": {"type": "boolean"},
    "priority": {"enum": ["interactive", "normal", "batch"]},
    **{name: {"type": "integer", "minimum": 1} for name in ("queue_ms", "ttft_ms", "deadline_ms")},
    "affinity": {"type": "string", "minLength": 1, "maxLength": 256},
    "keep_alive": {"type": ["number", "string"], "description": "Seconds, or a duration such as 5m."},
    "ttl": {"type": "integer", "minimum": 1},
}
_ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    # The first request makes the document, which takes 100 ms. In a thread it does not hold up the streams meanwhile.
    return Response(orjson.dumps(await asyncio.to_thread(document)), media_type="application/json")


@cache
def document() -> Schema:
    """Return the OpenAPI document."""
    options = _options()
    chat = options | _COMMON | _OF_TOOLS | {
        "messages": _MESSAGES,
        "chat_template_kwargs": _OBJECT,
    }  # fmt: skip
    ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    prompt: Schema = {"anyOf": [_TEXT, ids, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, ids]}}]}
    completion = options | _COMMON | {"prompt": prompt, "logprobs": {"type": "integer", "minimum": 0, "maximum": 20}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "modelctl",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs for models of modelctl.",
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation.", chat, ["model", "messages"], stream=True),
            "/v1/completions": _post("Continue a text.", completion, ["model", "prompt"], stream=True),
            "/v1/responses": _post(
                "Answer a conversation of the Responses API.",
                {name: schema for name, schema in options.items() if name in KNOWN}
                | RESPONSES
                | {"model": _MODEL, "n": {"const": 1}, "logprobs": {"const": False}},
                ["model", "input"],
                stream=True,
            ),
            "/v1/messages": _post(
                "Answer a conversation of Anthropic's API.",
                MESSAGES | {"model": _MODEL},
                ["model", "max_tokens", "messages"],
                stream=True,
                anthropic=True,
            ),
            "/v1/messages/count_tokens": _post(
                "Count the tokens of a conversation of Anthropic's API.",
                RENDERED | {"model": _MODEL},
                ["model", "messages"],
                anthropic=True,
            ),
            "/v1/models": _get("List the models."),
            "/v1/models/{id}": _get("Describe a model.", "id"),
            **{
                f"/v1/models/{{id}}/{end}": _order(f"{words}.", _OPTIONS.get(end, {}), "id")
                for end, words in _ORDERS.items()
            },
            "/v1/model/load": _order("Load the model that the body names, as TabbyAPI does.", _NAMED_MODEL),
            "/v1/model/unload": _order(
                "Unload the model that the body names, or all models, as TabbyAPI does.", _NAMED_MODEL
            ),
            "/unload": _order("Unload all models, as llama-swap does.", _NAMED_MODEL),
            "/running": _get("List the models that have a process, as llama-swap does."),
            "/v1/reload": _order("Read models.yaml again, and apply what it changes.", {}),
            "/v1/requests": _get("List the unfinished requests.", query=_REQUESTS),
            "/v1/requests/ended": _get(
                "List the last requests that have ended, or those that have ended after the number in `after`.",
                query=_ENDED,
            ),
            "/v1/requests/{id}/cancel": _order("Cancel a request.", {}, "id"),
            "/v1/usage": _get("Return the tokens of the caller's key, by day and model."),
            "/v1/events": _get("Return the newest events, or those behind the number in `after`.", query=_EVENTS),
            "/v1/logs": _get("Return the last lines of a log, or those behind the position in `after`.", query=_LOGS),
            "/v1/config": _get(
                "Return models.yaml, its values and faults, and what a reload would change.", query=_CONFIG
            ),
            "/tokenize": _post(
                "Return the token ids of a prompt or a conversation.",
                {"model": _MODEL, "prompt": _TEXT, "messages": _MESSAGES, "add_generation_prompt": {"type": "boolean"}},
                ["model"],
            ),
            "/detokenize": _post(
                "Return the text of token ids.", {"model": _MODEL, "tokens": ids}, ["model", "tokens"]
            ),
            "/v1/token/encode": _post(
                "Return the token ids of a text, as TabbyAPI does.", {"model": _MODEL, "text": _TEXT}, ["text"]
            ),
            "/v1/token/decode": _post(
                "Return the text of token ids, as TabbyAPI does.", {"model": _MODEL, "tokens": ids}, ["tokens"]
            ),
            "/apply-template": _post(
                "Return the text that the chat template makes of a conversation.",
                {"model": _MODEL, "messages": _MESSAGES, "add_generation_prompt": {"type": "boolean"}},
                ["messages"],
            ),
            "/tokenizer_info": _get("Return the chat template and the special tokens of a loaded model."),
            "/props": _get("Describe a loaded model, as llama-server does."),
            "/version": _get("Return the version of the gateway."),
            "/v1/model": _get("Describe the default model, or one that is loaded, as TabbyAPI does."),
            "/v1/model/list": _get("List the models."),
            **{
                f"/v1/{path}": _get("List the models that have a chat template.")
                for path in ("template/list", "templates")
            },
            **{f"/v1/{path}": _get("List no adapter, since they belong to models.") for path in _ADAPTERS},
            "/livez": _get("Answer while the gateway's process lives.", public=True),
            "/readyz": _get("Answer 200 if a model answers requests.", public=True),
            "/health": _get("Answer 200 if a model answers requests, and none is being loaded.", public=True),
        },
    }


_ORDERS: Final = {
    "load": "Load a model",
    "unload": "End the process of a model until its next request",
    "reload": "Replace the workers of a model",
    "sleep": "Put a model to sleep",
    "wake": "Wake a model",
    "stop": "Stop a model, so that no request starts it again",
    "restart": "Stop and start the workers of a model, one after the other",
}
_OPTIONS: Final[dict[str, Schema]] = {
    "stop": {"now": {"type": "boolean", "default": False, "description": "Do not wait for unfinished requests."}}
}
_NAMED_MODEL: Final[Schema] = {"model_name": _TEXT}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 1}
_REQUESTS: Final[Schema] = {"limit": _COUNT | {"maximum": 500}}
_ENDED: Final[Schema] = {"after": {"type": "integer", "minimum": 0}, "limit": _COUNT | {"maximum": 1000}}
_EVENTS: Final[Schema] = {
    "model": _TEXT,
    "after": {"type": "integer", "minimum": 0},
    "limit": _COUNT | {"maximum": 512},
}
_LOGS: Final[Schema] = {"model": _TEXT, "lines": _COUNT | {"maximum": 1000}, "after": _TEXT}
_CONFIG: Final[Schema] = {"all": {"type": "boolean", "default": False}}
_ADAPTERS: Final = ("lora", "loras", "lora/list")


def _options() -> Schema:
    """Return the options that a request gives by this project's names, and by other servers' names for them."""
    from protocol.request import GenerateRequest  # brings pydantic: 80 ms that no start of a gateway has to take

    known: Schema = GenerateRequest.model_json_schema()["properties"]
    options = {name: schema for name, schema in known.items() if name in OWN}
    options |= {name: options[ours] for name, ours in SYNONYMS.items() if ours in options}
    options |= _ROUTE | {name: {} for name in NO_EFFECT}
    for schema in options.values():
        schema.pop("title", None)
    return options


def _post(
    summary: str, properties: Schema, required: list[str], *, stream: bool = False, anthropic: bool = False
) -> Schema:
    """Return the description of a path.

    anthropic  the path is one of Anthropic's API, whose errors have another shape
    """
    # null stands for an option that is left out
    shown = {
        name: schema if name in required or not schema else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in sorted(properties.items())
    }
    body = {"type": "object", "required": required, "properties": shown, "additionalProperties": True}
    answers: Schema = {"application/json": {"schema": _OBJECT}}
    if stream:
        answers["text/event-stream"] = {"schema": _TEXT}
    content = {"application/json": {"schema": body}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": {"description": "The answer.", "content": answers}}
            | _errors(ERROR if anthropic else _ERROR),
        }
    }


def _order(summary: str, properties: Schema, parameter: str | None = None) -> Schema:
    """Return the description of a path that gives an order.

    properties  the keys that the body may have
    parameter   the name of a parameter in the path; None for none
    """
    described = _post(summary, properties, [])
    described["post"]["requestBody"]["required"] = False
    if parameter is not None:
        described["post"]["parameters"] = [_parameter(parameter, "path", _TEXT)]
    return described


def _get(summary: str, parameter: str | None = None, *, query: Schema | None = None, public: bool = False) -> Schema:
    described: Schema = {"summary": summary, "responses": {"200": {"description": "The answer."}} | _errors()}
    parameters = [_parameter(parameter, "path", _TEXT)] if parameter is not None else []
    parameters += [_parameter(name, "query", schema) for name, schema in (query or {}).items()]
    if parameters:
        described["parameters"] = parameters
    if public:
        described |= {"security": [], "responses": {"200": {"description": "Yes."}, "503": {"description": "No."}}}
    return {"get": described}


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _errors(schema: Schema = _ERROR) -> Schema:
    return {"default": {"description": "An error.", "content": {"application/json": {"schema": schema}}}}
