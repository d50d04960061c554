"""Turn the messages of OpenAI's API into the messages of this project."""

from typing import Any, Final

from gateway.http.errors import ApiError

ROLES: Final = {"developer": "developer", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, each with the role that chat templates know."""
KEPT: Final = ("name", "tool_call_id")
DROPPED: Final = frozenset({"refusal", "annotations", "parsed"})
"""Keys of assistants' earlier answers that clients send back. They are not part of a conversation, and are left out.
The package openai adds ``parsed`` to messages that its helpers ``stream`` and ``parse`` return."""
REASONING: Final = ("reasoning_content", "reasoning")
"""Keys of the reasoning in assistants' earlier answers. Templates know it as ``reasoning_content``."""
NOT_OFFERED: Final = {"audio": "these models read text only", "function_call": "use tool_calls instead"}
"""Keys of messages that are refused, each with the reason. A null is as good as none."""
PART_KEYS: Final = frozenset({"type", "text", "cache_control"})
"""Keys of a text part. Prompts are cached without being asked, so ``cache_control`` changes nothing."""


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Return the conversation for ``AsyncClient.generate(messages=...)``.

    Raises ApiError, which names the message, for everything but text. The worker checks the rest.
    """
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be an array of at least one message", param="messages")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(given)]


def _read_message(place: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} must be an object with role and content", param=place)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    message: dict[str, Any] = {"role": ROLES[role]}
    for key, value in given.items():
        if key == "content":
            message[key] = _read_content(f"{place}.content", value)
        elif key == "tool_calls" and value is not None:
            message[key] = _read_tool_calls(f"{place}.tool_calls", value)
        elif key in KEPT and value is not None:
            message[key] = value
        elif key in REASONING:
            if value is not None and not isinstance(value, str):
                raise ApiError(400, f"{place}.{key} must be a string", param=f"{place}.{key}")
            if value and role == "assistant":
                message["reasoning_content"] = value
        elif key in NOT_OFFERED and value is not None:
            raise ApiError(
                400, f"{place}.{key} is not offered: {NOT_OFFERED[key]}", code="unsupported", param=f"{place}.{key}"
            )
        elif key not in ("role", *KEPT, "tool_calls", *NOT_OFFERED) and key not in DROPPED:
            raise ApiError(400, f"{place} has an unknown key {key[:64]!r}", param=f"{place}.{key[:64]}")
    if message.get("tool_calls"):
        message.setdefault("content", None)  # templates ask whether it is none
    return message


def _read_content(place: str, given: Any) -> str | None:
    """Return the text of a message. An array of text parts becomes the parts' joined text."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(400, f"{place} must be a string, or an array of text parts", param=place)
    texts: list[str] = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind[:32] if isinstance(kind, str) else type(part).__name__
            raise ApiError(
                400, f"{place}[{i}] is of type {shown!r}: these models read text only, so send parts of type 'text'",
                code="unsupported", param=f"{place}[{i}]",
            )  # fmt: skip
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{place}[{i}].text must be a string", param=f"{place}[{i}].text")
        for key in part:
            if key not in PART_KEYS:
                raise ApiError(400, f"{place}[{i}] has an unknown key {key[:64]!r}", param=f"{place}[{i}].{key[:64]}")
        texts.append(part["text"])
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
