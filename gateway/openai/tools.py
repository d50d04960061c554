"""Turn the tools of OpenAI's API, and the choice among them, into the options of this project. Pure."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from answer_formats.parser import Tool
from gateway.http.errors import ApiError
from gateway.http.notes import Notes, named

MOST_TOOLS: Final = 256
NAME: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
"""The names of tools. OpenAI allows 64 letters, digits, underscores and hyphens; MCP servers' names have more."""
FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")
"""Keys of a function, in the order in which the template sees them."""
DROPPED: Final = frozenset({"returns", "return", "cache_control", "opts", "id"})
"""Further keys of tools and of their functions that are known, and say nothing here."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request.

    options  keywords of ``AsyncClient.generate``
    tools    the tools that the model may call
    """

    options: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


def read_tools(tools: Any, choice: Any, parallel: bool, notes: Notes) -> Offered:
    """Return what a request says about tools. Raises ApiError, which names the place.

    Tools of other types than functions are OpenAI's own, or the client's. They are left out.

    tools     the value of ``tools``, or None
    choice    the value of ``tool_choice``, or None
    parallel  the value of ``parallel_tool_calls``
    notes     filled with what is ignored or left out
    """
    if tools is not None and not isinstance(tools, list):
        raise ApiError(400, "tools must be an array", param="tools")
    tools = tools or []
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools has {len(tools)} tools: at most {MOST_TOOLS}", param="tools")
    known: dict[str, Tool] = {}
    shown: list[dict[str, Any]] = []
    for i, given in enumerate(tools):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "function":
            notes.change(f"tools: {named(kind)}")
            continue
        tool, function = _read_tool(f"tools[{i}]", given, notes)
        shown.append({"type": "function", "function": function})
        if tool.name in known:
            raise ApiError(400, f"tools[{i}] has the name {tool.name!r}, which another tool has", param=f"tools[{i}]")
        known[tool.name] = tool
    mode, names = _read_choice(choice, known)
    if not known or mode == "none":
        return Offered()
    options: dict[str, Any] = {"tools": shown, "tool_choice": mode}
    if names is not None:
        options["allowed_tools"] = names
        known = {name: known[name] for name in names}
    if not parallel or (isinstance(choice, dict) and choice.get("type") == "function"):
        options["parallel_tool_calls"] = False
    return Offered(options, tuple(known.values()))


def read_name(place: str, tool: dict[str, Any]) -> str:
    """Return the name of a tool. ``place``: where the tool stands in the request. Raises ApiError for a wrong name."""
    name = tool.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400, f"{place}.name must have 1 to 128 letters, digits and the signs _ . : -", param=f"{place}.name"
        )
    return name


def _read_tool(place: str, given: Any, notes: Notes) -> tuple[Tool, dict[str, Any]]:
    """Return a tool, and its function as the template sees it."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{place}.function must be an object with a name", param=f"{place}.function")
    name, parameters = read_name(f"{place}.function", function), function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"{place}.function.parameters must be a JSON schema, which is an object", param=place)
    if function.get("strict") not in (None, True, False):
        raise ApiError(400, f"{place}.function.strict must be true or false", param=f"{place}.function.strict")
    for keys, known, inside in ((given, ("type", "function"), ""), (function, FUNCTION_KEYS, "function.")):
        for key, value in keys.items():
            if value is not None and key not in known and key not in DROPPED:
                notes.ignore(f"tools.{inside}{key}", f"{place}.{inside}{key}")
    return Tool(name, parameters or {}), {key: function[key] for key in FUNCTION_KEYS if function.get(key) is not None}


def _read_choice(choice: Any, known: dict[str, Tool]) -> tuple[str, list[str] | None]:
    """Return ("auto", "none" or "required"; the names of the tools that may be called, None for all)."""
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", None
    if choice == "required":
        if not known:
            raise ApiError(
                400, "tool_choice is required, and there are no tools of type function: give some", param="tool_choice"
            )
        return "required", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "custom":
        raise ApiError(
            400, "tool_choice names a tool of type custom, which was left out: choose a function", code="unsupported",
            param="tool_choice",
        )  # fmt: skip
    if kind == "function":
        return "required", [_known_name(choice, "tool_choice", known)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise ApiError(
                400, "tool_choice.allowed_tools must have mode auto or required, and tools",
                param="tool_choice.allowed_tools",
            )  # fmt: skip
        place = "tool_choice.allowed_tools.tools"
        listed = allowed.get("tools")
        if not isinstance(listed, list) or not listed:
            raise ApiError(400, f"{place} must be an array of at least one tool", param=place)
        names = [_known_name(each, f"{place}[{i}]", known) for i, each in enumerate(listed)]
        return allowed["mode"], list(dict.fromkeys(names))
    raise ApiError(
        400, "tool_choice must be auto, none or required, or an object of type function or allowed_tools",
        param="tool_choice",
    )  # fmt: skip


def _known_name(given: Any, place: str, known: dict[str, Tool]) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, f"{place}.function.name must name a tool", param=f"{place}.function.name")
    if name not in known:
        raise ApiError(400, f"{place} names {name[:64]!r}, which is not one of tools", param=f"{place}.function.name")
    return name
