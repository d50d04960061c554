"""Turn plain data into frozen dataclasses whose types say which values a field may have. Pure.

Types are str, int, float, bool, Any, ``X | None``, Literal, list[X], dict[str, X], other such dataclasses, and
``Annotated`` with ``Within`` (limits of a number) or ``Read`` (a function that reads the value). No value is converted,
except that a whole number is accepted for a float. No value is ignored.

pydantic can do this, too. But for a file of some lines it would take 11 MB of memory as long as the supervisor runs,
and a tenth of a second at each start.
"""

import difflib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from supervisor.spelling import quotes_for, spelled
from supervisor.yaml_variables import Quoted

T = TypeVar("T")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Within:
    """The lowest and highest value of a number. With ``above`` the lowest value itself is not allowed."""

    least: float
    most: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        return f"above {self.least:g}, at most {self.most:g}" if self.above else f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Read:
    """The function that reads a value of any type.

    how   returns the value; raises ValueError that says what the value must be
    name  the name of such a value in the documentation
    """

    how: Callable[[object], Any]
    name: str = "value"


@dataclass(frozen=True, slots=True)
class Flaw:
    """A value that does not fit. ``path`` has the keys and list indices that lead to it."""

    path: Path
    message: str


class Unfit(Exception):
    """Raised with ``flaws``: everything that does not fit."""

    def __init__(self, flaws: list[Flaw]) -> None:
        super().__init__("; ".join(flaw.message for flaw in flaws))
        self.flaws = flaws


def fit(kind: type[T], value: object) -> T:
    """Return an instance of a dataclass made from a mapping. Raises Unfit."""
    flaws: list[Flaw] = []
    made = _mapping(kind, value, (), flaws)
    if flaws:
        raise Unfit(flaws)
    return cast(T, made)


def _fit(hint: Any, value: Any, path: Path, flaws: list[Flaw], within: Within | None = None) -> Any:
    """Return a value in its type. Add whatever does not fit to ``flaws``; the returned value has no meaning then."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, rule = parts
        if isinstance(rule, Within):
            return _fit(inner, value, path, flaws, rule)
        if isinstance(value, str) and not _is_text(value):  # here, so that no function that reads a value can forget it
            return _refuse(value, path, flaws, f"must be {_NAMES[str]}")
        try:
            return rule.how(value)
        except ValueError as e:
            if isinstance(value, Quoted) and (unquoted := value.unquoted) != value:
                return _fit(hint, unquoted, path, flaws)
            return _refuse(value, path, flaws, str(e))
    if origin in (Union, types.UnionType):
        (other,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else _fit(other, value, path, flaws, within)
    if origin is Literal:
        if isinstance(value, str) and value in parts:
            return value
        return _refuse(value, path, flaws, f"must be one of {', '.join(map(repr, parts))}{quotes_for(value)}")
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
            flaws.append(Flaw((*path, key), f"unknown key; {_hint(str(key), known, flaws)}"))
    required = {field.name for field in fields(hint) if field.default is field.default_factory is MISSING}
    flaws += [Flaw((*path, name), "is missing; add it") for name in known if name in required - found.keys()]
    return hint(**found) if len(flaws) == before else None


def _hint(key: str, known: Mapping[str, Any], flaws: list[Flaw]) -> str:
    """Return the known key that was probably meant, else all known keys. Only one fault lists them."""
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]!r}?"
    listed = f"known are {', '.join(sorted(known))}"
    place = next((flaw.path for flaw in flaws if flaw.message.endswith(listed)), None)
    return listed if place is None else f"the known keys are listed at {'.'.join(map(str, place))}"


def _plain(hint: Any, value: Any, path: Path, flaws: list[Flaw], within: Within | None) -> Any:
    if isinstance(value, Quoted):
        value = value.unquoted if hint in (int, float, bool) else str(value)
    if hint is Any or hint is type(value) is bool or (hint is type(value) is str and _is_text(value)):
        return value
    # In Python bool is an int. In a file it is not.
    if type(value) in (hint, int) and hint in (int, float) and (within is None or within.holds(value)):
        return hint(value)
    hint_at_quotes = quotes_for(value) if hint is str else ""
    return _refuse(
        value, path, flaws, f"must be {_NAMES[hint]}{'' if within is None else f' {within}'}{hint_at_quotes}"
    )


_NAMES: Mapping[type, str] = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # one half of a pair of surrogates, which a file can contain as an escape
        return False
    return True


def _refuse(value: object, path: Path, flaws: list[Flaw], message: str) -> None:
    flaws.append(Flaw(path, f"is {spelled(value)}: {message}"))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
