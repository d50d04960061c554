"""Turn the input of OpenAI's Responses API into a conversation. Pure.

The input is a text or a list of items: messages, calls of functions, their results, and reasoning. Clients send back
the items of earlier answers with their ids and states, which say nothing to the model.
"""

from typing import Any, Final

import orjson

from gateway.conversation import BETWEEN, Conversation
from gateway.http.errors import ApiError
from gateway.http.fields import string_in

ROLES: Final = ("user", "assistant", "system", "developer")
TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
"""Types of content parts that are text, each with the key that holds it."""
REMEDIES: Final = {
    "item_reference": "responses are not stored, so send the item itself",
    "input_image": "these models read text",
    "input_file": "these models read text",
    "input_audio": "these models read text",
}
"""Reasons for which types of items and parts are refused. Every other unknown type belongs to OpenAI's own tools."""


def read_input(instructions: Any, given: Any) -> Conversation:
    """Return the conversation of a request. Raises ApiError, which names the item that is not offered."""
    conversation = Conversation()
    if instructions is not None:
        if not isinstance(instructions, str):
            raise ApiError(400, "instructions must be a string", param="instructions")
        if instructions:
            conversation.system(instructions)
    if isinstance(given, str):
        conversation.user(given)
        return conversation
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input must be a string, or an array of at least one item", param="input")
    for i, item in enumerate(given):
        _read_item(conversation, f"input[{i}]", item)
    return conversation


def _read_item(conversation: Conversation, place: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise ApiError(400, f"{place} must be an object", param=place)
    kind = item.get("type") or "message"
    if kind == "message":
        _read_message(conversation, place, item)
    elif kind == "function_call":
        call_id, name = string_in(place, item, "call_id"), string_in(place, item, "name")
        text = string_in(place, item, "arguments")
        try:
            arguments = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            arguments = text
        conversation.called(call_id, name, arguments)
    elif kind == "function_call_output":
        text = _text(f"{place}.output", item.get("output"), BETWEEN)
        conversation.result(string_in(place, item, "call_id"), text)
    elif kind == "reasoning":
        conversation.reasoned(_reasoning(place, item))
    else:
        raise _not_offered(place, kind, "item")


def _read_message(conversation: Conversation, place: str, item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    if role == "assistant":
        conversation.said(_text(f"{place}.content", item.get("content"), ""))
        return
    text = _text(f"{place}.content", item.get("content"), BETWEEN)
    if role == "user":
        conversation.user(text)
    else:
        conversation.system(text)


def _reasoning(place: str, item: dict[str, Any]) -> str:
    """Return the text of a reasoning item: its content, or its summary if it has no content."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise ApiError(400, f"{place}.{name} must be an array", param=f"{place}.{name}")
        texts = []
        for i, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
                where = f"{place}.{name}[{i}]"
                raise ApiError(400, f"{where} must be of type {kind}, with a text", param=where)
            texts.append(part["text"])
        if texts:
            return BETWEEN.join(texts)
    return ""


def _text(place: str, given: Any, between: str) -> str:
    """Return a text that is given as a string or as parts. ``between``: stands between two parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(400, f"{place} must be a string, or an array of text parts", param=place)
    texts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXTS:
            raise _not_offered(f"{place}[{i}]", kind, "part")
        texts.append(string_in(f"{place}[{i}]", part, TEXTS[kind]))
    return between.join(texts)


def _not_offered(place: str, kind: Any, what: str) -> ApiError:
    shown = kind[:64] if isinstance(kind, str) else type(kind).__name__
    offered = "messages, function calls and their outputs" if what == "item" else "text"
    reason = REMEDIES.get(shown, f"send {offered}")
    return ApiError(
        400, f"{place} is of type {shown!r}, which is not offered: {reason}", code="unsupported", param=place
    )
