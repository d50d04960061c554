"""Turn the options of OpenAI's Responses API into the options of its chat API, and these into a request. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway.http.errors import ApiError
from gateway.http.fields import object_in
from gateway.http.notes import Notes, named
from gateway.openai.foreign_options import ABOUT_THE_ACCOUNT, SYNONYMS, TRANSLATED, settle
from gateway.openai.options import OWN, Wanted, read_chat
from gateway.responses.items import read_input
from gateway.responses.tools import read_choice, read_tools

NOT_OFFERED: Final = {
    "conversation": "conversations are not stored: send the earlier items in input, or previous_response_id",
    "background": "nobody could fetch the response later: use stream",
    "prompt": "prompts are not stored: send instructions and input",
    "top_logprobs": "log-probabilities are offered at /v1/chat/completions",
    "context_management": "compaction is not offered: send fewer items in input",
    "moderation": "leave it out",
    "logprobs": "log-probabilities are offered at /v1/chat/completions",
}
"""Options that are refused, each with the remedy. A value that asks for nothing is as good as none."""
IGNORED: Final = ABOUT_THE_ACCOUNT | {"max_tool_calls", "client_metadata"}
"""Options that say nothing about the answer. ``max_tool_calls`` limits OpenAI's own tools, of which there are none."""
KNOWN: Final = (
    OWN
    | IGNORED
    | set(NOT_OFFERED)
    | {
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include",
        "max_output_tokens", "truncation", "stream", "stream_options", "chat_template_kwargs", "reasoning_budget",
        "previous_response_id", "n",
    }
)  # fmt: skip
TAKEN_OVER: Final = (
    "model", "stream", "stream_options", "parallel_tool_calls", "chat_template_kwargs", "reasoning_budget", "n"
)  # fmt: skip
"""Options that the chat API has by the same names, besides those of modelctl itself."""
ENCRYPTED: Final = "reasoning.encrypted_content"
"""The value of ``include`` that asks for the reasoning in an encrypted form, too."""
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

    wanted      the request in the terms of this project
    echoed      keys of the response that repeat the request
    namespaces  as ``OfferedTools.namespaces``
    seals       whether the reasoning is wanted in an encrypted form, too
    """

    wanted: Wanted
    echoed: dict[str, Any]
    namespaces: dict[str, tuple[str, str]]
    seals: bool


def read_request(
    body: dict[str, Any], notes: Notes, unseal: Callable[[str], str | None] = lambda _: None, *, stores: bool = False
) -> Asked:
    """Return the request in the body of a POST to /v1/responses. Raises ApiError, which names the option.

    body    with ``StoredItems.input_of`` the request in the place of its input
    notes   filled with what is ignored or changed
    unseal  as in ``read_input``
    stores  whether the response is kept
    """
    for name, value in body.items():
        if value and name in NOT_OFFERED:
            raise ApiError(400, f"{name} is not offered: {NOT_OFFERED[name]}", code="unsupported", param=name)
        if name not in KNOWN and name not in SYNONYMS and name not in TRANSLATED:
            settle(name, value, KNOWN, notes)
    seals = _read_include(body, notes)
    if body.get("truncation") not in (None, "disabled"):  # a prompt that is too long is refused
        notes.change("truncation=disabled")
    chat = {name: body[name] for name in body if name in OWN or name in SYNONYMS or name in TRANSLATED}
    for name in NOT_OFFERED:
        chat.pop(name, None)
    chat |= {name: body.get(name) for name in TAKEN_OVER}
    items = body.get("input")
    chat["messages"] = read_input(body.get("instructions"), items, notes, unseal).messages()
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    offered = read_tools(body.get("tools"), items, notes)
    chat["tools"] = offered.functions
    chat["tool_choice"] = read_choice(body.get("tool_choice"), offered)
    chat["response_format"] = _read_format(text := object_in(body, "text"))
    if text.get("verbosity") not in (None, "medium"):
        notes.change("text.verbosity")
    if (effort := _read_effort(object_in(body, "reasoning"))) is not None:
        chat["reasoning_effort"] = effort
    wanted = read_chat(chat, notes)
    if wanted.n != 1:
        raise ApiError(400, "n is not offered: one response has one answer", code="unsupported", param="n")
    wanted.names.update(NAMES)
    return Asked(wanted, _echoed(body) | {"store": stores}, offered.namespaces, seals)


def _read_include(body: dict[str, Any], notes: Notes) -> bool:
    """Return whether the reasoning is wanted in an encrypted form. All else that ``include`` can ask for is not here:
    OpenAI's own tools have no results, and log-probabilities are offered at /v1/chat/completions."""
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise ApiError(400, "include must be an array", param="include")
    for value in include or ():
        if value != ENCRYPTED:
            notes.change(f"include: {named(value)}")
    return ENCRYPTED in (include or ())


def _read_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``response_format`` of the chat API for the option ``text``."""
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
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
