"""What the OpenAPI document says about the options of OpenAI's chats and completions. Pure.

The options of this project come from the model that the worker validates requests with. Their descriptions are the
texts below its fields. The descriptions of the other options stand here. docs/http-api.md is made of both
(``tools.docs.request_options``, ``tools.docs.http_options``). So neither a limit nor a description stands twice.
"""

from functools import cache
from typing import Any, Final

from gateway.openai.foreign_options import NO_EFFECT_OF, SYNONYMS
from gateway.openai.requests import MOST_ANSWERS, MOST_TOOLS, MOST_TOP, NAME, OWN
from protocol.attribute_docs import attribute_docs
from protocol.bodies import RouteKeys
from protocol.values import json_schemas

Schema = dict[str, Any]
SAME: Final = "x-modelctl-same-as"
"""Key of the schema of a synonym: the option that it stands for."""
UNUSED: Final = "x-modelctl-unused"
"""Key of the schema of an option that changes nothing."""
TEXT: Final[Schema] = {"type": "string"}
OBJECT: Final[Schema] = {"type": "object"}
BOOL: Final[Schema] = {"type": "boolean"}


def array_of(items: Schema, **bounds: int) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", **bounds, "items": items}


def object_of(required: list[str], **properties: Schema) -> Schema:
    """Return the schema of an object. ``required``: the properties that it must have."""
    return {"type": "object", "required": required, "properties": properties}


def variant_of(kind: str, required: list[str], **properties: Schema) -> Schema:
    """Return the schema of an object whose ``type`` says of which kind it is, as ``object_of``."""
    return object_of(["type", *required], type={"const": kind}, **properties)


def said(schema: Schema, description: str, **more: Any) -> Schema:
    """Return a schema with a description."""
    return {**schema, "description": description, **more}


MODEL: Final = said(TEXT, "The name of a model, an alias or a variant: `GET /v1/models` lists them.")
_MESSAGE: Final = object_of(
    ["role"],
    role={"enum": ["developer", "system", "user", "assistant", "tool"]},
    content={"anyOf": [TEXT, array_of(variant_of("text", ["text"], text=TEXT)), {"type": "null"}]},
    name=TEXT,
    tool_calls=array_of(OBJECT),
    tool_call_id=TEXT,
    reasoning_content={"anyOf": [TEXT, {"type": "null"}]},
)
MESSAGES: Final = said(
    array_of(_MESSAGE, minItems=1),
    "The conversation. The content of a message is a text or an array of text parts. The role `developer` stands for "
    "`system`. If the last message is the assistant's and has `prefix: true`, the answer continues it.",
)
TOOL_NAME: Final[Schema] = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_NAMED: Final = variant_of("function", ["function"], function=object_of(["name"], name=TEXT))
_FUNCTION: Final = object_of(
    ["name"],
    name=TOOL_NAME,
    description=TEXT,
    parameters=said(OBJECT, "The JSON schema of the arguments."),
    strict={"type": ["boolean", "null"]},
)
_TOOL: Final = variant_of("function", ["function"], function=_FUNCTION)
_SOME: Final = object_of(["mode", "tools"], mode={"enum": ["auto", "required"]}, tools=array_of(_NAMED, minItems=1))
_ALLOWED: Final = variant_of("allowed_tools", ["allowed_tools"], allowed_tools=_SOME)
_CHOICES: Final[Schema] = {"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED, _ALLOWED]}
_BUDGET: Final[Schema] = {"type": "integer", "minimum": 0}
IDS: Final = array_of({"type": "integer", "minimum": 0})
_PROMPTS: Final[Schema] = {"anyOf": [TEXT, IDS, array_of({"anyOf": [TEXT, IDS]}, minItems=1)]}
ADD_PROMPT: Final = said(BOOL, "End the text where the assistant speaks next.", default=True)
STREAM: Final = said(BOOL, "Send the answer as server-sent events.", default=False)
PARALLEL: Final = said(BOOL, "Allow more than one call of a tool in an answer.", default=True)
_SHAPES: Final = object_of(["type"], type={"enum": ["text", "json_object", "json_schema"]}, json_schema=OBJECT)
_THINKING: Final = object_of(
    ["type"], type={"enum": ["enabled", "disabled", "adaptive", "auto"]}, budget_tokens=_BUDGET
)
_REASONING: Final[Schema] = {
    "type": "object",
    "properties": {"enabled": BOOL, "effort": TEXT, "max_tokens": _BUDGET},
}
BOTH: Final[Schema] = {
    "model": MODEL,
    "stream": STREAM,
    "stream_options": said(
        {"type": "object", "properties": {"include_usage": BOOL}},
        "With `include_usage: true` the last event of a stream has no choices, but `usage` and `timings`.",
    ),
    "n": said(
        {"type": "integer", "minimum": 1, "maximum": MOST_ANSWERS},
        "The number of answers. Their seeds are `seed`, `seed` + 1, and so on. The prompts of a completion times `n` "
        "are at most 1024.",
        default=1,
    ),
    "response_format": said(
        _SHAPES,
        "The shape of the answer: any text, any JSON object, or JSON that validates against a schema, also with "
        "`strict: false`.",
    ),
    "cut_to_context": said(
        BOOL,
        "Let the end of the context cut the answer, if `max_tokens` is more than the prompt leaves of the context. "
        "False refuses such a request.",
        default=True,
    ),
    "prompt_logprobs": said(
        {"type": "integer", "minimum": 0, "maximum": MOST_TOP},
        "Add a list of vLLM's shape with the log-probability of each token of the prompt, and this number of likeliest "
        "tokens at its place. Not for streams, and only with `n: 1`.",
    ),
    "structured_outputs": said(
        {"type": "object", "properties": {"json": {}, "regex": TEXT, "choice": array_of(TEXT)}},
        "vLLM's form of `json_schema`, `regex` and `choice`. Give one of the three.",
    ),
    "do_sample": said(BOOL, "False: greedy decoding, as `temperature: 0`."),
    "dynamic_temperature": said(BOOL, "False: leave `min_temp`, `max_temp` and `temp_exponent` out."),
}
"""Options of chats and of completions, besides those of this project that have the same form over HTTP."""
CHAT: Final[Schema] = {
    "messages": MESSAGES,
    "tools": said(
        array_of(_TOOL, maxItems=MOST_TOOLS),
        "Functions that the model may call. Tools of other types are left out, and the header `x-modelctl-changed` "
        "says so.",
    ),
    "tool_choice": said(
        _CHOICES,
        "Whether the model calls a tool: as it likes (`auto`, the default with `tools`), never, always, the named "
        "one, or one of those in `allowed_tools`.",
    ),
    "parallel_tool_calls": PARALLEL,
    "reasoning_effort": said(
        TEXT,
        "The variable `reasoning_effort` of the model's chat template, such as `low`, which only some templates read. "
        "`none` switches reasoning off.",
    ),
    "reasoning_budget": said(
        _BUDGET,
        "Most tokens of reasoning; then the model goes on with the answer. If it is not known how the model reasons, "
        "the budget is ignored, and the header `x-modelctl-ignored` says so.",
    ),
    "chat_template_kwargs": said(OBJECT, "Further variables of the model's chat template."),
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": said(BOOL, "Continue the last message, instead of beginning a new turn.", default=False),
    "response_prefix": said(TEXT, "The beginning of the answer, which the model continues. As TabbyAPI has it."),
    "enable_thinking": said(
        {"type": ["boolean", "string"]},
        "Switch reasoning on or off, for chat templates that have such a switch. A text is the `reasoning_effort`.",
    ),
    "thinking": said(
        {"anyOf": [BOOL, _THINKING]},
        "Reasoning on or off, as `enable_thinking`. `budget_tokens` is the `reasoning_budget`.",
    ),
    "reasoning": said(
        {"anyOf": [BOOL, _REASONING]},
        "Reasoning in OpenRouter's form: `enabled` as `enable_thinking`, `effort` as `reasoning_effort`, and "
        "`max_tokens` as `reasoning_budget`.",
    ),
    "verbosity": said(
        {"enum": ["low", "medium", "high"]},
        "The variable `verbosity` of the model's chat template. Few templates read it.",
    ),
}
"""Options of chats alone."""
COMPLETION: Final[Schema] = {
    "prompt": said(
        _PROMPTS,
        "The text that the model continues, as it is: without a chat template. An array of token ids is one prompt, "
        "and an array of texts, or of such arrays, several.",
    ),
    "token_ids": said(IDS, "The prompt as token ids, in place of `prompt`."),
    "logprobs": said(
        {"type": "integer", "minimum": 0, "maximum": MOST_TOP},
        "Report the log-probability of each token, and this number of likeliest tokens at its place.",
    ),
    "echo": said(
        BOOL,
        "Put the prompt before the text. With `logprobs` the lists have the prompt's tokens, too, of which the first "
        "has null.",
        default=False,
    ),
}
"""Options of completions alone."""
_OTHERWISE: Final = {
    "budget_if_reasoning": "Leave `reasoning_budget` out for a model of which it is not known how it reasons. Chats "
    "set it with each `reasoning_budget`, unless `gateway.unknown_options` is `refuse`.",
}
"""Options of this project that mean something else over HTTP than on the wire."""
_ROUTE: Final[Schema] = {
    "resume": {"type": "boolean", "default": True},
    "priority": {"enum": ["interactive", "normal", "batch"], "default": "normal"},
    **{name: {"type": "integer", "minimum": 1} for name in ("queue_ms", "ttft_ms", "deadline_ms")},
    "affinity": {"type": "string", "minLength": 1, "maxLength": 256},
    "keep_alive": {"type": ["number", "string"]},
    "ttl": {"type": "integer", "minimum": 1},
}


@cache
def own_options() -> Schema:
    """Return the options of this project that have one form over HTTP and on the wire."""
    from protocol.request import GenerateRequest  # which no start of a gateway has to wait for

    known: Schema = json_schemas(GenerateRequest)
    options = {name: schema for name, schema in known.items() if name in OWN} | _ROUTE
    docs = {**attribute_docs(GenerateRequest), **attribute_docs(RouteKeys), **_OTHERWISE}
    return {
        name: said(
            {key: value for key, value in schema.items() if (key, value) != ("default", None)},
            " ".join(docs[name].replace("``", "`").split()),
        )
        for name, schema in options.items()
    }


def with_other_names(options: Schema) -> Schema:
    """Return options, the synonyms that other servers have for them, and the options that change nothing."""
    synonyms = {
        name: said(options[ours], f"Another name of `{ours}`.", **{SAME: ours})
        for name, ours in SYNONYMS.items()
        if ours in options and name not in options
    }
    unused = {
        name: said({}, f"An option of {owner}. It changes nothing here.", **{UNUSED: True})
        for owner, names in NO_EFFECT_OF.items()
        for name in names
        if name not in options
    }
    return options | synonyms | unused
