"""Turn the messages of OpenAI's API into the messages of this project."""

from typing import Any, Final

from gateway.conversation import image_text
from gateway.http.errors import ApiError
from gateway.http.keep_alive import without_load_lines
from gateway.http.notes import Notes

ROLES: Final = {"developer": "developer", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, each with the role that chat templates know."""
KEPT: Final = ("name", "tool_call_id")
DROPPED: Final = frozenset(
    {
        "refusal", "annotations", "parsed", "id", "opts", "reasoning_details", "provider_specific_fields",
        "thinking_blocks", "cache_control", "prefix", "partial", "images", "index", "function_call", "audio",
    }
)  # fmt: skip
"""Keys of messages that say nothing to the model, and are left out. Clients send back assistants' earlier answers with
keys of their own: the package openai adds ``parsed``, LiteLLM ``provider_specific_fields``."""
BEGUN: Final = ("prefix", "partial")
"""Keys that say true of an assistant's last message which the model is to continue: DeepSeek's and Qwen's."""
REASONING: Final = ("reasoning_content", "reasoning")
"""Keys of the reasoning in assistants' earlier answers. Templates know it as ``reasoning_content``."""
NOT_OFFERED: Final = {"audio": "these models read text only", "function_call": "use tool_calls instead"}
"""Keys of messages that are refused, each with the reason. A null is as good as none."""
TEXTS: Final = {"text": "text", "refusal": "refusal"}
"""Types of parts that are text, each with the key that holds it."""
PART_KEYS: Final = frozenset({"type", "text", "refusal", "cache_control", "annotations", "id", "index"})
"""Keys of a text part that are known. Prompts are cached without being asked, so ``cache_control`` changes nothing."""


def is_begun(given: Any) -> bool:
    """Return whether the last message is an assistant's that the model is to continue (``prefix: true``)."""
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("role") == "assistant" and any(last.get(key) is True for key in BEGUN)


def read_messages(given: Any, notes: Notes) -> list[dict[str, Any]]:
    """Return the conversation for ``AsyncClient.generate(messages=...)``.

    notes  filled with what is ignored or changed

    Raises ApiError, which names the message, for everything but text. The worker checks the rest.
    """
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be an array of at least one message", param="messages")
    return [_read_message(f"messages[{i}]", message, notes) for i, message in enumerate(given)]


def _read_message(place: str, given: Any, notes: Notes) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} must be an object with role and content", param=place)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    message: dict[str, Any] = {"role": ROLES[role]}
    for key, value in given.items():
        if key == "content":
            message[key] = _read_content(f"{place}.content", value, notes, is_result=role == "tool")
        elif key == "tool_calls" and value is not None:
            message[key] = _read_tool_calls(f"{place}.tool_calls", value)
        elif key in KEPT and value is not None:
            message[key] = value
        elif key in REASONING:
            if value is not None and not isinstance(value, str):
                raise ApiError(400, f"{place}.{key} must be a string", param=f"{place}.{key}")
            if value and role == "assistant" and (written := without_load_lines(value)):
                message["reasoning_content"] = written
        elif key in NOT_OFFERED and value:
            raise ApiError(
                400, f"{place}.{key} is not offered: {NOT_OFFERED[key]}", code="unsupported", param=f"{place}.{key}"
            )
        elif value is not None and key not in DROPPED and key not in ("role", *KEPT, "tool_calls"):
            notes.ignore(f"messages.{key}", f"{place}.{key}")
    if message.get("tool_calls"):
        message.setdefault("content", None)  # templates ask whether it is none
    return message


def _read_content(place: str, given: Any, notes: Notes, *, is_result: bool) -> str | None:
    """Return the text of a message. An array of text parts becomes the parts' joined text.

    is_result  whether the message is the result of a tool, in which a picture is replaced
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(400, f"{place} must be a string, or an array of text parts", param=place)
    texts: list[str] = []
    for i, part in enumerate(given):
        if is_result and (replaced := image_text(part, notes)) is not None:
            texts.append(replaced)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXTS:
            shown = kind[:32] if isinstance(kind, str) else type(part).__name__
            raise ApiError(
                400, f"{place}[{i}] is of type {shown!r}: these models read text only, so send parts of type 'text'",
                code="unsupported", param=f"{place}[{i}]",
            )  # fmt: skip
        text = part.get(TEXTS[kind])
        if not isinstance(text, str):
            raise ApiError(400, f"{place}[{i}].{TEXTS[kind]} must be a string", param=f"{place}[{i}].{TEXTS[kind]}")
        for key, value in part.items():
            if value is not None and key not in PART_KEYS:
                notes.ignore(f"messages.content.{key}", f"{place}[{i}].{key}")
        texts.append(text)
    return "".join(texts)


def _read_tool_calls(place: str, given: Any) -> list[Any]:
    """Return the calls as the client sent them. The worker gives their arguments the form that the template takes.

    ``parsed_arguments`` is left out. The helpers of the package openai add it.
    """
    if not isinstance(given, list):
        raise ApiError(400, f"{place} must be an array", param=place)
    calls: list[Any] = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "parsed_arguments" in function:
            call = call | {"function": {key: value for key, value in function.items() if key != "parsed_arguments"}}
        calls.append(call)
    return calls
