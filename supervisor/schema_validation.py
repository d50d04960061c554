"""Plain data made into frozen dataclasses: what may stand in a field is what its type says. Pure.

Types are str, int, float, bool, Any, ``X | None``, Literal, list[X], dict[str, X], other such dataclasses, and what
``Annotated`` says with ``Within`` (bounds of a number) or ``Read`` (a function that reads the value). Nothing is
converted, except that a whole number may stand for a float; nothing is ignored.

pydantic can do this, too. It would take 11 MB of the supervisor for as long as that runs, and a tenth of a second of
every start, to read a file of some lines.
"""

import difflib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from supervisor.spelling import spelled

T = TypeVar("T")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Within:
    """Of a number: least and most. ``above``: the least itself is not allowed."""

    least: float
    most: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        return f"above {self.least:g}, at most {self.most:g}" if self.above else f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Read:
    """How a value is read, whatever its type.

    how   returns the value; raises ValueError saying what it must be
    name  what the documentation calls such a value
    """

    how: Callable[[object], Any]
    name: str = "value"


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that does not fit. ``path``: the keys and places that lead there."""

    path: Path
    message: str


class Unfit(Exception):
    """``flaws``: all that was found."""

    def __init__(self, flaws: list[Flaw]) -> None:
        super().__init__("; ".join(flaw.message for flaw in flaws))
        self.flaws = flaws


def fit(kind: type[T], value: object) -> T:
    """An instance of a dataclass from a mapping. Raises Unfit."""
    flaws: list[Flaw] = []
    made = _mapping(kind, value, (), flaws)
    if flaws:
        raise Unfit(flaws)
    return cast(T, made)


def _fit(hint: Any, value: Any, path: Path, flaws: list[Flaw], within: Within | None = None) -> Any:
    """The value as the type has it. What does not fit is added to ``flaws``; what is returned then means nothing."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, rule = parts
        if isinstance(rule, Within):
            return _fit(inner, value, path, flaws, rule)
        try:
            return rule.how(value)
        except ValueError as e:
            return _refuse(value, path, flaws, str(e))
    if origin in (Union, types.UnionType):
        (other,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else _fit(other, value, path, flaws, within)
    if origin is Literal:
        if isinstance(value, str) and value in parts:
            return value
        return _refuse(value, path, flaws, f"must be one of {', '.join(map(repr, parts))}")
    if origin is list:
        if not isinstance(value, list):
            return _refuse(value, path, flaws, "must be a list")
        return [_fit(parts[0], part, (*path, place), flaws) for place, part in enumerate(value)]
    if origin is dict or is_dataclass(hint):
        return _mapping(hint, value, path, flaws)
    return _plain(hint, value, path, flaws, within)


def _mapping(hint: Any, value: Any, path: Path, flaws: list[Flaw]) -> Any:
    if not isinstance(value, dict):
        return _refuse(value, path, flaws, "must be a mapping (key: value lines)")
    if get_origin(hint) is dict:
        return {key: _fit(get_args(hint)[1], part, (*path, key), flaws) for key, part in value.items()}
    known, before = _hints(hint), len(flaws)
    found = {}
    for key, part in value.items():
        if key in known:
            found[key] = _fit(known[key], part, (*path, key), flaws)
        else:
            near = difflib.get_close_matches(str(key), known, n=1)
            message = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            flaws.append(Flaw((*path, key), f"unknown key; {message}"))
    required = {field.name for field in fields(hint) if field.default is field.default_factory is MISSING}
    flaws += [Flaw((*path, name), "is missing; add it") for name in known if name in required - found.keys()]
    return hint(**found) if len(flaws) == before else None


def _plain(hint: Any, value: Any, path: Path, flaws: list[Flaw], within: Within | None) -> Any:
    if hint is Any or hint is type(value) is bool or (hint is type(value) is str and _is_text(value)):
        return value
    # bool is an int in Python, not in a file
    if type(value) in (hint, int) and hint in (int, float) and (within is None or within.holds(value)):
        return hint(value)
    return _refuse(value, path, flaws, f"must be {_NAMES[hint]}{'' if within is None else f' {within}'}")


_NAMES: Mapping[type, str] = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which a file can write as an escape
        return False
    return True


def _refuse(value: object, path: Path, flaws: list[Flaw], message: str) -> None:
    flaws.append(Flaw(path, f"is {spelled(value)}: {message}"))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
