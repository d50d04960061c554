"""Describe the maps of ``protocol.bodies``, ``protocol.verbs`` and ``protocol.results`` as tables."""

import inspect
import re
import types
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from protocol import bodies
from protocol.attribute_docs import attribute_docs, base_of
from tools.docs.markdown import table, text

NAMES = {
    str: "string",
    int: "integer",
    float: "float",
    bool: "boolean",
    bytes: "bin",
    dict: "map",
    type(None): "null",
    Any: "any",
}
"""Python's type → its name on the wire."""
FAILURE = "#map-failure"
KEY_HEADER = ("key", "type", "presence", "meaning")


def described(map_type: type, present: str = "always") -> str:
    """Return the text that belongs to a map as a whole, and the table of its keys.

    present  the entry in the column "presence" for keys that are not optional
    """
    own = inspect.cleandoc(map_type.__dict__.get("__doc__") or "")
    inherited = f"It has the keys of the map [Failure]({FAILURE}), and:" if base_of(map_type) is bodies.Failure else ""
    return "\n\n".join(filter(None, (text(own), inherited, keys(map_type, present))))


def keys(map_type: type, present: str = "always") -> str:
    """Return the table of a map's keys; nothing for a map without keys."""
    docs = dict(attribute_docs(map_type))
    if base_of(map_type) is bodies.Failure:
        docs = {name: words for name, words in docs.items() if name not in attribute_docs(bodies.Failure)}
    rows = []
    for name, hint in get_type_hints(map_type, include_extras=True).items():
        if name not in docs:
            continue
        presence = present
        if get_origin(hint) is NotRequired:
            presence, (hint,) = "optional", get_args(hint)
        rows.append((f"`{name}`", type_name(hint), presence, text(docs[name])))
    return table(KEY_HEADER, rows) if rows else ""


def type_name(hint: Any) -> str:
    """Return the name of a type on the wire, with its unit."""
    if is_typeddict(hint):
        return f"map [{hint.__name__}](#map-{hint.__name__.lower()})"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, *units = arguments
        return ", ".join([type_name(inner), *(unit for unit in units if isinstance(unit, str))])
    if origin in (Union, types.UnionType):
        known = [type_name(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*known, *(["null"] if type(None) in arguments else [])])
    if origin in (list, tuple):
        return f"array of {_plural(type_name(arguments[0]))}"
    if origin is dict:
        return "map" if arguments[1] is Any else f"map of {_plural(type_name(arguments[1]))}"
    return NAMES[hint]


def _plural(name: str) -> str:
    if name.startswith("array of"):
        return name.replace("array of", "arrays of", 1)
    return {"any": "values"}.get(name, re.sub(r"^(string|integer|float|map)\b", r"\1s", name))


def inner_maps(*map_types: type) -> list[type]:
    """Return the maps that these maps hold, directly or not, in the order of their mention."""
    found: dict[type, None] = {}
    for map_type in map_types:
        for hint in get_type_hints(map_type, include_extras=True).values():
            for inner in _mentioned(hint):
                found |= {inner: None} | dict.fromkeys(inner_maps(inner))
    return list(found)


def _mentioned(hint: Any) -> list[type]:
    if is_typeddict(hint):
        return [hint]
    return [inner for argument in get_args(hint) for inner in _mentioned(argument)]


def map_section(map_type: type, level: str) -> str:
    """Return a section about one map, to which ``type_name`` links."""
    return f"{level} Map {map_type.__name__}\n\n{described(map_type)}"
