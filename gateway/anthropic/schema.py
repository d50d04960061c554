"""What the OpenAPI document says about the requests of Anthropic's API. Pure."""

from typing import Any, Final

from gateway.openai.option_schemas import STREAM, said
from gateway.openai.tools import MOST_TOOLS, NAME

Schema = dict[str, Any]
_TEXT: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}


def _of_type(kind: str, required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}} | properties}


_TEXT_BLOCK: Final = _of_type("text", ["text"], text=_TEXT)
_TEXTS: Final[Schema] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}
_RESULT: Final = _of_type(
    "tool_result", ["tool_use_id"], tool_use_id=_TEXT, content=_TEXTS, is_error={"type": "boolean"}
)
_CALL: Final = _of_type("tool_use", ["id", "name", "input"], id=_TEXT, name=_TEXT, input=_OBJECT)
_THINKING: Final = _of_type("thinking", ["thinking"], thinking=_TEXT, signature=_TEXT)
_REDACTED: Final = _of_type("redacted_thinking", ["data"], data=_TEXT)


def _message(role: str, blocks: list[Schema]) -> Schema:
    content: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": blocks}}]}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


_MESSAGES: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message("user", [_TEXT_BLOCK, _RESULT]),
            _message("assistant", [_TEXT_BLOCK, _THINKING, _REDACTED, _CALL]),
            _message("system", [_TEXT_BLOCK]),
        ]
    },
}
_TOOL: Final[Schema] = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": _TEXT,
        "input_schema": _OBJECT,
        "strict": {"type": "boolean"},
    },
}
_ALONE: Final[Schema] = {"disable_parallel_tool_use": {"type": "boolean"}}
_CHOICE: Final[Schema] = {
    "anyOf": [
        *(_of_type(kind, [], **_ALONE) for kind in ("auto", "any", "none")),
        _of_type("tool", ["name"], name=_TEXT, **_ALONE),
    ]
}
_THOUGHT: Final[Schema] = {
    "anyOf": [
        _of_type("enabled", ["budget_tokens"], budget_tokens={"type": "integer", "minimum": 1}),
        _of_type("adaptive", []),
        _of_type("disabled", []),
    ]
}
_SHAPE: Final = _of_type("json_schema", ["schema"], schema=_OBJECT)
RENDERED: Final[Schema] = {
    "messages": said(
        _MESSAGES,
        "The conversation, with blocks of the types `text`, `tool_use`, `tool_result`, `thinking` and "
        '`redacted_thinking`, of which the last is left out. `is_error` of a result puts "Error:" before it. A last '
        "message of the assistant is continued. A message of the role `system` becomes a part of the turn before it, "
        "so that the model's cache keeps what precedes it.",
    ),
    "system": said(_TEXTS, "Instructions before the conversation, as a text or text blocks."),
    "tools": said(
        {"type": "array", "maxItems": MOST_TOOLS, "items": _TOOL},
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
        {"type": "object", "properties": {"effort": _TEXT, "format": _SHAPE}},
        "`effort` becomes the variable `reasoning_effort` of the chat template. `format` with a JSON schema gives the "
        "answer that shape.",
    ),
}
"""Properties of a request to /v1/messages/count_tokens, besides ``model``. Unknown properties are ignored."""
_STOPS: Final[Schema] = {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 256}}
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
    "metadata": said(_OBJECT, "An option about the account. It changes nothing here."),
}
"""Properties of a request to /v1/messages, besides ``model``. Unknown properties are ignored."""
ERROR: Final[Schema] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}
