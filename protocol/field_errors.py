"""Make the error for a field that pydantic refused. It has the field's name, value and limit, but never quotes text."""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from protocol.errors import RequestError
from protocol.sampling_params import FieldsDisagree

_MUST_BE = {
    "string_type": "a string",
    "string_pattern_mismatch": "system, user, assistant or tool",
    "bytes_type": "a bin of token ids (u32, little endian)",
    "model_type": "a map of role and content",
    "dict_type": "a map of token ids and numbers",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
}
"""The end of the sentence "must be ...", by the type of pydantic's error."""

_OR_ONE = frozenset({"stop"})
"""Fields that take an array of strings, or one string for an array of one."""

_SHOWN_NAME = 64
"""Characters of an unknown field's name that an error repeats."""

_LISTED_NAMES = 16
"""Most names that an error lists if no known name is similar. A request has more fields than that."""


def request_error(
    error: Any,
    model: type[BaseModel],
    inner: type[BaseModel],
    known: Iterable[str],
    given: Mapping[str, str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> RequestError:
    """Return one sentence that names the field, its value and its limit. Text is never shown, only its length.

    error      one of ValidationError.errors()
    model      the class that has the fields
    inner      the class of a list's elements
    known      names that the model takes
    given      {field: the other name that it was given by}
    elsewhere  {name that the model does not take: what to do instead}
    """
    path = [str(part) for part in error["loc"]]
    name = path[0] if path else None
    shown = ".".join([given.get(path[0], path[0]), *path[1:]]) if path else None
    kind = error["type"]
    if kind == "invalid_key":
        shown = error["input"][:_SHOWN_NAME].decode(errors="replace")
        return RequestError(f"the name {shown!r} is a bin: send names as strings", field=shown)
    if kind == "extra_forbidden":
        if len(path) == 1 and path[0] in elsewhere:
            return RequestError(f"unknown field {path[0]!r}: {elsewhere[path[0]]}", field=path[0])
        names = list(known if len(path) == 1 else inner.model_fields)
        shown = f"{shown[:_SHOWN_NAME]}..." if shown and len(shown) > _SHOWN_NAME else shown
        near = difflib.get_close_matches(path[-1][:_SHOWN_NAME], names, n=1)
        others = f"known are {', '.join(sorted(names))}" if len(names) <= _LISTED_NAMES else "none has a similar name"
        hint = f"did you mean {near[0]!r}?" if near else others
        return RequestError(f"unknown field {shown!r}: {hint}", field=shown)
    if kind == "missing":
        return RequestError(f"{shown} is missing", field=shown)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldsDisagree):
        shown = given.get(cause.field, cause.field)
        return RequestError(f"{shown} {cause.rule}", field=shown)
    if kind == "value_error":
        rule = error["msg"].removeprefix("Value error, ")
    elif kind in ("finite_number", "float_type", "int_type"):
        rule = f"must be {_number_rule(model, path[0])}"
    elif kind == "tuple_type":
        rule = f"must be {'a string, or ' if path[0] in _OR_ONE else ''}an array of {_elements(model, path[0])}"
    elif kind in _MUST_BE:
        limits = {name: f"{v:.15g}" if isinstance(v, float) else v for name, v in error.get("ctx", {}).items()}
        rule = f"must be {_MUST_BE[kind].format(**limits)}"
    else:
        rule = error["msg"]
    if kind == "value_error" and len(path) > 1 and isinstance(error["input"], dict):
        return RequestError(f"{shown}: {rule}", field=shown)  # something in the map is wrong, and not that it is one
    return RequestError(f"{shown} is {_show(error['input'])}: {rule}" if name else rule, field=shown)


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model. The result is cached, because pydantic needs some milliseconds for it."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def _schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    schema = _properties(model).get(name, {})
    first: dict[str, Any] = schema.get("anyOf", [schema])[0]
    return first


def _elements(model: type[BaseModel], name: str) -> str:
    kind = _schema(model, name).get("items", {}).get("type")
    return {"string": "strings", "integer": "token ids"}.get(kind, name)


def _number_rule(model: type[BaseModel], name: str) -> str:
    """Return the bounds of a field in words, such as "a finite number from 0 to 10"."""
    schema = _schema(model, name)
    schema = schema.get("items", schema)
    rule = "a whole number" if schema.get("type") == "integer" else "a finite number"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{rule} from {low:.15g} to {high:.15g}"
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [
        f"{word} {bound if isinstance(bound, int) else format(bound, '.15g')}"
        for word, bound in (("at least", low), ("more than", above), ("at most", high), ("less than", below))
        if bound is not None
    ]
    return ", ".join([rule, *([" and ".join(bounds)] if bounds else [])])


def _show(value: Any) -> str:
    """Return a number, true, false or null as text. For any other value return only its type and length.

    Another value may be a prompt. Types are named as in msgpack and JSON, because the client may be written in another
    language than Python.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    for kind, name, unit in ((str, "a string", "character"), (bytes, "a bin", "byte"), (list, "an array", "element")):
        if isinstance(value, kind):
            return f"{name} of {len(value)} {unit}{'' if len(value) == 1 else 's'}"
    return "a map" if isinstance(value, dict) else f"a {type(value).__name__}"
