"""Compare received maps with the classes of ``protocol.bodies`` and ``protocol.verbs`` that describe them."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict


def differences(value: Any, hint: Any, path: str = "body") -> Iterator[str]:
    """Yield a line for each missing key, each unknown key, and each value of another type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Annotated, NotRequired):
        yield from differences(value, arguments[0], path)
    elif origin in (Union, types.UnionType):
        if all(list(differences(value, argument, path)) for argument in arguments):
            yield f"{path} is {value!r}, not {hint}"
    elif is_typeddict(hint):
        yield from _of_map(value, hint, path)
    elif origin in (list, dict):
        if type(value) is not origin:
            yield f"{path} is {value!r}, not {hint}"
            return
        for key, element in enumerate(value) if origin is list else value.items():
            yield from differences(element, arguments[-1], f"{path}[{key!r}]")
    elif type(value) is not hint:
        yield f"{path} is {value!r}, not {hint}"


def _of_map(value: Any, hint: Any, path: str) -> Iterator[str]:
    if type(value) is not dict:
        yield f"{path} is {value!r}, not a map"
        return
    hints = get_type_hints(hint, include_extras=True)
    for key in value.keys() - hints.keys():
        yield f"{path} has the key {key!r}, which is not described"
    for key, element in hints.items():
        if key in value:
            yield from differences(value[key], element, f"{path}.{key}")
        elif get_origin(element) is not NotRequired:
            yield f"{path} lacks the key {key!r}"
