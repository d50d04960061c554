"""Read JSON schemas: where a reference leads, which types a value may have, and what an object's members are."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool

ALL_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_SIDE_BY_SIDE: Final = ("anyOf", "oneOf")
_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keys of a schema whose value is a map from names to schemas."""
_DATA: Final = frozenset(("enum", "const", "default", "examples", "required"))
_DEEPEST: Final = 64
"""References that are followed one after the other. A schema that refers to itself has no end."""
_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keys whose value is a list of schemas."""
_SCHEMA: Final = (
    "items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""Keys whose value is a schema."""
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS: Final = ("pattern", "format", "$ref")
_ANNOTATIONS: Final = frozenset(("password", "binary", "textarea", "markdown", "path", "file-path", "directory-path"))
"""Formats that say how a string is shown or used. Every string has them."""


def fault(root: Schema) -> str | None:
    """Return what is wrong in a schema, as "KEY ...", if a key has a value that the key cannot have; None if nothing
    is. Such a schema says nothing. Not every fault is found: patterns are not read."""
    level: list[Any] = [root]
    while level:  # no recursion: a schema may be nested deeply
        schema = level.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            return f"a schema is {_shown(schema)}: must be a map"
        for key, value in schema.items():
            if wrong := _fault_of(root, key, value):
                return f"{key} is {_shown(value)}: {wrong}"
            if key in _MAPS:
                level += value.values()
            elif key in _SCHEMAS or (key == "items" and isinstance(value, list)):
                level += value
            elif key in _SCHEMA:
                level.append(value)
    return None


def _fault_of(root: Schema, key: str, value: Any) -> str | None:
    """Return what the value of a key must be, if it is something else."""
    if key == "type":
        named = value if isinstance(value, list) else [value]
        if not named or not all(isinstance(name, str) and name in ALL_TYPES for name in named):
            return f"must be one of {', '.join(sorted(ALL_TYPES))}, or a list of these"
    elif key in _MAPS:
        return None if isinstance(value, Mapping) else "must be a map"
    elif key == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return "must be a list of strings"
    elif key == "enum" or key in _SCHEMAS:
        return None if isinstance(value, list) else "must be a list"
    elif key in _COUNTS:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        return None if whole and value >= 0 else "must be a whole number of at least 0"
    elif key in _NUMBERS:
        return None if type(value) in (int, float) else "must be a number"
    elif key in _TEXTS:
        if not isinstance(value, str):
            return "must be a string"
        if key == "$ref" and value.startswith("#") and pointed_at(root, value, None) is None:
            return "no schema is there"
    return None


def _shown(value: Any) -> str:
    """Return a value of a schema for people: short, and no text of more than a word."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:64]
    if isinstance(value, str):
        return repr(value[:64])
    return "a list" if isinstance(value, list) else "a map"


def readable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, or one that says nothing if the schema has a ``fault``."""
    return schema if fault(schema) is None else {}


def without_annotations(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema without keys that say nothing about a value. For ``changed``."""
    if isinstance(part.get("format"), str) and part["format"] in _ANNOTATIONS:
        del part["format"]
    if part.get("propertyNames") in (True, {}, {"type": "string"}):
        del part["propertyNames"]  # every name is a string
    return part


def resolved(root: Schema, schema: Schema, depth: int = 0) -> Schema:
    """Return a schema without the ``$ref`` or the single ``allOf`` at its top. What stands beside it stays."""
    if isinstance(schema, bool) or depth > _DEEPEST:
        return schema
    rest = dict(schema)
    target: Any
    if isinstance(pointer := rest.pop("$ref", None), str):
        target = pointed_at(root, pointer)
    elif isinstance(every := rest.get("allOf"), list) and len(every) == 1:
        target = every[0]
        del rest["allOf"]
    else:
        return schema
    target = resolved(root, target, depth + 1)
    return rest if isinstance(target, bool) else {**target, **rest}


def pointed_at(root: Schema, pointer: str, nothing: bool | None = True) -> Any:
    """Return the schema that a local JSON pointer names; ``nothing`` if it names none. True allows everything."""
    at: Any = root
    for step in pointer.removeprefix("#").split("/")[1:] if pointer.startswith("#") else [""]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            return nothing
    return at if isinstance(at, Mapping | bool) else nothing


def types(root: Schema, schema: Schema, depth: int = 0) -> frozenset[str]:
    """Return the types that a value may have. "number" includes "integer"."""
    schema = resolved(root, schema)
    if isinstance(schema, bool):
        return ALL_TYPES if schema else frozenset()
    allowed = ALL_TYPES
    given = schema.get("type")
    if given is not None:
        named = {given} if isinstance(given, str) else set(given)
        allowed &= named | ({"integer"} if "number" in named else set())
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        allowed &= {name for value in values for name in types_of_value(value)}
    if depth < _DEEPEST:
        for key in _SIDE_BY_SIDE:
            if isinstance(branches := schema.get(key), list):
                allowed &= frozenset().union(*(types(root, branch, depth + 1) for branch in branches))
        for branch in schema.get("allOf", ()):
            allowed &= types(root, branch, depth + 1)
    return allowed


def types_of_value(value: Any) -> frozenset[str]:
    """Return the types that a value has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def branches(root: Schema, schema: Schema, depth: int = 0) -> Iterator[Schema]:
    """Return the alternatives of a schema. What stands beside ``anyOf`` holds for each of them."""
    schema = resolved(root, schema)
    for key in _SIDE_BY_SIDE:
        if isinstance(schema, Mapping) and isinstance(schema.get(key), list) and depth < _DEEPEST:
            beside = {name: value for name, value in schema.items() if name != key}
            for branch in schema[key]:
                branch = resolved(root, branch)
                if isinstance(branch, Mapping):
                    yield from branches(root, {**beside, **branch}, depth + 1)
                elif branch:
                    yield from branches(root, beside, depth + 1)
            return
    yield schema


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object.

    named     (key, schema, whether the object must have it), in the schema's order
    other     the schema of other members; None if there are none, and if the schema says nothing of them
    """

    named: tuple[tuple[str, Schema, bool], ...]
    other: Schema | None

    @classmethod
    def of(cls, root: Schema, schema: Schema) -> "Members":
        """Return the members that a schema of an object tells."""
        schema = resolved(root, schema)
        if isinstance(schema, bool):
            return cls((), True if schema else None)
        properties = schema.get("properties", {})
        required = dict.fromkeys(schema.get("required", ()))
        other = schema.get("additionalProperties")
        unnamed: Schema = True if other is None else other
        named = [(key, value, key in required) for key, value in properties.items()]
        named += [(key, unnamed, True) for key in required if key not in properties]
        return cls(tuple(named), None if other is False else other)

    def schema_of(self, key: str) -> Schema:
        """Return the schema of a member."""
        known = next((schema for name, schema, _ in self.named if name == key), None)
        if known is not None:
            return known
        return True if self.other is None else self.other


def part(root: Schema, schema: Schema) -> dict[str, Any]:
    """Return a schema of its own for a part of a schema, whose references lead to places in the whole."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    made = dict(_moved(schema))
    if _refers(made):
        made["$defs"] = {**made.get("$defs", {}), "whole": _moved(root)}
    return made


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema whose parts, from the innermost on, are replaced by what ``change`` returns. Values of an enum
    and the like are no parts."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            made[key] = {name: changed(inner, change) for name, inner in value.items()}
        elif key in _DATA:
            made[key] = value
        else:
            made[key] = (
                [changed(inner, change) for inner in value] if isinstance(value, list) else changed(value, change)
            )
    return change(made)


def _moved(schema: Any) -> Any:
    """Return a schema whose local references lead into ``#/$defs/whole``."""

    def move(made: dict[str, Any]) -> dict[str, Any]:
        pointer = made.get("$ref")
        if isinstance(pointer, str) and pointer.startswith("#"):
            made["$ref"] = f"#/$defs/whole{pointer[1:]}"
        return made

    return changed(schema, move)


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("$ref"), str) or any(_refers(inner) for inner in value.values())
    return isinstance(value, list) and any(_refers(inner) for inner in value)


# Regular expressions for the strings that a JSON schema allows, where a model writes them without quotes.


_YEAR: Final = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+H)?|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
    "email": rf"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1|::",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.\-]*:[a-zA-Z0-9\-._~:/?#@!$&'()*+,;=%\[\]]+",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Formats whose strings can be constrained. Each expression matches strings of the format, and most of them."""
_AROUND: Final = re.compile(r"\(\?(?!:|[imsux-]*[:)]|P?<[a-zA-Z_])|\\[bB1-9]|\\k")
EXACT: Final = ("date", "date-time")
"""Formats of which llguidance itself allows too much: a 29th of February in each year, and a year 0."""
_CLASSES: Final = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\x0B"}
_TOKEN: Final = re.compile(r"\\.|\[\^?|\]|/|\n|.", re.DOTALL)


def looks_around(pattern: str) -> bool:
    """Return whether a pattern looks around, or back. llguidance refuses such a pattern."""
    return bool(_AROUND.search(pattern))


def of_pattern(pattern: str) -> str:
    r"""Return the expression of whole strings in which a pattern of a schema is found.

    \d, \w and \s mean what they mean in JSON schemas: ASCII characters. An anchor within the pattern stays, and
    llguidance refuses it.
    """
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}({_ascii(inner)}){'' if ends else '(?s:.*)'}"


def _ascii(pattern: str) -> str:
    made: list[str] = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        if token[0] == "[" and not in_class:
            in_class = True
        elif token == "]":
            in_class = False
        elif token == "[" and in_class:
            token = r"\["
        elif token == "/":
            token = r"\/"
        elif token == "\n":
            token = r"\n"
        elif token[0] == "\\" and (characters := _CLASSES.get(token[1:].lower())) is not None:
            if token[1].islower():
                token = characters if in_class else f"[{characters}]"
            elif not in_class:
                token = f"[^{characters}]"
        made.append(token)
    return "".join(made)


def of_length(shortest: int, longest: int | None) -> str:
    """Return the expression of strings by their number of characters."""
    return f"(?s:.{{{shortest},{'' if longest is None else longest}}})"
