"""Read calls that are JSON objects, {"name": NAME, "arguments": {...}}, in any order of their keys."""

import json
from collections.abc import Callable
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.source import Source, Steps, ignore

NAMES: Final = ("name", "function", "tool_name")
ARGUMENTS: Final = ("arguments", "parameters")
"""Hermes and Mistral were trained with the first one, Llama 3 with the second one. Models mix them up."""


def read_object(source: Source, calls: Calls, *, name_first: bool = False) -> Steps[Found]:
    """Read one call. Other keys, such as an id, are left out.

    name_first  whether the object is a call only if it begins with the name, or with {"type": "function"} and the name,
                and without escapes. The grammar looks for such a call where no marker begins it
    """
    if not (yield from source.literal("{")):
        return Found.NOTHING
    name: str | None = None
    early: str | None = None  # arguments in front of the name, or arguments that are no object
    is_told = False
    while True:
        yield from source.blanks()
        if (yield from source.literal("}")):
            break
        key = yield from _key(source, plain=name_first and name is None)
        if key is None:
            return Found.CALL if is_told else Found.NOTHING
        if key in NAMES and name is None and not is_told:
            name = yield from source.string(plain=name_first)
            if name is None:
                return Found.NOTHING
            if name not in calls.tools:
                yield from source.json(ignore, depth=1)
                return Found.TEXT
        elif name_first and name is None:
            if key != "type" or (yield from source.string(plain=True)) != "function":
                return Found.NOTHING
        elif key in ARGUMENTS and name is not None and not is_told and (yield from source.peek()) == "{":
            calls.start(name)
            is_told = True
            if not (yield from source.json(calls.arguments)):
                return Found.CALL
        elif key in ARGUMENTS and not is_told:
            pieces: list[str] = []
            yield from source.json(pieces.append)
            early = "".join(pieces)
        else:
            yield from source.json(ignore)
        yield from source.blanks()
        if not (yield from source.literal(",")):
            if not (yield from source.literal("}")):
                return Found.CALL if is_told else Found.NOTHING
            break
    if is_told:
        calls.end()
        return Found.CALL
    arguments = _object(early)
    if name is None or arguments is None:
        return Found.NOTHING
    calls.whole(name, arguments)
    return Found.CALL


def behind(separator: str) -> Callable[[Source, Calls], Steps[Found]]:
    """Return a function that reads one call with a separator in front of it."""

    def read(source: Source, calls: Calls) -> Steps[Found]:
        yield from source.blanks()
        if not (yield from source.literal(separator)):
            return Found.NOTHING
        yield from source.blanks()
        return (yield from read_object(source, calls))

    return read


def read_list(source: Source, calls: Calls) -> Steps[Found]:
    """Read calls in a JSON list."""
    yield from source.blanks()
    if not (yield from source.literal("[")):
        return Found.NOTHING
    yield from source.blanks()
    found = yield from read_object(source, calls)
    if found is not Found.NOTHING:
        if found is Found.TEXT:
            return found
        while (yield from calls.further(behind(","))):
            pass
        yield from source.blanks()
        yield from source.literal("]")
    return found


def _key(source: Source, *, plain: bool) -> Steps[str | None]:
    """Read a key and its colon."""
    key = yield from source.string(plain=plain)
    yield from source.blanks()
    if key is None or not (yield from source.literal(":")):
        return None
    yield from source.blanks()
    return key


def _object(text: str | None) -> str | None:
    """Return arguments as a JSON object. Some models write the object as a string, or null for no arguments."""
    try:
        value = None if text is None else json.loads(text, strict=False)
        if isinstance(value, str):
            text, value = value, json.loads(value, strict=False)
    except ValueError:
        return None
    return "{}" if value is None else text if isinstance(value, dict) else None
