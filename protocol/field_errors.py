"""Say which field of a request does not fit, with its name, its value and its limit. Text is never quoted."""

import difflib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin

from protocol.errors import RequestError
from protocol.values import FieldsDisagree, Flaw, Length, Wanted, Within

_MUST_BE = {
    str: "a string",
    bytes: "a bin of token ids (u32, little endian)",
    dict: "a map of role and content",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
}
"""The values of a type that can be wanted."""

_SHOWN_NAME = 64
"""Characters of an unknown field's name that an error repeats."""

_LISTED_NAMES = 16
"""Most names that an error lists if no known name is similar. A request has more fields than that."""


def request_error(
    flaw: Flaw,
    known: Iterable[str],
    given: Mapping[str, str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> RequestError:
    """Return one sentence that names the field, its value and its limit. Text is never shown, only its length.

    known      names that the request takes
    given      {field: the other name that it was given by}
    elsewhere  {name that the request does not take: what to do instead}
    """
    if flaw.path and isinstance(flaw.path[-1], bytes):
        shown = flaw.path[-1][:_SHOWN_NAME].decode(errors="replace")
        return RequestError(f"the name {shown!r} is a bin: send names as strings", field=shown)
    path, problem = [str(part) for part in flaw.path], flaw.problem
    shown = ".".join([given.get(path[0], path[0]), *path[1:]]) if path else None
    if isinstance(problem, FieldsDisagree):
        return RequestError(f"{shown} {problem.rule}", field=shown)
    if problem is None:
        return RequestError(f"{shown} is missing", field=shown)
    if isinstance(problem, Wanted):
        rule = f"must be {_wanted(flaw.value, problem, path[0])}"
    elif isinstance(problem, str):
        rule = problem
        if len(path) > 1 and isinstance(flaw.value, dict):
            return RequestError(
                f"{shown}: {rule}", field=shown
            )  # something in the map is wrong, and not that it is one
    else:
        return _unknown(path, [*(known if len(path) == 1 else problem)], elsewhere)
    return RequestError(f"{shown} is {_show(flaw.value)}: {rule}" if shown else rule, field=shown)


def _unknown(path: list[str], names: list[str], elsewhere: Mapping[str, str]) -> RequestError:
    if len(path) == 1 and path[0] in elsewhere:
        return RequestError(f"unknown field {path[0]!r}: {elsewhere[path[0]]}", field=path[0])
    shown = ".".join(path)
    shown = f"{shown[:_SHOWN_NAME]}..." if len(shown) > _SHOWN_NAME else shown
    near = difflib.get_close_matches(path[-1][:_SHOWN_NAME], names, n=1)
    others = f"known are {', '.join(sorted(names))}" if len(names) <= _LISTED_NAMES else "none has a similar name"
    return RequestError(f"unknown field {shown!r}: {f'did you mean {near[0]!r}?' if near else others}", field=shown)


def _wanted(value: Any, wanted: Wanted, name: str) -> str:
    """Return which values a field takes, or the one bound that a value of the right type is beyond."""
    kind, bounds = wanted.kind, wanted.bounds
    if isinstance(kind, tuple):
        return " or ".join(map(repr, kind))
    if isinstance(bounds, Within):
        right = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        return _beyond(value, bounds, kind) if right else _range(_MUST_BE[kind], bounds)
    if isinstance(bounds, Length):
        unit = " " if kind is list else " characters "
        if len(value) < bounds.least:
            return f"at least {bounds.least}{unit if bounds.least > 1 or kind is list else ' character '}long"
        return f"at most {bounds.most}{unit}long"
    if kind is not list:
        return _MUST_BE[kind]
    items = get_args(wanted.items)[0] if get_origin(wanted.items) is Annotated else wanted.items
    return f"an array of {({str: 'strings', int: 'token ids'}).get(items, name)}"


def _beyond(value: float, within: Within, kind: type) -> str:
    low = value < within.least or (within.above and value == within.least)
    bound = within.least if low else within.most
    words = ("more than" if within.above else "at least") if low else ("less than" if within.below else "at most")
    return f"{words} {bound if kind is int else format(bound, '.15g')}"


def _range(rule: str, within: Within) -> str:
    """Return bounds in words, such as "a finite number from 0 to 10"."""
    if not within.above and not within.below:
        return f"{rule} from {within.least:.15g} to {within.most:.15g}"
    low, high = "more than" if within.above else "at least", "less than" if within.below else "at most"
    return f"{rule}, {low} {within.least} and {high} {within.most}"


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
