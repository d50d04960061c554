"""What the OpenAPI document says about the requests of Anthropic's API. Pure."""

from typing import Any, Final

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
    "messages": _MESSAGES,
    "system": _TEXTS,
    "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": _TOOL},
    "tool_choice": _CHOICE,
    "thinking": _THOUGHT,
    "output_config": {"type": "object", "properties": {"effort": _TEXT, "format": _SHAPE}},
}
"""Properties of a request to /v1/messages/count_tokens, besides ``model``. Unknown properties are ignored."""
MESSAGES: Final[Schema] = RENDERED | {
    "max_tokens": {"type": "integer", "minimum": 1},
    "stop_sequences": {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 256}},
    "stream": {"type": "boolean", "default": False},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0},
    "metadata": _OBJECT,
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
