"""What the OpenAPI document says about the requests of OpenAI's Responses API. Pure."""

from typing import Any, Final

from gateway.openai.option_schemas import PARALLEL, STREAM, said
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
_TOOLS: Final[Schema] = {"type": "array", "maxItems": MOST_TOOLS, "items": {"anyOf": [_TOOL, _LEFT_OUT]}}
_CHOICES: Final[Schema] = {
    "anyOf": [{"enum": ["auto", "none", "required"]}, _of_type("function", ["name"], name=_TEXT)],
}
RESPONSES: Final[Schema] = {
    "input": said(
        {"anyOf": [_TEXT, _ITEMS]},
        "The conversation: a text, or messages, calls of functions, their results, and reasoning. A picture of a user "
        "is refused.",
    ),
    "instructions": said(_TEXT, "A system message before the conversation."),
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
        {"type": "object", "properties": {"format": _FORMAT, "verbosity": _TEXT}},
        "`format` gives the answer the shape of any JSON object or of a schema. `verbosity` changes nothing.",
    ),
    "reasoning": said(
        {"type": "object", "properties": {"effort": _TEXT}},
        "`effort` is the variable `reasoning_effort` of the model's chat template. A summary is never written.",
    ),
    "include": said(
        {"type": "array", "items": _TEXT},
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
