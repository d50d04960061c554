"""What the OpenAPI document says about the requests of OpenAI's Responses API. Pure."""

from typing import Any, Final

from gateway.openai.tools import MOST_TOOLS, NAME

Schema = dict[str, Any]
_TEXT: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}
_NONE: Final[Schema] = {"type": "null"}


def _of_type(kind: str, required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}} | properties}


def _texts(*kinds: str) -> Schema:
    """Return the schema of a text, or of text parts of these types."""
    parts = [_of_type(kind, ["text"], text=_TEXT) for kind in kinds]
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": parts}}]}


_MESSAGE: Final[Schema] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _texts("input_text", "output_text"),
    },
}
_ITEMS: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _MESSAGE,
            _of_type("function_call", ["call_id", "name", "arguments"], call_id=_TEXT, name=_TEXT, arguments=_TEXT),
            _of_type("function_call_output", ["call_id", "output"], call_id=_TEXT, output=_texts("input_text")),
            _of_type("item_reference", ["id"], id=_TEXT),
            _of_type(
                "reasoning", [], summary={"type": "array", "items": _of_type("summary_text", ["text"], text=_TEXT)}
            ),
        ]
    },
}
_TOOL: Final = _of_type(
    "function",
    ["name"],
    name={"type": "string", "pattern": f"^{NAME.pattern}$"},
    description=_TEXT,
    parameters={"anyOf": [_OBJECT, _NONE]},
    strict={"type": ["boolean", "null"]},
)
_LEFT_OUT: Final[Schema] = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"const": "function"}}},
}
"""Tools of other types: the functions of a namespace are offered, and all else is left out."""
_FORMAT: Final[Schema] = {
    "anyOf": [
        _of_type("text", []),
        _of_type("json_object", []),
        _of_type("json_schema", ["schema"], schema=_OBJECT, name=_TEXT, strict={"type": ["boolean", "null"]}),
    ]
}
RESPONSES: Final[Schema] = {
    "input": {"anyOf": [_TEXT, _ITEMS]},
    "instructions": _TEXT,
    "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": {"anyOf": [_TOOL, _LEFT_OUT]}},
    "tool_choice": {
        "anyOf": [{"enum": ["auto", "none", "required"]}, _of_type("function", ["name"], name=_TEXT)],
    },
    "parallel_tool_calls": {"type": "boolean", "default": True},
    "max_output_tokens": {"type": "integer", "minimum": 1},
    "text": {"type": "object", "properties": {"format": _FORMAT, "verbosity": _TEXT}},
    "reasoning": {"type": "object", "properties": {"effort": _TEXT}},
    "include": {"type": "array", "items": _TEXT},
    "previous_response_id": {"type": ["string", "null"]},
    "store": {"type": ["boolean", "null"]},
    "truncation": {"enum": ["auto", "disabled", None]},
    "stream": {"type": "boolean", "default": False},
}
"""Properties of a request to /v1/responses that other requests do not have, or have in another shape."""
