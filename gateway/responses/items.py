"""Turn the input of OpenAI's Responses API into a conversation. Pure.

The input is a text or a list of items: messages, calls of tools, their results, and reasoning. Clients send back the
items of earlier answers, also those of OpenAI's own models, with their ids and states, which say nothing to the model.
"""

from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.conversation import BETWEEN, OMITTED_FILE, Conversation, image_text
from gateway.http.errors import ApiError
from gateway.http.fields import string_in
from gateway.http.notes import Notes, named
from gateway.responses.tools import LOADERS, name_of_call

ROLES: Final = ("user", "assistant", "system", "developer")
TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
"""Types of content parts that are text, each with the key that holds it."""
REASONING: Final = ("reasoning_text", "summary_text", "text")
"""Types of the parts of reasoning."""
FILES: Final = ("input_file", "input_audio")
"""Types of other parts in the result of a tool that the model cannot read. A text stands in their place."""
ACTIONS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Types of calls of OpenAI's own tools which the client has run: the name of the tool, and the key of its arguments."""
RESULTS: Final = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
    "apply_patch_call_output",
)  # fmt: skip


def read_input(
    instructions: Any, given: Any, notes: Notes, unseal: Callable[[str], str | None] = lambda _: None
) -> Conversation:
    """Return the conversation of a request. Raises ApiError, which names the item that is not offered.

    notes   told what is left out
    unseal  returns the reasoning in an ``encrypted_content``; None if somebody else has encrypted it
    """
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
    reader = _ItemReader(conversation, notes, unseal)
    for i, item in enumerate(given):
        reader.read(f"input[{i}]", item)
    if conversation.newest is None:
        raise ApiError(400, "input has no item that the model can read: add a message of the user", param="input")
    return conversation


class _ItemReader:
    """Adds items to a conversation."""

    def __init__(self, conversation: Conversation, notes: Notes, unseal: Callable[[str], str | None]) -> None:
        self._conversation, self._notes, self._unseal = conversation, notes, unseal

    def read(self, place: str, item: Any) -> None:
        """Add an item. An item of an unknown type, or of a tool that runs at OpenAI, is left out."""
        if not isinstance(item, dict):
            raise ApiError(400, f"{place} must be an object", param=place)
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(place, item)
        elif kind == "function_call":
            name = name_of_call(item, string_in(place, item, "name"))
            self._called(place, item, name, _arguments(string_in(place, item, "arguments")))
        elif kind == "custom_tool_call":
            name = name_of_call(item, string_in(place, item, "name"))
            self._called(place, item, name, {"input": string_in(place, item, "input")})
        elif isinstance(kind, str) and kind in ACTIONS and isinstance(item.get("call_id"), str):
            name, key = ACTIONS[kind]
            arguments = item.get(key)
            self._called(place, item, name, arguments if isinstance(arguments, dict) else {})
        elif isinstance(kind, str) and kind in RESULTS:
            key = "call_id" if kind != "local_shell_call_output" or "call_id" in item else "id"
            self._conversation.result(string_in(place, item, key), self._result(f"{place}.output", item.get("output")))
        elif kind == "tool_search_output" and isinstance(item.get("call_id"), str):
            tools = item.get("tools")
            names = [named(tool.get("name")) for tool in tools or () if isinstance(tool, dict)]
            self._conversation.result(item["call_id"], ", ".join(names) or "none")
        elif kind == "reasoning":
            self._conversation.reasoned(self._reasoning(place, item))
        elif kind == "compaction_trigger":
            raise ApiError(
                400, f"{place} is of type {kind!r}: compaction is not offered, so have the client summarize the items",
                code="unsupported", param=place,
            )  # fmt: skip
        elif kind not in LOADERS:
            self._notes.change(f"input: {named(kind)}")

    def _called(self, place: str, item: dict[str, Any], name: str, arguments: Any) -> None:
        self._conversation.called(string_in(place, item, "call_id"), name, arguments)

    def _message(self, place: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise ApiError(400, f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
        content = item.get("content")
        if role == "assistant":
            self._conversation.said(_text(f"{place}.content", content, ""))
            return
        text = _text(f"{place}.content", content, BETWEEN)
        if role == "user":
            self._conversation.user(text)
        else:
            self._conversation.system(text)

    def _reasoning(self, place: str, item: dict[str, Any]) -> str:
        """Return the text of a reasoning item: its content, or what it has encrypted, or its summary."""
        if text := _reasoning_in(place, item, "content"):
            return text
        sealed = item.get("encrypted_content")
        if isinstance(sealed, str) and sealed:
            if (opened := self._unseal(sealed)) is not None:
                return opened
            self._notes.change("reasoning.encrypted_content")
        return _reasoning_in(place, item, "summary")

    def _result(self, place: str, given: Any) -> str:
        """Return the result of a call as a text. A text stands for each picture and file."""
        if given is None or isinstance(given, str):
            return given or ""
        if not isinstance(given, list):
            return orjson.dumps(given).decode()
        texts = []
        for i, part in enumerate(given):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str):  # the outputs of OpenAI's own shell have no type
                texts.append(orjson.dumps(part).decode())
            elif kind in TEXTS:
                texts.append(string_in(f"{place}[{i}]", part, TEXTS[kind]))
            elif (image := image_text(part, self._notes)) is not None:
                texts.append(image)
            elif kind in FILES:
                self._notes.omit("files")
                texts.append(OMITTED_FILE)
            else:
                self._notes.change(f"input: {named(kind)}")
        return BETWEEN.join(texts)


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text


def _reasoning_in(place: str, item: dict[str, Any], name: str) -> str:
    parts = item.get(name)
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise ApiError(400, f"{place}.{name} must be an array", param=f"{place}.{name}")
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in REASONING:
            where = f"{place}.{name}[{i}]"
            raise ApiError(400, f"{where} must be of type {REASONING[0]} or {REASONING[1]}, with a text", param=where)
        texts.append(string_in(f"{place}.{name}[{i}]", part, "text"))
    return BETWEEN.join(texts)


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
            shown = kind[:64] if isinstance(kind, str) else type(kind).__name__
            raise ApiError(
                400, f"{place}[{i}] is of type {shown!r}, which is not offered: these models read text, so send a part "
                "of type input_text", code="unsupported", param=f"{place}[{i}]",
            )  # fmt: skip
        texts.append(string_in(f"{place}[{i}]", part, TEXTS[kind]))
    return between.join(texts)
