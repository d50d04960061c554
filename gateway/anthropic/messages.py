"""Turn the messages of Anthropic's API into a conversation. Pure.

The API divides a turn into blocks. Its clients send back the blocks of earlier answers, also those of Anthropic's own
models, and the results of tools as blocks of a user's turn.
"""

from collections.abc import Iterable
from typing import Any, Final

from gateway.anthropic.signatures import reasoning_in
from gateway.conversation import BETWEEN, IMAGES, OMITTED_FILE, Conversation, image_text
from gateway.http.errors import ApiError
from gateway.http.fields import string_in
from gateway.http.notes import Notes, named

ROLES: Final = ("user", "assistant", "system")
"""The roles of messages. Newer clients also send ``system`` within the conversation."""
FAILED: Final = "Error: "
"""Stands before the result of a tool that failed (``is_error``). Chat templates know no other way to say so."""
FOUND: Final = "The tool {} is available now."
"""Stands for a block that names a tool which the client has searched for. The model then sees the tool itself."""
FILES: Final = ("document", "container_upload")
"""Types of blocks that are files. A document that is text can be read."""
ACCOUNTING: Final = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code sends to Anthropic's accounts. It says nothing to the model, and differs
between conversations: at the beginning of the prompt, nothing behind it would be in the model's cache."""


def read_messages(system: Any, given: Any, notes: Notes) -> list[dict[str, Any]]:
    """Return the conversation of a request, for ``AsyncClient.generate``.

    system  the value of ``system``: None, a text or text blocks
    given   the value of ``messages``
    notes   told what is left out

    Raises ApiError, which names the block, for everything but text and tools.
    """
    conversation = Conversation()
    if system is not None and (text := BETWEEN.join(_instructions("system", system))):
        conversation.system(text)
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be an array of at least one message", param="messages")
    for i, message in enumerate(given):
        _read_message(conversation, f"messages[{i}]", message, notes)
    if not (read := conversation.messages()):
        raise ApiError(
            400, "messages holds instructions without a text only: add a message of the user", param="messages"
        )
    return read


def tools_found(messages: Any) -> set[str]:
    """Return the names of the tools that the client has searched for, according to the results of its calls."""
    found: set[str] = set()
    blocks = [block for message in _maps(messages) for block in _maps(message.get("content"))]
    for block in blocks:
        found.update(
            name
            for inner in _maps(block.get("content"))
            if inner.get("type") == "tool_reference" and isinstance(name := inner.get("tool_name"), str)
        )
    return found


def _maps(given: Any) -> Iterable[dict[str, Any]]:
    return (each for each in given if isinstance(each, dict)) if isinstance(given, list) else ()


def _read_message(conversation: Conversation, place: str, given: Any, notes: Notes) -> None:
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} must be an object with role and content", param=place)
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    if role == "system":
        if text := BETWEEN.join(_instructions(f"{place}.content", content)):
            conversation.system(text)
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ApiError(400, f"{place}.content must be a string, or an array of blocks", param=f"{place}.content")
    if role == "assistant":
        conversation.said("")
    elif not blocks:
        conversation.user("")
    for i, block in enumerate(blocks):
        read = _read_asked if role == "user" else _read_said
        read(conversation, f"{place}.content[{i}]", block, notes)


def _read_asked(conversation: Conversation, place: str, block: Any, notes: Notes) -> None:
    """Add a block of the user's turn. Pictures and files of the user are refused. Unknown blocks are left out."""
    kind = _kind(place, block)
    if kind == "text":
        conversation.user(string_in(place, block, "text"))
    elif kind == "tool_result":
        text = BETWEEN.join(_result(f"{place}.content", block.get("content"), notes))
        failed = block.get("is_error")
        if failed not in (None, True, False):
            raise ApiError(400, f"{place}.is_error must be true or false", param=f"{place}.is_error")
        conversation.result(string_in(place, block, "tool_use_id"), f"{FAILED}{text}" if failed else text)
    elif (readable := _readable(block)) is not None:
        conversation.user(readable)
    elif kind in IMAGES or kind in FILES:
        raise _not_offered(place, kind, "text and tool_result")
    else:
        notes.change(f"messages: {named(kind)}")


def _read_said(conversation: Conversation, place: str, block: Any, notes: Notes) -> None:
    """Add a block of the assistant's turn. Signatures of other servers are accepted, and say nothing. Blocks of tools
    that ran at Anthropic are left out."""
    kind = _kind(place, block)
    if kind == "text":
        conversation.said(string_in(place, block, "text"))
    elif kind == "thinking":
        conversation.reasoned(string_in(place, block, "thinking") or reasoning_in(block.get("signature")))
    elif kind == "redacted_thinking":
        return  # only Anthropic can read it
    elif kind == "tool_use":
        call_id, name, arguments = string_in(place, block, "id"), string_in(place, block, "name"), block.get("input")
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{place}.input must be an object", param=f"{place}.input")
        conversation.called(call_id, name, arguments)
    else:
        notes.change(f"messages: {named(kind)}")


def _instructions(place: str, given: Any) -> list[str]:
    """Return the texts of instructions, without the one for Anthropic's accounts."""
    return [text for text in _texts(place, given) if not text.startswith(ACCOUNTING)]


def _result(place: str, given: Any, notes: Notes) -> list[str]:
    """Return the texts of a tool's result. A text stands for each picture and file."""
    if not isinstance(given, list):
        return [] if given is None else _texts(place, given)
    texts = []
    for i, block in enumerate(given):
        if (kind := _kind(f"{place}[{i}]", block)) == "tool_reference":
            texts.append(FOUND.format(string_in(f"{place}[{i}]", block, "tool_name")))
        elif kind == "text":
            texts.append(string_in(f"{place}[{i}]", block, "text"))
        elif (text := image_text(block, notes) or _readable(block)) is not None:
            texts.append(text)
        elif kind in FILES:
            notes.omit("files")
            texts.append(OMITTED_FILE)
        else:
            notes.change(f"messages: {named(kind)}")
    return texts


def _readable(block: dict[str, Any]) -> str | None:
    """Return the text of a document or a search result that is text; None for any other block."""
    source = block.get("source") if block.get("type") == "document" else None
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        texts = [source["data"]]
    elif block.get("type") == "search_result":
        texts = [part["text"] for part in _maps(block.get("content")) if isinstance(part.get("text"), str)]
    else:
        return None
    title = block.get("title")
    return BETWEEN.join([title, *texts] if isinstance(title, str) else texts)


def _texts(place: str, given: Any) -> list[str]:
    """Return texts that are given as a string or as text blocks."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise ApiError(400, f"{place} must be a string, or an array of text blocks", param=place)
    texts = []
    for i, block in enumerate(given):
        kind = _kind(f"{place}[{i}]", block)
        if kind != "text":
            raise _not_offered(f"{place}[{i}]", kind, "text")
        texts.append(string_in(f"{place}[{i}]", block, "text"))
    return texts


def _kind(place: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ApiError(400, f"{place} must be an object with a type", param=place)
    return kind


def _not_offered(place: str, kind: str, offered: str) -> ApiError:
    return ApiError(
        400, f"{place} is of type {kind[:32]!r}, which is not offered: these models read text, so send blocks of type "
        f"{offered}", code="unsupported", param=place,
    )  # fmt: skip
