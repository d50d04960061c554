"""Turn the options of OpenAI's Responses API into the options of its chat API, and these into a request. Pure."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from gateway.http.errors import ApiError
from gateway.http.fields import object_in
from gateway.http.notes import Notes
from gateway.openai.options import ABOUT_THE_ACCOUNT, OWN, Wanted, read_chat
from gateway.openai.tools import read_name
from gateway.responses.items import read_input

NOT_OFFERED: Final = {
    "previous_response_id": "responses are not stored: send the earlier items in input",
    "conversation": "conversations are not stored: send the earlier items in input",
    "background": "responses are not stored, so nobody could fetch this one: use stream",
    "prompt": "prompts are not stored: send instructions and input",
    "top_logprobs": "log-probabilities are offered at /v1/chat/completions",
    "context_management": "compaction is not offered: send fewer items in input",
    "moderation": "moderation is not offered",
}
"""Options that are refused, each with the remedy. A value that asks for nothing is as good as none."""
IGNORED: Final = ABOUT_THE_ACCOUNT | {"max_tool_calls"}
"""Options that say nothing about the answer. ``max_tool_calls`` limits OpenAI's own tools, of which there are none."""
KNOWN: Final = (
    OWN - {"max_tokens", "max_completion_tokens", "max_length", "json_schema", "stop_sequence", "logprobs"}
    | IGNORED
    | set(NOT_OFFERED)
    | {
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include",
        "max_output_tokens", "truncation", "stream", "stream_options", "chat_template_kwargs", "reasoning_budget",
    }
)  # fmt: skip
TAKEN_OVER: Final = (
    "model", "stream", "stream_options", "parallel_tool_calls", "chat_template_kwargs", "reasoning_budget"
)  # fmt: skip
"""Options that the chat API has by the same names, besides those of modelctl itself."""
INCLUDED: Final = frozenset({"reasoning.encrypted_content"})
"""Values of ``include`` that are accepted. Reasoning is sent in plain text, so nothing is encrypted."""
NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "json_schema": "text.format",
    "messages": "input",
    "allowed_tools": "tool_choice",
}
"""Our names of fields that this API calls otherwise."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the Responses API.

    wanted  the request in the terms of this project
    echoed  keys of the response that repeat the request
    """

    wanted: Wanted
    echoed: dict[str, Any]


def read_request(body: dict[str, Any], notes: Notes) -> Asked:
    """Return the request in the body of a POST to /v1/responses. Raises ApiError, which names the option.

    notes  filled with what is ignored or changed
    """
    for name, value in body.items():
        if value and name in NOT_OFFERED:
            raise ApiError(400, f"{name} is not offered: {NOT_OFFERED[name]}", code="unsupported", param=name)
        if name not in KNOWN and value is not None:
            near = get_close_matches(name[:64], KNOWN, 1)
            hint = f": did you mean {near[0]}?" if near else ": leave it out"
            raise ApiError(400, f"unknown option {name[:64]!r}{hint}", param=name[:64])
    _check_nothing(body)
    chat: dict[str, Any] = {name: body[name] for name in OWN & KNOWN if name in body}
    chat |= {name: body.get(name) for name in TAKEN_OVER}
    chat["messages"] = read_input(body.get("instructions"), body.get("input")).messages()
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["tools"] = _read_tools(body.get("tools"))
    chat["tool_choice"] = _read_choice(body.get("tool_choice"))
    chat["response_format"] = _read_format(object_in(body, "text"))
    chat["reasoning_effort"] = _read_effort(object_in(body, "reasoning"))
    wanted = read_chat(chat, notes)
    wanted.names.update(NAMES)
    return Asked(wanted, _echoed(body))


def _check_nothing(body: dict[str, Any]) -> None:
    """Raise ApiError for values of options of which only those are offered that ask for nothing."""
    if body.get("truncation") not in (None, "disabled"):
        raise ApiError(
            400, "truncation is not offered: use disabled, and send fewer items in input", code="unsupported",
            param="truncation",
        )  # fmt: skip
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise ApiError(400, "include must be an array", param="include")
    for value in include or ():
        if not isinstance(value, str) or value not in INCLUDED:
            shown = value[:64] if isinstance(value, str) else type(value).__name__
            raise ApiError(400, f"include has {shown!r}, which is not offered", code="unsupported", param="include")


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools in the shape of the chat API."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ApiError(400, "tools must be an array", param="tools")
    return [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _read_tool(place: str, given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        shown = kind[:64] if isinstance(kind, str) else type(kind).__name__
        raise ApiError(
            400, f"{place} is of type {shown!r}: only tools of type 'function' are offered", code="unsupported",
            param=place,
        )  # fmt: skip
    read_name(place, given)
    parameters = given.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(
            400, f"{place}.parameters must be a JSON schema, which is an object", param=f"{place}.parameters"
        )
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: given[key] for key in kept if given.get(key) is not None}}


def _read_choice(choice: Any) -> Any:
    """Return ``tool_choice`` in the shape of the chat API."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        nested = [_read_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    return choice


def _read_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``response_format`` of the chat API for the option ``text``."""
    if text.get("verbosity") not in (None, "medium"):
        raise ApiError(400, "text.verbosity is not offered: leave it out", code="unsupported", param="text.verbosity")
    shape = text.get("format")
    if shape is None:
        return None
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, "text.format.type must be text, json_object or json_schema", param="text.format.type")
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(shape.get("schema"), dict):
        raise ApiError(400, "text.format.schema must be a JSON schema, which is an object", param="text.format.schema")
    return {"type": kind, "json_schema": {"schema": shape["schema"]}}


def _read_effort(reasoning: dict[str, Any]) -> str | None:
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, "reasoning.effort must be a string", param="reasoning.effort")
    return effort


def _echoed(body: dict[str, Any]) -> dict[str, Any]:
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    parallel = body.get("parallel_tool_calls")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
