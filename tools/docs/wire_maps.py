"""Describe the maps of ``protocol.bodies``, ``protocol.verbs`` and ``protocol.results`` as tables."""

import inspect
import re
import types
from itertools import groupby
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

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
UNIT_ENDINGS = re.compile(r"_(s|ms|bytes|tokens)$")
"""Endings of names that say the unit, so that the type does not repeat it."""
KEY_HEADER = ("key", "type", "meaning")


def described(map_type: type) -> str:
    """Return the text that belongs to a map as a whole, and its keys. The keys of a base with a section are linked."""
    own = inspect.cleandoc(map_type.__dict__.get("__doc__") or "")
    base = section_base(map_type)
    inherited = f"It has the keys of {type_name(base)}, and:" if base else ""
    return "\n\n".join(filter(None, (text(own), inherited, keys(map_type))))


def section_base(map_type: type) -> type | None:
    """Return the map that this one extends, if that has a section of its own. The only key of a map is repeated."""
    base = base_of(map_type)
    return base if base and len(get_type_hints(base)) > 1 else None


def keys(map_type: type) -> str:
    """Return the table of a map's keys, one line for a single key, and nothing for a map without keys."""
    docs, base = attribute_docs(map_type), section_base(map_type)
    hints = get_type_hints(map_type, include_extras=True)
    inherited = get_type_hints(base) if base else {}
    return listed(
        KEY_HEADER, [(name, _key_type(name, hint), docs[name]) for name, hint in hints.items() if name not in inherited]
    )


def listed(header: tuple[str, ...], described: list[tuple[str, str, str]]) -> str:
    """Return a table of names, types and meanings. Neighbours that differ in their names alone share a row."""
    rows = []
    for (kind, meaning), group in groupby(described, key=lambda row: row[1:]):
        rows.append((", ".join(f"`{row[0]}`" for row in group), kind, text(meaning)))
    if len(rows) == 1:
        name, kind, meaning = rows[0]
        return f"{name} ({kind}). {' '.join(meaning.split())}"
    return table(header, rows) if rows else ""


def _key_type(name: str, hint: Any) -> str:
    optional = get_origin(hint) is NotRequired
    kind = type_name(get_args(hint)[0] if optional else hint)
    if unit := UNIT_ENDINGS.search(name):
        kind = re.sub(rf", {unit[1]}\b", "", kind)
    return f"{kind}, optional" if optional else kind


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
    """Return the maps that these maps hold or extend, directly or not, in the order of their mention."""
    found: dict[type, None] = {}
    for map_type in map_types:
        base = section_base(map_type)
        hints = get_type_hints(map_type, include_extras=True).values()
        for inner in [*([base] if base else []), *(inner for hint in hints for inner in _mentioned(hint))]:
            found |= {inner: None} | dict.fromkeys(inner_maps(inner))
    return list(found)


def _mentioned(hint: Any) -> list[type]:
    if is_typeddict(hint):
        return [hint]
    return [inner for argument in get_args(hint) for inner in _mentioned(argument)]


def map_section(map_type: type, level: str) -> str:
    """Return a section about one map, to which ``type_name`` links."""
    return f"{level} Map {map_type.__name__}\n\n{described(map_type)}"
