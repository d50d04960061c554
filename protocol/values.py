"""Read a map of values with a class that says which keys it has, and which values. Pure.

Every map from outside is read here: the sections of models.yaml, the body and the route of a request, the parameters of
a call, and the messages between processes. The class is a dataclass, a ``CheckedValues``, or a TypedDict. A field's
type is str, int, float, bool, bytes, Any, ``X | None``, Literal, list[X], tuple[X, ...], dict[str, X], or another
class. ``Annotated`` adds bounds (``Within``, ``Length``) and functions (``ReadWith``, ``Then``). No value is converted
or ignored. But a whole number is accepted for a float, and a list for a tuple.

The reader says what does not fit as data (``Flaw``). Each user of this module makes its own words of that, since an
author of models.yaml and a client know different names for a type.
"""

import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NotRequired,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from protocol.codec import pack_body, unpack_body
from protocol.errors import ErrorCode, FrameError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_HALF = re.compile("[\ud800-\udfff]")
"""One half of a pair of surrogates, which a file can contain as an escape. To encode a text would take a copy of it."""
Path = tuple[str | int, ...]
Check = Callable[[Any, bool], Any]
"""Returns the value in its type, or raises Unfit. The second argument: whether to look for every flaw."""


@dataclass(frozen=True, slots=True)
class Within:
    """The lowest and highest value of a number. With ``above`` or ``below`` that bound itself is not allowed."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is within the bounds. NaN is not."""
        return (
            self.least <= value <= self.most
            and not (self.above and value == self.least)
            and not (self.below and value == self.most)
        )

    def __str__(self) -> str:
        return f"above {self.least:g}, at most {self.most:g}" if self.above else f"from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Length:
    """The least and the most characters of a text, or elements of a list."""

    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class ReadWith:
    """The function that reads a value of any type, in place of the type that it annotates.

    how   returns the value; raises ValueError that says what the value must be
    name  the name of such a value in the documentation
    """

    how: Callable[[Any], Any]
    name: str = "value"


@dataclass(frozen=True, slots=True)
class Then:
    """A function that gets the value when its type and its bounds are right. It ends as ``ReadWith.how`` does."""

    how: Callable[[Any], Any]


class NullLeavesOut:
    """A dataclass in whose map null, as the value of a key that may be left out, means that the key is left out."""


class FieldsDisagree(ValueError):
    """The error for fields that are valid alone but not together. ``field`` is the one to mend, ``rule`` says why."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(rule)
        self.field, self.rule = field, rule


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a key may have.

    kind    a plain type, list, dict, or a tuple of the only values
    bounds  of the number, or of the length
    items   of a list: the type of its elements
    """

    kind: Any
    bounds: Within | Length | None = None
    items: Any = None


@dataclass(frozen=True, slots=True)
class Flaw:
    """A value that does not fit.

    path     the keys and list indices that lead to it
    value    the value
    problem  why it does not fit: another value is wanted; a sentence of a function, such as "must be even"; an error
             about two fields; for an unknown key the known ones; None for a key that is missing
    message  the problem in words, if they were made
    """

    path: Path
    value: Any = None
    problem: Allowed | str | FieldsDisagree | Collection[str] | None = None
    message: str = ""


class Unfit(ValueError):
    """Raised with ``flaws``: everything that does not fit, or the first of it."""

    def __init__(self, flaws: list[Flaw]) -> None:
        super().__init__("; ".join(flaw.message or f"{_place(flaw.path)}{flaw.problem}" for flaw in flaws))
        self.flaws = flaws


def read(kind: type[T], value: object, *, every: bool = False) -> T:
    """Return an instance of a class made from a map; for a TypedDict, the map.

    every  look for all flaws, and not only for the first

    Raises Unfit.
    """
    return cast(T, reader(cast(Any, kind))(value, every))


@dataclass_transform(kw_only_default=True, frozen_default=True)
class CheckedValues:
    """A class whose instances hold checked values, and know which of them were given.

    A subclass has annotated fields with defaults, as a dataclass has. The constructor checks the values as ``read``
    does. A subclass may define ``check`` for fields that do not go together.
    """

    def __init__(self, **given: Any) -> None:
        vars(self).update(vars(read(type(self), given)))

    @classmethod
    def made(cls, **given: Any) -> Self:
        """Return an instance with values that need no check."""
        made = cls.__new__(cls)
        vars(made).update(given)
        return made

    def but(self, **changes: Any) -> Self:
        """Return a copy with other values. They need no check."""
        return self.made(**{**vars(self), **changes})

    def check(self) -> None:
        """Raise ValueError, or FieldsDisagree, if the values do not go together."""

    def __setattr__(self, name: str, _: object) -> None:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be set")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in hints_of(type(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def hints_of(kind: Any) -> Mapping[str, Any]:
    """Return the type of each field of a class, with what ``Annotated`` says. Fields of base classes come first."""
    return _hints_of(kind)


@cache
def _hints_of(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the values of the fields of a ``CheckedValues`` that are not given. A required field has none."""
    return {name: getattr(kind, name) for name in hints_of(kind) if hasattr(kind, name)}


def required_of(kind: type) -> Collection[str]:
    """Return the fields that must be given."""
    if is_typeddict(kind):
        return cast(Collection[str], kind.__required_keys__)  # type: ignore[attr-defined]
    if is_dataclass(kind):
        return [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    return [name for name in hints_of(kind) if not hasattr(kind, name)]


def null_leaves_out(kind: Any) -> Collection[str]:
    """Return the fields that are left out where their value is null, see ``NullLeavesOut``."""
    if not (isinstance(kind, type) and issubclass(kind, NullLeavesOut)):
        return ()
    return hints_of(kind).keys() - required_of(kind)


@cache
def reader(hint: Any) -> Check:
    """Return the function that reads a value of a type."""
    if get_origin(hint) is not Annotated:
        return _reader(hint, None)
    inner, *rules = get_args(hint)
    if (how := next((rule.how for rule in rules if isinstance(rule, ReadWith)), None)) is not None:
        check = _by(how)
    else:
        check = _reader(inner, next((rule for rule in rules if isinstance(rule, Within | Length)), None))
    for rule in rules:
        if isinstance(rule, Then):
            check = _then(check, rule.how)
    return check


def _reader(hint: Any, bounds: Within | Length | None) -> Check:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return reader(parts[0])
    if origin in (Union, types.UnionType):
        (other,) = (part for part in parts if part is not types.NoneType)
        inner = reader(other) if bounds is None else _reader(other, bounds)
        return lambda value, every: None if value is None else inner(value, every)
    if origin is Literal:
        return _choice(parts)
    if origin in (list, tuple):
        return _array(origin, parts[0], cast(Length | None, bounds))
    if origin is dict:
        return _map(parts[1])
    if hint is Any:
        return lambda value, _: str(value) if isinstance(value, str) and type(value) is not str else value
    if hint in (str, bytes):
        return _text(hint, cast(Length | None, bounds))
    if hint in (int, float, bool):
        return _number(hint, cast(Within | None, bounds))
    return _record(hint)


def json_schemas(kind: type[CheckedValues]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field of a class, with its default. Functions that read a value are not in it."""
    defaults = defaults_of(kind)
    return {
        name: dict(sorted((_json_schema(hint) | ({"default": defaults[name]} if name in defaults else {})).items()))
        for name, hint in hints_of(kind).items()
    }


def _json_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type, with its keys in order. That of a class is empty."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        made = _json_schema(parts[0])
        inner = made["anyOf"][0] if "anyOf" in made else made
        for rule in parts[1:]:
            inner |= _json_bounds(rule, inner["type"])
        inner = dict(sorted(inner.items()))
        return {"anyOf": [inner, made["anyOf"][1]]} if "anyOf" in made else inner
    if origin in (Union, types.UnionType):
        (other,) = (part for part in parts if part is not types.NoneType)
        return {"anyOf": [_json_schema(other), {"type": "null"}]}
    if origin is Literal:
        return {"enum": [*parts], **_json_schema(type(parts[0]))}
    if origin in (list, tuple):
        return {"items": _json_schema(parts[0]), "type": "array"}
    if origin is dict:
        return {"additionalProperties": True if parts[1] is Any else _json_schema(parts[1]), "type": "object"}
    if hint is bytes:
        return {"format": "binary", "type": "string"}
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {"type": names[hint]} if hint in names else {}


def _json_bounds(rule: object, kind: str) -> dict[str, Any]:
    if isinstance(rule, Within):
        least, most = "exclusiveMinimum" if rule.above else "minimum", "exclusiveMaximum" if rule.below else "maximum"
        return {least: rule.least, most: rule.most}
    if not isinstance(rule, Length):
        return {}
    what = "Items" if kind == "array" else "Length"
    return {f"{end}{what}": size for end, size in (("min", rule.least), ("max", rule.most)) if size}


def _number(kind: type, within: Within | None) -> Check:
    wanted = Allowed(kind, within)
    plain = within is None
    types = (int, float) if kind is float else (kind,)  # in Python a bool is an int, and in a file it is not

    def check(value: Any, every: bool) -> Any:
        if type(value) in types and (plain or within.holds(value)):  # type: ignore[union-attr]
            return kind(value)
        if (other := _unquoted(value)) is not value:
            return check(other, every)
        raise _unfit(value, wanted)

    return check


def _text(kind: type, length: Length | None) -> Check:
    least, most = (length.least, length.most) if length is not None else (0, None)
    wanted, bounded = Allowed(kind), Allowed(kind, length)

    def check(value: Any, _: bool) -> Any:
        if type(value) is not kind:
            if not (kind is str and isinstance(value, str)):
                raise _unfit(value, wanted)
            value = str(value)
        if kind is str and not _is_text(value):
            raise _unfit(value, wanted)
        if not (least <= len(value) and (most is None or len(value) <= most)):
            raise _unfit(value, bounded)
        return value

    return check


def _choice(options: tuple[Any, ...]) -> Check:
    known = {option: option for option in options}

    def check(value: Any, _: bool) -> Any:
        if isinstance(value, str | int | float) and value in known:
            return known[value]
        raise _unfit(value, Allowed(options))

    return check


def _array(make: type, items: Any, length: Length | None) -> Check:
    item = reader(items)
    accepted = (list,) if make is list else (list, tuple)
    wanted, bounded = Allowed(list, None, items), Allowed(list, length, items)
    least, most = (length.least, length.most) if length is not None else (0, None)

    def check(value: Any, every: bool) -> Any:
        if type(value) not in accepted:
            raise _unfit(value, wanted)
        if not (least <= len(value) and (most is None or len(value) <= most)):
            raise _unfit(value, bounded)
        try:
            return make([item(part, every) for part in value])
        except Unfit:
            raise Unfit(_flaws(((place, part, item) for place, part in enumerate(value)), every)) from None

    return check


def _map(values: Any) -> Check:
    item = reader(values)

    def check(value: Any, every: bool) -> Any:
        if not isinstance(value, dict):
            raise _unfit(value, Allowed(dict))
        for key in value:
            if type(key) is bytes:
                raise Unfit([Flaw((cast(str, key),), key, Allowed(str))])
        try:
            return {key: item(part, every) for key, part in value.items()}
        except Unfit:
            raise Unfit(_flaws(((key, part, item) for key, part in value.items()), every)) from None

    return check


def _flaws(parts: Iterable[tuple[Any, Any, Check]], every: bool) -> list[Flaw]:
    """Return the flaws of the parts of a value, with their places. ``parts``: the place, the value and its check."""
    found: list[Flaw] = []
    for place, part, check in parts:
        try:
            check(part, every)
        except Unfit as e:
            found += [replace(flaw, path=(place, *flaw.path)) for flaw in e.flaws]
            if not every:
                break
    return found


def _record(kind: Any) -> Check:
    checks = {name: reader(hint) for name, hint in hints_of(kind).items()}
    required = frozenset(required_of(kind))
    is_record = isinstance(kind, type) and issubclass(kind, CheckedValues)
    plain = is_typeddict(kind)
    may_be_null = null_leaves_out(kind)

    def check(value: Any, every: bool) -> Any:
        if not isinstance(value, dict):
            if not plain and type(value) is kind:
                return value
            raise _unfit(value, Allowed(dict))
        if may_be_null:
            value = {key: part for key, part in value.items() if part is not None or key not in may_be_null}
        try:
            found = {key: checks[key](part, every) for key, part in value.items()}
        except (Unfit, KeyError):
            found = None
        if found is None or not required <= found.keys():
            flaws = _flaws(((key, part, checks.get(key, unknown)) for key, part in value.items()), every)
            flaws += [Flaw((name,)) for name in checks if name in required - value.keys()]
            raise Unfit(flaws if every else flaws[:1])
        try:
            if not is_record:
                return found if plain else kind(**found)
            made = object.__new__(kind)
            vars(made).update(found)
            made.check()
        except FieldsDisagree as e:
            raise Unfit([Flaw((e.field,), found.get(e.field), e)]) from None
        except ValueError as e:
            raise _unfit(value, str(e)) from None
        return made

    def unknown(value: Any, _: bool) -> Any:
        raise _unfit(value, tuple(checks))

    return check


def _by(how: Callable[[Any], Any]) -> Check:
    def check(value: Any, every: bool) -> Any:
        if isinstance(value, str) and not _is_text(value):  # here, so that no function that reads a value can forget it
            raise _unfit(value, Allowed(str))
        try:
            return how(value)
        except Unfit:
            raise
        except ValueError as e:
            if (other := _unquoted(value)) is not value:
                return check(other, every)
            raise _unfit(value, str(e)) from None

    return check


def _then(first: Check, how: Callable[[Any], Any]) -> Check:
    def check(value: Any, every: bool) -> Any:
        checked = first(value, every)
        try:
            return how(checked)
        except ValueError as e:
            raise _unfit(value, str(e)) from None

    return check


def _unquoted(value: Any) -> Any:
    """Return the value of a text that a file has in quotes only because it names variables. Else return ``value``."""
    other = getattr(value, "unquoted", value) if isinstance(value, str) else value
    return value if other == value else other


def _unfit(value: object, problem: Allowed | str | Collection[str]) -> Unfit:
    return Unfit([Flaw((), value, problem)])


def _is_text(value: str) -> bool:
    return value.isascii() or _HALF.search(value) is None


def _place(path: Path) -> str:
    return f"{'.'.join(map(str, path))}: " if path else ""


# Messages between processes of this project: dataclasses, which cross a socket as maps.
#
# A message is one msgpack map. Its key ``kind`` is the name of the class, and the other keys are its fields.


def pack(message: "DataclassInstance") -> bytes:
    """Return a message as bytes."""
    return pack_body({"kind": type(message).__name__, **asdict(message)})


class Kinds(Generic[T]):
    """The messages that one side takes.

    between  the two sides, for errors
    kinds    the classes. Their types say which values a field may have, see ``protocol.values``
    """

    def __init__(self, between: str, *kinds: type[Any]) -> None:
        self._between = between
        self._kinds = {kind.__name__: kind for kind in kinds}

    def read(self, packed: bytes) -> T:
        """Return the message in these bytes. Raises FrameError."""
        fields = unpack_body(packed)
        name = str(fields.pop("kind", None))
        try:
            message: T = read(self._kinds[name], fields)
        except KeyError:
            raise self.wrong("a message of an unknown kind") from None
        except Unfit:  # its words may hold a name of the other side's, which is not for a log
            raise self.wrong(f"a message {name} with wrong values") from None
        return message

    def wrong(self, what: str) -> FrameError:
        """Return the error for something that the other side cannot mean."""
        return FrameError(ErrorCode.BAD_FRAME, f"between {self._between}: {what}")
