"""The OpenAPI document of the gateway, at /openapi.json.

The page /docs shows it, and the endpoints in docs/http-api.md are made of it (``tools.docs.http_options``).
"""

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NotRequired, Union, get_args, get_origin

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.errors import MEANINGS, OVERLOADED
from gateway.openai.embeddings import MOST_INPUTS, ROUTE
from gateway.openai.option_schemas import (
    ADD_PROMPT,
    BOOL,
    BOTH,
    CHAT,
    COMPLETION,
    IDS,
    MODEL,
    OBJECT,
    PARALLEL,
    STREAM,
    TEXT,
    TOOL_NAME,
    Schema,
    array_of,
    object_of,
    own_options,
    said,
    variant_of,
    with_other_names,
)
from gateway.openai.option_schemas import MESSAGES as CONVERSATION
from gateway.openai.requests import MOST_TOOLS
from gateway.orders import options_of
from gateway.responses.requests import KNOWN, NOT_OFFERED
from protocol import __version__
from protocol.attribute_docs import attribute_docs
from protocol.results import result_of
from protocol.values import Within, hints_of, required_of
from protocol.verbs import ANY, VERBS, ModelScope, Right, Verb

# What the OpenAPI document says about the requests of Anthropic's API. Pure.


_TEXT_BLOCK: Final = variant_of("text", ["text"], text=TEXT)
_TEXTS: Final[Schema] = {"anyOf": [TEXT, array_of(_TEXT_BLOCK)]}
_RESULT: Final = variant_of("tool_result", ["tool_use_id"], tool_use_id=TEXT, content=_TEXTS, is_error=BOOL)
_CALL: Final = variant_of("tool_use", ["id", "name", "input"], id=TEXT, name=TEXT, input=OBJECT)
_THINKING: Final = variant_of("thinking", ["thinking"], thinking=TEXT, signature=TEXT)
_REDACTED: Final = variant_of("redacted_thinking", ["data"], data=TEXT)


def _message(role: str, blocks: list[Schema]) -> Schema:
    content: Schema = {"anyOf": [TEXT, array_of({"anyOf": blocks})]}
    return object_of(["role", "content"], role={"const": role}, content=content)


_TURNS: Final = [
    _message("user", [_TEXT_BLOCK, _RESULT]),
    _message("assistant", [_TEXT_BLOCK, _THINKING, _REDACTED, _CALL]),
    _message("system", [_TEXT_BLOCK]),
]
_ANTHROPIC_TOOL: Final = object_of(
    ["name", "input_schema"], name=TOOL_NAME, description=TEXT, input_schema=OBJECT, strict=BOOL
)
_ALONE: Final[Schema] = {"disable_parallel_tool_use": BOOL}
_CHOICE: Final[Schema] = {
    "anyOf": [
        *(variant_of(kind, [], **_ALONE) for kind in ("auto", "any", "none")),
        variant_of("tool", ["name"], name=TEXT, **_ALONE),
    ]
}
_THOUGHT: Final[Schema] = {
    "anyOf": [
        variant_of("enabled", ["budget_tokens"], budget_tokens={"type": "integer", "minimum": 1}),
        variant_of("adaptive", []),
        variant_of("disabled", []),
    ]
}
_SHAPE: Final = variant_of("json_schema", ["schema"], schema=OBJECT)
RENDERED: Final[Schema] = {
    "messages": said(
        array_of({"anyOf": _TURNS}, minItems=1),
        "The conversation, with blocks of the types `text`, `tool_use`, `tool_result`, `thinking` and "
        '`redacted_thinking`, of which the last is left out. `is_error` of a result puts "Error:" before it. A last '
        "message of the assistant is continued. A message of the role `system` becomes a part of the turn before it, "
        "so that the model's cache keeps what precedes it.",
    ),
    "system": said(_TEXTS, "Instructions before the conversation, as a text or text blocks."),
    "tools": said(
        array_of(_ANTHROPIC_TOOL, maxItems=MOST_TOOLS),
        "Tools that the model may call. One with `defer_loading` is shown to the model after a result has a "
        "`tool_reference` with its name. Tools that Anthropic's servers run are left out, and the header "
        "`x-modelctl-changed` says so.",
    ),
    "tool_choice": said(
        _CHOICE,
        "Whether the model calls a tool: as it likes (`auto`), always (`any`), the named one, or never (`none`).",
    ),
    "thinking": said(
        _THOUGHT,
        "`enabled` and `adaptive` set the variables `enable_thinking` and `thinking` of the chat template to true, and "
        "`disabled` sets them to false. `budget_tokens` is the `reasoning_budget`. A model whose reasoning is not "
        "known answers without the budget, and the header `x-modelctl-ignored` says so. Without `thinking`, and with "
        "`disabled`, the answer has no block of the reasoning. With `display: omitted` the block has no text, and its "
        "signature brings the reasoning back to the model with the next request.",
    ),
    "output_config": said(
        {"type": "object", "properties": {"effort": TEXT, "format": _SHAPE}},
        "`effort` becomes the variable `reasoning_effort` of the chat template. `format` with a JSON schema gives the "
        "answer that shape.",
    ),
}
"""Properties of a request to /v1/messages/count_tokens, besides ``model``. Unknown properties are ignored."""
_STOPS: Final = array_of({"type": "string", "minLength": 1, "maxLength": 256}, maxItems=16)
MESSAGES: Final[Schema] = RENDERED | {
    "max_tokens": said(
        {"type": "integer", "minimum": 1},
        "Most tokens of the answer. It may be more than the prompt leaves of the context.",
    ),
    "stop_sequences": said(_STOPS, "Strings that end the answer. They are not part of it."),
    "stream": STREAM,
    "temperature": said(
        {"type": "number", "minimum": 0}, "The randomness of the draw. 0 is greedy: always the likeliest token."
    ),
    "top_p": said(
        {"type": "number", "minimum": 0, "maximum": 1},
        "Draw from the smallest set of tokens whose probabilities sum to this. 0 is greedy.",
    ),
    "top_k": said({"type": "integer", "minimum": 0}, "Draw from this number of likeliest tokens. 0 is off."),
    "metadata": said(OBJECT, "An option about the account. It changes nothing here."),
}
"""Properties of a request to /v1/messages, besides ``model``. Unknown properties are ignored."""
ERROR: Final = variant_of(
    "error", ["error", "request_id"], error=object_of(["type", "message"], type=TEXT, message=TEXT), request_id=TEXT
)


# What the OpenAPI document says about the requests of OpenAI's Responses API. Pure.


def _texts(*kinds: str) -> Schema:
    """Return the schema of a text, or of text parts of these types."""
    return {"anyOf": [TEXT, array_of({"anyOf": [variant_of(kind, ["text"], text=TEXT) for kind in kinds]})]}


_MESSAGE: Final = object_of(
    ["role", "content"],
    type={"const": "message"},
    role={"enum": ["user", "assistant", "system", "developer"]},
    content=_texts("input_text", "output_text"),
)
_ITEMS: Final = [
    _MESSAGE,
    variant_of("function_call", ["call_id", "name", "arguments"], call_id=TEXT, name=TEXT, arguments=TEXT),
    variant_of("function_call_output", ["call_id", "output"], call_id=TEXT, output=_texts("input_text")),
    variant_of("item_reference", ["id"], id=TEXT),
    variant_of("reasoning", [], summary=array_of(variant_of("summary_text", ["text"], text=TEXT))),
]
_RESPONSES_TOOL: Final = variant_of(
    "function",
    ["name"],
    name=TOOL_NAME,
    description=TEXT,
    parameters={"anyOf": [OBJECT, {"type": "null"}]},
    strict={"type": ["boolean", "null"]},
)
_LEFT_OUT: Final = object_of(["type"], type={"type": "string", "not": {"const": "function"}})
"""Tools of other types: the functions of a namespace are offered, and all else is left out."""
_FORMAT: Final[Schema] = {
    "anyOf": [
        variant_of("text", []),
        variant_of("json_object", []),
        variant_of("json_schema", ["schema"], schema=OBJECT, name=TEXT, strict={"type": ["boolean", "null"]}),
    ]
}
_TOOLS: Final = array_of({"anyOf": [_RESPONSES_TOOL, _LEFT_OUT]}, maxItems=MOST_TOOLS)
_CHOICES: Final[Schema] = {
    "anyOf": [{"enum": ["auto", "none", "required"]}, variant_of("function", ["name"], name=TEXT)],
}
RESPONSES: Final[Schema] = {
    "input": said(
        {"anyOf": [TEXT, array_of({"anyOf": _ITEMS}, minItems=1)]},
        "The conversation: a text, or messages, calls of functions, their results, and reasoning. A picture of a user "
        "is refused.",
    ),
    "instructions": said(TEXT, "A system message before the conversation."),
    "tools": said(
        _TOOLS,
        "Functions that the model may call, also those within a tool of the type `namespace`. Other tools are left "
        "out, and the header `x-modelctl-changed` says so.",
    ),
    "tool_choice": said(
        _CHOICES,
        "Whether the model calls a tool: as it likes (`auto`, the default with `tools`), never, always, or the named "
        "one.",
    ),
    "parallel_tool_calls": PARALLEL,
    "max_output_tokens": said(
        {"type": "integer", "minimum": 1},
        "Most tokens of the answer, reasoning included. Unset: what is left of the context.",
    ),
    "text": said(
        {"type": "object", "properties": {"format": _FORMAT, "verbosity": TEXT}},
        "`format` gives the answer the shape of any JSON object or of a schema. `verbosity` changes nothing.",
    ),
    "reasoning": said(
        {"type": "object", "properties": {"effort": TEXT}},
        "`effort` is the variable `reasoning_effort` of the model's chat template. A summary is never written.",
    ),
    "include": said(
        array_of(TEXT),
        "`reasoning.encrypted_content` adds the reasoning in encrypted form. All else changes nothing.",
    ),
    "previous_response_id": said(
        {"type": ["string", "null"]},
        "The conversation goes on behind this response. The gateway keeps it for an hour, and until its next restart.",
    ),
    "store": said(
        {"type": ["boolean", "null"]},
        "False: the response is not kept. It is kept in memory only, never on disk, so OpenAI's 30 days do not hold.",
        default=True,
    ),
    "truncation": said({"enum": ["auto", "disabled", None]}, "A prompt that is too long is refused, also with `auto`."),
    "stream": STREAM,
}
"""Properties of a request to /v1/responses that other requests do not have, or have in another shape."""

_NULLABLE: Final[Schema] = {"type": ["string", "null"]}
_ERROR: Final = object_of(
    ["error"],
    error=object_of(["message", "type", "param", "code"], message=TEXT, type=TEXT, param=_NULLABLE, code=_NULLABLE),
)
_READING: Final = (400, 401, 403, 404, 503, 504)
_ORDERING: Final = (400, 401, 403, 404, 409, 503, 504)
_ASKING: Final = (400, 401, 403, 404, 408, 413, 415, 429, 502, 503, 504)
"""Statuses of errors: of a question without a body, of an order, and of a request with a body."""


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    # The first request makes the document, which takes 100 ms. In a thread it does not hold up the streams meanwhile.
    return Response(orjson.dumps(await asyncio.to_thread(document)), media_type="application/json")


@cache
def document() -> Schema:
    """Return the OpenAPI document."""
    groups = {
        "Answers": _answers(),
        "Vectors": _vectors(),
        "Models": _models(),
        "Orders": _verbs("Orders") | _other_names(),
        "Tokens": _tokens(),
        "Operation": _verbs("Operation"),
        "Keys": _verbs("Keys"),
        "Probes": _probes(),
    }
    for tag, paths in groups.items():
        for methods in paths.values():
            for described in methods.values():
                described["tags"] = [tag]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "modelctl",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs for models of modelctl. Each path also exists with a slash "
            "at its end, without `/v1`, and with two of them.",
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": _errors("", _ERROR) | _errors("anthropic-", ERROR),
        },
        "security": [{"token": []}],
        "tags": [{"name": tag} for tag in groups],
        "paths": {path: methods for paths in groups.values() for path, methods in paths.items()},
    }


def _answers() -> Schema:
    options = with_other_names(own_options() | BOTH)
    chat = with_other_names(own_options() | BOTH | CHAT)
    refused = {name: f"Not offered: {remedy}." for name, remedy in NOT_OFFERED.items()}
    responses = {
        name: said(schema, refused.get(name, schema["description"]))
        for name, schema in options.items()
        if name in KNOWN
    }
    responses |= RESPONSES | {
        "model": MODEL,
        "n": said({"const": 1}, "One response has one answer."),
        "logprobs": said({"const": False}, refused["logprobs"]),
    }
    own = {name: schema for name, schema in own_options().items() if name not in ("logprobs", "top_logprobs")}
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation.",
            "The model's own chat template renders the conversation.",
            "A `chat.completion`, or a stream of `chat.completion.chunk`, which ends with `data: [DONE]`.",
            chat,
            ["model", "messages"],
            stream=True,
        ),
        "/v1/completions": _post(
            "Continue a text, or several.",
            "A prompt is text or an array of token ids. No chat template is used.",
            "A `text_completion`, or a stream of such parts, which ends with `data: [DONE]`.",
            options | COMPLETION,
            ["model", "prompt"],
            stream=True,
        ),
        "/v1/responses": _post(
            "Answer a conversation of OpenAI's Responses API.",
            "Earlier items are kept in memory for an hour, for `previous_response_id`. A response cannot be fetched.",
            "A `response`, or a stream of its events.",
            responses,
            ["model", "input"],
            stream=True,
        ),
        "/v1/messages": _post(
            "Answer a conversation of Anthropic's API.",
            "Unknown options are ignored, and the header `x-modelctl-ignored` names them.",
            "A `message`, or a stream of its events.",
            own | MESSAGES | {"model": MODEL},
            ["model", "max_tokens", "messages"],
            stream=True,
            anthropic=True,
        ),
        "/v1/messages/count_tokens": _post(
            "Count the tokens of a conversation of Anthropic's API.",
            "The conversation is rendered with the model's chat template, and no answer is computed.",
            "`input_tokens`, as the `usage` of an answer would have it.",
            RENDERED | {"model": MODEL},
            ["model", "messages"],
            anthropic=True,
        ),
    }


def _vectors() -> Schema:
    served = {name: schema for name, schema in own_options().items() if name in ROUTE}
    cut = said(BOOL, "Cut texts that the model cannot take whole. False: such a request is refused.", default=False)
    named = said(TEXT, "The name of the model's prompt that stands before each text, such as `query`; empty for none.")
    texts = {"anyOf": [TEXT, IDS, array_of({"anyOf": [TEXT, IDS]}, minItems=1, maxItems=MOST_INPUTS)]}
    document: Schema = {"anyOf": [TEXT, object_of(["text"], text=TEXT)]}
    return {
        "/v1/embeddings": _post(
            "Return the vectors of texts.",
            "For a model with `engine: embedding`.",
            "A `list` of an `embedding` for each text, in their order.",
            served
            | {
                "model": MODEL,
                "input": said(texts, "The text, or several. Token ids are used as they are, without special tokens."),
                "dimensions": said(
                    {"type": "integer", "minimum": 1},
                    "Keep this many numbers of each vector, and give the vector the length 1 again.",
                ),
                "encoding_format": said(
                    {"enum": ["float", "base64"]},
                    "`base64`: each vector is a text, of floats of 32 bits, little endian.",
                    default="float",
                ),
                "prompt_name": named,
                "truncate": cut,
                "user": said(TEXT, "An option about the account. It changes nothing here."),
            },
            ["model", "input"],
        ),
        "/v1/rerank": _post(
            "Return how well documents answer a query.",
            "For a reranker with `engine: embedding`. The form is that of Jina, Cohere, vLLM and llama-server. Scores "
            "of most models lie between 0 and 1; llama-server's are logits. The order is the same.",
            "`results`, the best first, each with `index` and `relevance_score`.",
            served
            | {
                "model": MODEL,
                "query": said(TEXT, "What the documents are compared with."),
                "documents": said(
                    array_of(document, minItems=1, maxItems=MOST_INPUTS),
                    "The documents: texts, or objects with `text`.",
                ),
                "top_n": said({"type": "integer", "minimum": 0}, "Most results. 0: all.", default=0),
                "return_documents": said(BOOL, "Repeat the document in each result.", default=False),
                "instruction": said(TEXT, "What the model is asked to look for, for models such as Qwen3-Reranker."),
                "truncate": cut,
                "user": said(TEXT, "An option about the account. It changes nothing here."),
            },
            ["model", "query", "documents"],
        ),
    }


def _models() -> Schema:
    listed = "A `list`. Each alias and each variant is an entry of its own."
    which = {"model": said(TEXT, "The name of another model than the default one.")}
    page = {
        "limit": said({"type": "integer", "minimum": 1, "maximum": 1000}, "Most entries. Without it: all."),
        "after_id": said(TEXT, "The list begins behind this id."),
        "before_id": said(TEXT, "The list ends before this id."),
    }
    templates = _get("List the models that have a chat template.", "TabbyAPI's list.", "A `list` of names.")
    adapters = _get("List no adapter.", "TabbyAPI's list. Adapters belong to their model here.", "An empty `list`.")
    return {
        "/v1/models": _get(
            "List the models.", "Every model of models.yaml that the key may use. It loads none.", listed, query=page
        ),
        "/v1/models/{id}": _get(
            "Describe a model.",
            "Keys with the right `status` or `admin` also get, in the object `modelctl`, the state of each worker "
            "(`workers`), the keys of models.yaml (`settings`), and what requests have taken (`figures`).",
            "A `model`, with the keys that clients of several servers look for.",
            path={"id": MODEL},
        ),
        "/v1/model": _get(
            "Describe the default model.",
            "TabbyAPI's path. If there is no default model, the answer describes one that is loaded.",
            "A `model`, and its `parameters`.",
            query=which,
        ),
        "/v1/model/list": _get("List the models.", "TabbyAPI's path for `GET /v1/models`.", listed, query=page),
        "/v1/template/list": templates,
        "/v1/templates": templates,
        "/v1/lora": adapters,
        "/v1/loras": adapters,
        "/v1/lora/list": adapters,
        "/running": _get(
            "List the models that have a process.", "llama-swap's path.", "`running`: a list of `model` and `state`."
        ),
        "/tokenizer_info": _get(
            "Return the chat template and the special tokens of a loaded model.",
            "vLLM's path. It loads no model: the answer is 503 while the model is not loaded.",
            "The special tokens by name, and `chat_template`.",
            query=which,
        ),
        "/props": _get(
            "Describe a loaded model.",
            "llama-server's path. It loads no model: the answer is 503 while the model is not loaded.",
            "Its context, chat template and special tokens.",
            query=which,
        ),
        "/version": _get("Return the version of the gateway.", "vLLM's path.", "`version`."),
    }


def _other_names() -> Schema:
    """Return the paths that other servers have for orders."""
    named = {"model_name": said(TEXT, "The name of the model. `name` and `model` are other names of this key.")}
    return {
        "/v1/model/load": _order(
            "Load the model that the body names.",
            "TabbyAPI's path. Without a name it loads the default model. Other options of a load are refused: they "
            "belong in models.yaml.",
            named,
        ),
        "/v1/model/unload": _order(
            "Unload the model that the body names.", "TabbyAPI's path. Without a name it unloads all models.", named
        ),
        "/unload": _order("Unload all models, or the one that the body names.", "llama-swap's path.", named),
    }


def _tokens() -> Schema:
    rendered = {
        "messages": said(CONVERSATION, "A conversation, which the model's chat template renders."),
        "tools": said(array_of(OBJECT), "Functions for the chat template."),
        "chat_template_kwargs": said(OBJECT, "Further variables of the chat template."),
        "add_generation_prompt": ADD_PROMPT,
        "continue_final_message": said(BOOL, "Continue the last message.", default=False),
    }
    content = said(TEXT, "The text, by the name that llama-server has for it.")
    special = {
        name: said(BOOL, "False: leave out the token that marks the beginning of a text.", default=True)
        for name in ("add_special_tokens", "add_special")
    }
    waits = "A lazy model is loaded for it."
    return {
        "/tokenize": _post(
            "Return the token ids of a prompt or a conversation.",
            f"vLLM's and llama-server's path. Give `prompt`, `content` or `messages`. {waits}",
            "`tokens`, `count` and `max_model_len`.",
            {
                "model": MODEL,
                "prompt": said(TEXT, "The text."),
                "content": content,
                **rendered,
                **special,
                "return_token_strs": said(BOOL, "Add the text of each token, in `token_strs`.", default=False),
                "with_pieces": said(BOOL, "Make each token an object with `id` and `piece`.", default=False),
            },
            ["model"],
        ),
        "/detokenize": _post(
            "Return the text of token ids.",
            f"vLLM's and llama-server's path. Special tokens are left out. {waits}",
            "The text, as `prompt`, `content` and `text`.",
            {"model": MODEL, "tokens": said(IDS, "The token ids.")},
            ["model", "tokens"],
        ),
        "/v1/token/encode": _post(
            "Return the token ids of a text.",
            f"TabbyAPI's path. {waits}",
            "`tokens` and `length`.",
            {
                "model": MODEL,
                "text": said({"anyOf": [TEXT, CONVERSATION]}, "The text, or a conversation."),
                "add_bos_token": said(
                    BOOL, "False: leave out the token that marks the beginning of a text.", default=True
                ),
            },
            ["text"],
        ),
        "/v1/token/decode": _post(
            "Return the text of token ids.",
            f"TabbyAPI's path. Special tokens are left out. {waits}",
            "`text`.",
            {"model": MODEL, "tokens": said(IDS, "The token ids.")},
            ["tokens"],
        ),
        "/apply-template": _post(
            "Return the text that the chat template makes of a conversation.",
            f"llama-server's path. {waits}",
            "`prompt`.",
            {"model": MODEL, **rendered},
            ["messages"],
        ),
    }


def _verbs(tag: str) -> Schema:
    """Return the endpoints of verbs, as ``protocol.verbs`` describes them. ``tag``: the group of endpoints."""
    made: Schema = {}
    for name, verb in VERBS.items():
        if tag == ("Keys" if "/keys" in verb.http else "Orders" if verb.order else "Operation"):
            for endpoint in filter(None, verb.http.split(", ")):
                method, _, path = endpoint.partition(" ")
                shown = path.replace("{model}", "{id}")  # as in GET /v1/models/{id}
                made.setdefault(f"/v1{shown}", {})[method.lower()] = _verb(name, verb, method, path)
    return made


def _verb(name: str, verb: Verb, method: str, path: str) -> Schema:
    """Return the description of one endpoint of a verb."""
    result, docs = result_of(verb), attribute_docs(verb.params)
    options = {key: said(_schema_of(hint), docs[key]) for key, hint in hints_of(verb.params).items()}
    places = {key: options[key] for key in options if f"{{{key}}}" in path}
    if "model" in places:
        places = {"id": MODEL}
    known = {key: options[key] for key in options_of(name, re.findall(r"{(\w+)}", path))}
    about = [*_who(verb, of_all="model" not in path and "model" not in known)]
    answer = ", ".join(f"`{key}`" for key in hints_of(result)) or "The order was carried out"
    if method == "GET":
        about += (result.__dict__["__doc__"] or "").split()
        return dict(_get(verb.purpose, " ".join(about), f"{answer}.", query=known)["get"])
    answer = f"{answer}." if verb.off else _BEGUN
    described: Schema = _order(verb.purpose, " ".join(about), known, answer, path=places)["post"]
    required = sorted(known.keys() & required_of(verb.params))
    described["requestBody"]["content"]["application/json"]["schema"]["required"] = required
    described["requestBody"]["required"] = bool(required)
    return described


def _who(verb: Verb, *, of_all: bool) -> Iterator[str]:
    """Yield the sentences that say which keys may use an endpoint. ``of_all``: whether a request names no model."""
    rights = " or ".join(f"`{right}`" for right in Right if right in verb.rights)
    if verb.rights != ANY:
        yield f"For keys{' for all models' if of_all and verb.scope is ModelScope.ALL else ''} with the right {rights}."
    if verb.off:
        yield "Off with `auth: none`."


def _schema_of(hint: Any) -> Schema:
    """Return the schema of a parameter. That it may be left out, or be null, stands elsewhere."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return _schema_of(parts[0])
    if origin is Annotated:
        bounds = {"minimum": parts[1].least, "maximum": parts[1].most} if isinstance(parts[1], Within) else {}
        return _schema_of(parts[0]) | bounds
    if origin in (Union, UnionType):
        some = [_schema_of(part) for part in parts if part is not NoneType]
        return some[0] if len(some) == 1 else {"anyOf": some}
    if origin is list:
        return {"type": "array", "items": _schema_of(parts[0])}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: "number"}[hint]}


def _probes() -> Schema:
    return {
        "/livez": _probe(
            "Say whether the gateway's process lives.", "For what restarts a process that hangs. It asks nobody."
        ),
        "/readyz": _probe(
            "Say whether a model answers requests.",
            "For load balancers. A model that its next request would load counts, too.",
            {"model": said(TEXT, "Say it of this model. This takes a token of a key that may use the model.")},
        ),
        "/health": _probe(
            "Say whether a model answers requests, and none is being loaded.",
            "For scripts that wait until everything has started.",
        ),
    }


def _post(
    summary: str,
    about: str,
    answer: str,
    properties: Schema,
    required: list[str],
    *,
    stream: bool = False,
    anthropic: bool = False,
) -> Schema:
    """Return the description of a path.

    about      what else there is to know about it
    answer     what an answer with the status 200 is
    anthropic  the path is one of Anthropic's API, whose errors have another shape
    """
    shown = {name: _optional(schema, name in required) for name, schema in sorted(properties.items())}
    body = {"type": "object", "required": required, "properties": shown, "additionalProperties": True}
    answers: Schema = {"application/json": {"schema": OBJECT}}
    if stream:
        answers["text/event-stream"] = {"schema": TEXT}
    described = _described(summary, about, answer, (*_ASKING, OVERLOADED) if anthropic else _ASKING, anthropic)
    described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    described["responses"]["200"]["content"] = answers
    return {"post": described}


def _optional(schema: Schema, required: bool) -> Schema:
    """Return the schema of an option. For one that is not required, null is as good as leaving it out."""
    kept = {key: schema[key] for key in schema if key in ("description", "default") or key.startswith("x-")}
    value = {key: schema[key] for key in schema if key not in kept}
    nullable = not value or {"type": "null"} in value.get("anyOf", ())
    return kept | (value if required or nullable else {"anyOf": [value, {"type": "null"}]})


_BEGUN: Final = "What the order begins: the `state` of each worker. The order goes on."


def _order(summary: str, about: str, properties: Schema, answer: str = _BEGUN, *, path: Schema | None = None) -> Schema:
    """Return the description of a path that gives an order.

    properties  the keys that the body may have
    path        the parameters in the path, each with its schema
    """
    described = _post(summary, about, answer, properties, [])["post"]
    described["responses"] = _described(summary, about, answer, _ORDERING)["responses"]
    described["requestBody"]["required"] = False
    described["requestBody"]["content"]["application/json"]["schema"]["additionalProperties"] = False
    if path is not None:
        described["parameters"] = _parameters("path", path)
    return {"post": described}


def _get(summary: str, about: str, answer: str, *, path: Schema | None = None, query: Schema | None = None) -> Schema:
    """Return the description of a path without a body, see ``_post`` and ``_order``. ``query``: its parameters."""
    described = _described(summary, about, answer, _READING)
    if parameters := _parameters("path", path or {}) + _parameters("query", query or {}):
        described["parameters"] = parameters
    return {"get": described}


def _probe(summary: str, about: str, query: Schema | None = None) -> Schema:
    described: Schema = {
        "summary": summary,
        "description": about,
        "security": [],
        "responses": {"200": {"description": "Yes."}, "503": {"description": "No."}},
    }
    if query:
        described["parameters"] = _parameters("query", query)
        described["responses"]["401"] = {"$ref": "#/components/responses/401"}
    return {"get": described}


def _described(summary: str, about: str, answer: str, statuses: tuple[int, ...], anthropic: bool = False) -> Schema:
    name = "anthropic-" if anthropic else ""
    errors = {str(status): {"$ref": f"#/components/responses/{name}{status}"} for status in statuses}
    return {
        "summary": summary,
        "description": about,
        "responses": {
            "200": {"description": answer},
            **errors,
            "default": {"$ref": f"#/components/responses/{name}default"},
        },
    }


def _parameters(place: str, parameters: Schema) -> list[Schema]:
    """Return the parameters of a path or of a query. The description of each stands beside its schema."""
    return [
        {
            "name": name,
            "in": place,
            "required": place == "path",
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in parameters.items()
    ]


def _errors(prefix: str, schema: Schema) -> Schema:
    """Return the answers with errors, by their names in the components of the document."""
    content = {"application/json": {"schema": schema}}
    found = {f"{prefix}{status}": {"description": words, "content": content} for status, words in MEANINGS.items()}
    return found | {f"{prefix}default": {"description": "Any other error.", "content": content}}
