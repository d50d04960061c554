"""Turn the tools of OpenAI's Responses API, and the choice among them, into those of its chat API. Pure.

A tool of another type than ``function`` and ``namespace`` runs at OpenAI, or is called in a form of its own. It is left
out, which the notes of the request say.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.http.errors import ApiError
from gateway.http.notes import Notes, named
from gateway.openai.tools import NAME, read_name

KEPT: Final = ("name", "description", "parameters", "strict")
LOADERS: Final = ("additional_tools", "tool_search_output")
"""Types of items that bring further tools within a conversation."""


@dataclass(slots=True)
class OfferedTools:
    """The tools of a request.

    functions   the functions, in the shape of the chat API
    namespaces  (namespace, name) of each function that belongs to a namespace, by the name that the model sees
    left_out    names or types of the tools that are left out
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def flat_name(namespace: str, name: str) -> str:
    """Return the name by which a model knows a function of a namespace. Codex writes flat names in the same way."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def name_of_call(item: dict[str, Any], name: str) -> str:
    """Return the name by which the model knows the function of a call. ``item``: the call, or a choice of a tool."""
    namespace = item.get("namespace")
    return flat_name(namespace, name) if isinstance(namespace, str) and namespace else name


def read_tools(tools: Any, items: Any, notes: Notes) -> OfferedTools:
    """Return the tools of a request. Raises ApiError, which names the place.

    tools  the value of ``tools``, or None
    items  the value of ``input``. Some of its items bring further tools
    notes  told the tools that are left out
    """
    if tools is not None and not isinstance(tools, list):
        raise ApiError(400, "tools must be an array", param="tools")
    offered = OfferedTools()
    taken: set[str] = set()
    for place, name, tool in _flattened(tools or (), "tools", offered):
        if name in taken:
            raise ApiError(400, f"{place} has the name {name!r}, which another tool has", param=place)
        taken.add(name)
        offered.functions.append(_function(place, name, tool))
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") in LOADERS and isinstance(item.get("tools"), list):
            for place, name, tool in _flattened(item["tools"], f"input[{i}].tools", offered):
                if name not in taken:  # the client has loaded it before
                    taken.add(name)
                    offered.functions.append(_function(place, name, tool))
    for left_out in offered.left_out:
        notes.change(f"tools: {left_out}")
    return offered


def read_choice(choice: Any, offered: OfferedTools) -> Any:
    """Return ``tool_choice`` in the shape of the chat API. Raises ApiError if it needs a tool that was left out."""
    if choice == "required" and not offered.functions and offered.left_out:
        raise _not_served(f"is required, and all tools were left out ({', '.join(offered.left_out[:8])})")
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": _chosen(choice)}}
    if kind != "allowed_tools":
        raise _not_served(f"asks for a tool of type {named(kind)!r}")
    tools, mode = choice.get("tools"), choice.get("mode")
    if not isinstance(tools, list):
        return {"type": kind, "allowed_tools": {"mode": mode, "tools": tools}}
    of_functions = [t for t in tools if not isinstance(t, dict) or t.get("type") in (None, "function")]
    if tools and not of_functions:
        if mode == "required":
            raise _not_served("requires one of tools that were left out")
        return "none"
    nested = [
        {"type": "function", "function": {"name": _chosen(tool)}} if isinstance(tool, dict) else tool
        for tool in of_functions
    ]
    return {"type": kind, "allowed_tools": {"mode": mode, "tools": nested}}


def _flattened(tools: Iterable[Any], place: str, offered: OfferedTools) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (place, name for the model, tool) of each function, also of those within namespaces.

    offered  gets the namespaces, and the tools that are left out
    """
    for i, tool in enumerate(tools):
        here = f"{place}[{i}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise ApiError(400, f"{here} must be an object with a type", param=here)
        if tool["type"] == "function":
            yield here, read_name(here, tool), tool
        elif tool["type"] == "namespace":
            yield from _within(here, tool, offered)
        else:
            offered.left_out.append(named(tool.get("name") or tool["type"]))


def _within(place: str, namespace: dict[str, Any], offered: OfferedTools) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the functions of a namespace, as ``_flattened``. The first one tells what the namespace is for."""
    whose, tools, about = read_name(place, namespace), namespace.get("tools"), namespace.get("description")
    if not isinstance(tools, list):
        raise ApiError(400, f"{place}.tools must be an array", param=f"{place}.tools")
    for i, tool in enumerate(tools):
        here = f"{place}.tools[{i}]"
        if not isinstance(tool, dict):
            raise ApiError(400, f"{here} must be an object with a type", param=here)
        if tool.get("type") != "function":
            offered.left_out.append(named(tool.get("name") or tool.get("type")))
            continue
        name = read_name(here, tool)
        flat = flat_name(whose, name)
        if not NAME.fullmatch(flat):
            raise ApiError(
                400, f"{here} is called {flat[:140]!r} with its namespace: at most 128 characters", param=here
            )
        offered.namespaces[flat] = whose, name
        if isinstance(about, str) and about:
            told = tool.get("description")
            tool = tool | {"description": f"{about}\n\n{told}" if isinstance(told, str) else about}
            about = None
        yield here, flat, tool


def _function(place: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    parameters = given.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(
            400, f"{place}.parameters must be a JSON schema, which is an object", param=f"{place}.parameters"
        )
    kept = {key: given[key] for key in KEPT if given.get(key) is not None} | {"name": name}
    return {"type": "function", "function": kept}


def _chosen(choice: dict[str, Any]) -> Any:
    name = choice.get("name")
    return name_of_call(choice, name) if isinstance(name, str) else name


def _not_served(why: str) -> ApiError:
    return ApiError(
        400, f"tool_choice {why}: only tools of type 'function' and 'namespace' can be called here, so use auto, or "
        "name one of these", code="unsupported", param="tool_choice",
    )  # fmt: skip
