"""Turn the options of Anthropic's API into the options of OpenAI's API, and these into a request. Pure.

So a request of either API takes the same way to the worker. Clients of this API send many options that say nothing
about the answer, and more with each version. Unknown options are ignored, and that is said. An option that would change
the answer, and that is not offered, is refused by its name.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from gateway.anthropic.blocks import Thinking
from gateway.anthropic.messages import read_messages, tools_found
from gateway.http.errors import ApiError
from gateway.http.fields import object_in
from gateway.http.notes import Notes
from gateway.http.notes import named as told
from gateway.openai.options import OWN, Wanted, read_chat
from gateway.openai.tools import read_name

NOT_OFFERED: Final = {
    "mcp_servers": "MCP servers are not offered: connect them to the client",
    "container": "containers are not offered",
}
"""Options that are refused, each with the reason. An empty value is as good as none."""
TAKEN: Final = frozenset(
    {
        "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
        "output_config", "output_format", "metadata", "service_tier", "cache_control", "context_management",
        *OWN, *NOT_OFFERED,
    }
)  # fmt: skip
"""Options that are read, or that change nothing here. Every other one is ignored, and that is said."""
NAMES: Final = {
    "stop": "stop_sequences",
    "json_schema": "output_config.format",
    "reasoning_budget": "thinking.budget_tokens",
    "template_kwargs": "output_config.effort",
    "allowed_tools": "tool_choice",
}
"""Our names of fields that this API calls otherwise."""
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's word for each choice of tools, except for a certain tool."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of Anthropic's API.

    wanted      the request in the terms of this project
    max_tokens  most tokens of the answer; 0 if only the prompt is to be counted
    thinking    what the answer has of the reasoning
    """

    wanted: Wanted
    max_tokens: int
    thinking: Thinking


def read_request(body: dict[str, Any], notes: Notes, *, counts: bool = False) -> Asked:
    """Return the request in the body of a POST to /v1/messages. Raises ApiError, which names the option.

    notes   filled with what is ignored or changed
    counts  the request is one for /v1/messages/count_tokens, which has no ``max_tokens``
    """
    for name, reason in NOT_OFFERED.items():
        if body.get(name):
            raise ApiError(400, f"{name} is not offered: {reason}", code="unsupported", param=name)
    for name in sorted(body.keys() - TAKEN):
        if body[name] is not None:
            notes.ignore(name)
    chat: dict[str, Any] = {name: body[name] for name in OWN if name in body}
    chat |= {"model": body.get("model"), "stream": body.get("stream")}
    max_tokens = 0 if counts else _read_max_tokens(body.get("max_tokens"))
    chat["messages"] = messages = read_messages(body.get("system"), body.get("messages"), notes)
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise ApiError(400, "the last message calls a tool: send its result after it", param="messages")
        chat["continue_final_message"] = True
    if (stops := body.get("stop_sequences")) is not None:
        if not isinstance(stops, list):
            raise ApiError(400, "stop_sequences must be an array of strings", param="stop_sequences")
        chat["stop"] = stops
    chat |= _read_tools(body.get("tools"), body.get("tool_choice"), tools_found(body["messages"]), notes)
    thinking = object_in(body, "thinking")
    chat |= _read_thinking(thinking)
    chat |= _read_output(object_in(body, "output_config"), object_in(body, "output_format"))
    wanted = read_chat(chat, notes)
    wanted.names.update(NAMES)
    return Asked(wanted, max_tokens, _shown(thinking))


def _shown(thinking: dict[str, Any]) -> Thinking:
    if thinking.get("type") in (None, "disabled"):
        return "none"
    return "signed" if thinking.get("display") == "omitted" else "shown"


def _read_max_tokens(given: Any) -> int:
    if type(given) is not int or given < 1:
        shown = "missing" if given is None else given if isinstance(given, int | float) else "no number"
        raise ApiError(400, f"max_tokens is {shown}: must be a whole number of at least 1", param="max_tokens")
    return given


def _read_tools(tools: Any, choice: Any, found: Collection[str], notes: Notes) -> dict[str, Any]:
    """Return the options ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of OpenAI's API.

    found  names of tools that the client has searched for. The model is not shown other tools with ``defer_loading``
    notes  told the tools that the server would have to bring: they are left out
    """
    if tools is not None and not isinstance(tools, list):
        raise ApiError(400, "tools must be an array", param="tools")
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    for i, given in enumerate(tools or ()):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(given, dict) and kind not in (None, "custom"):
            left_out.append(told(given.get("name") or kind))
            notes.change(f"tools: {left_out[-1]}")
            continue
        tool = _read_tool(f"tools[{i}]", given)
        if not given.get("defer_loading") or tool["function"]["name"] in found:
            shown.append(tool)
    options: dict[str, Any] = {"tools": shown}
    if choice is None:
        return options
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = choice.get("name")
        if isinstance(name, str) and name in left_out:
            raise _left_out(f"tool_choice.name is {name!r}, which the server would have to bring", "tool_choice.name")
        if name not in [tool["function"]["name"] for tool in options["tools"]]:
            raise ApiError(400, "tool_choice.name must be the name of one of tools", param="tool_choice.name")
        options["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind == "any" and left_out and not shown:
        raise _left_out("tool_choice is any, and the server would have to bring every tool", "tool_choice")
    elif isinstance(kind, str) and kind in CHOICES:
        options["tool_choice"] = CHOICES[kind]
    else:
        raise ApiError(400, "tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    alone = choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        place = "tool_choice.disable_parallel_tool_use"
        raise ApiError(400, f"{place} must be true or false", param=place)
    if alone and options["tools"] and kind != "none":
        options["parallel_tool_calls"] = False
    return options


def _left_out(why: str, param: str) -> ApiError:
    return ApiError(
        400, f"{why}: such tools are not offered, so send a tool with a name and an input_schema", code="unsupported",
        param=param,
    )  # fmt: skip


def _read_tool(place: str, given: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's shape."""
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} must be an object with name and input_schema", param=place)
    name, schema = read_name(place, given), given.get("input_schema")
    if not isinstance(schema, dict):
        raise ApiError(
            400, f"{place}.input_schema must be a JSON schema, which is an object", param=f"{place}.input_schema"
        )
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    if (description := given.get("description")) is not None:
        if not isinstance(description, str):
            raise ApiError(400, f"{place}.description must be a string", param=f"{place}.description")
        function["description"] = description
    return {"type": "function", "function": function}


def _read_thinking(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of OpenAI's API that switch reasoning on or off. Without ``thinking`` the template decides.

    Templates know two names of the switch. A template ignores a variable that it does not know.
    """
    if not given:
        return {}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    on = kind != "disabled"
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on, "thinking": on}}
    if kind == "enabled":
        if type(budget) is not int or budget < 1:
            raise ApiError(
                400, "thinking.budget_tokens must be a whole number of at least 1", param="thinking.budget_tokens"
            )
        options |= {"reasoning_budget": budget, "budget_if_reasoning": True}  # Claude Code sends it to every model
    return options


def _read_output(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    """Return the options of OpenAI's API for ``output_config``, and for ``output_format``, its older form."""
    options: dict[str, Any] = {}
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str):
            raise ApiError(400, "output_config.effort must be a string", param="output_config.effort")
        options["reasoning_effort"] = effort
    for place, shape in (("output_config.format", config.get("format")), ("output_format", older or None)):
        if shape is None:
            continue
        kind = shape.get("type") if isinstance(shape, dict) else None
        if kind != "json_schema" or not isinstance(shape.get("schema"), dict):
            raise ApiError(400, f"{place} must have the type json_schema, and a schema", param=place)
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": shape["schema"]}}
    return options
