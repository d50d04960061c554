"""Maps become instances of classes strictly. What does not fit is named by its place, its value and what is wanted."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from protocol.values import (
    Allowed,
    CheckedValues,
    FieldsDisagree,
    Flaw,
    Length,
    ReadWith,
    Then,
    Unfit,
    Within,
    read,
    reader,
)


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


class Turn(CheckedValues):
    role: Literal["user", "tool"]
    text: Annotated[str, Length(1, 5)] | None = None


class Asked(CheckedValues):
    turns: Annotated[tuple[Turn, ...], Length(1, 2)] | None = None
    ids: tuple[Annotated[int, Within(0, 9)], ...] = ()
    seed: Annotated[int, Within(0, 1 << 63, below=True)] | None = None
    mode: Literal[0, 2] = 0
    share: Annotated[float, Within(0, 1)] = 0.5
    half: Annotated[int, Within(0, 8), Then(_even)] = 2
    raw: bytes | None = None

    def check(self) -> None:
        if self.seed is not None and self.mode:
            raise FieldsDisagree("seed", "needs mode 0")
        if self.turns is None and self.raw is None:
            raise ValueError("give turns or raw")


class Params(TypedDict):
    model: str
    now: NotRequired[bool]
    limit: NotRequired[Annotated[int, Within(1, 100)]]


def flaw_of(kind: type, value: object) -> Flaw:
    with pytest.raises(Unfit) as caught:
        read(kind, value)
    (flaw,) = caught.value.flaws
    return flaw


def test_a_record_knows_what_was_given() -> None:
    asked = read(Asked, {"turns": [{"role": "user", "text": None}], "share": 1, "ids": [3], "mode": 2})
    assert asked == Asked(turns=(Turn(role="user"),), share=1.0, ids=(3,), mode=2)
    assert type(asked.share) is float
    assert asked.turns is not None
    assert vars(asked.turns[0]) == {"role": "user", "text": None}
    assert (asked.seed, asked.half) == (None, 2)
    assert asked.but(half=4).half == 4
    assert asked.but(half=4) != asked
    with pytest.raises(AttributeError):
        asked.half = 4  # type: ignore[misc]
    with pytest.raises(Unfit):
        Asked(raw=b"", half=3)


@pytest.mark.parametrize(
    ("given", "path", "value", "problem"),
    [
        ([], (), [], Allowed(dict)),
        ({"rw": 1}, ("rw",), 1, ("turns", "ids", "seed", "mode", "share", "half", "raw")),
        ({b"raw": 1}, (b"raw",), 1, ("turns", "ids", "seed", "mode", "share", "half", "raw")),
        ({"rw": 1, "raw": "x"}, ("rw",), 1, ("turns", "ids", "seed", "mode", "share", "half", "raw")),
        ({"raw": "x"}, ("raw",), "x", Allowed(bytes)),
        ({"raw": b"", "share": True}, ("share",), True, Allowed(float, Within(0, 1))),
        ({"raw": b"", "share": float("nan")}, ("share",), None, Allowed(float, Within(0, 1))),
        ({"raw": b"", "seed": 1 << 63}, ("seed",), 1 << 63, Allowed(int, Within(0, 1 << 63, below=True))),
        ({"raw": b"", "mode": 1}, ("mode",), 1, Allowed((0, 2))),
        ({"raw": b"", "mode": []}, ("mode",), [], Allowed((0, 2))),
        ({"raw": b"", "half": 3}, ("half",), 3, "must be even"),
        ({"raw": b"", "ids": "3"}, ("ids",), "3", Allowed(list, None, Annotated[int, Within(0, 9)])),
        ({"raw": b"", "ids": [1, 10]}, ("ids", 1), 10, Allowed(int, Within(0, 9))),
        ({"turns": []}, ("turns",), [], Allowed(list, Length(1, 2), Turn)),
        ({"turns": [{"role": "user", "text": ""}]}, ("turns", 0, "text"), "", Allowed(str, Length(1, 5))),
        ({"turns": [{}]}, ("turns", 0, "role"), None, None),
        ({}, (), {}, "give turns or raw"),
    ],
)
def test_the_first_flaw(given: Any, path: tuple[Any, ...], value: Any, problem: Any) -> None:
    flaw = flaw_of(Asked, given)
    assert (flaw.path, flaw.problem) == (path, problem)
    assert flaw.value == value or value is None


def test_fields_that_disagree() -> None:
    flaw = flaw_of(Asked, {"raw": b"", "seed": 1, "mode": 2})
    assert isinstance(flaw.problem, FieldsDisagree)
    assert (flaw.path, flaw.value, flaw.problem.rule) == (("seed",), 1, "needs mode 0")


def test_a_typed_dict_is_a_map() -> None:
    assert read(Params, {"model": "a", "limit": 3}) == {"model": "a", "limit": 3}
    assert flaw_of(Params, {"now": True}) == Flaw(("model",))
    assert flaw_of(Params, {"model": "a", "now": 1}).problem == Allowed(bool)
    assert flaw_of(Params, {"model": "a", "limit": 0}).problem == Allowed(int, Within(1, 100))


def test_every_flaw_or_the_first() -> None:
    given = {"now": 1, "x": 2, "limit": 0}
    with pytest.raises(Unfit) as caught:
        read(Params, given, every=True)
    assert [flaw.path for flaw in caught.value.flaws] == [("now",), ("x",), ("limit",), ("model",)]
    with pytest.raises(Unfit) as caught:
        read(Params, given)
    assert [flaw.path for flaw in caught.value.flaws] == [("now",)]


@dataclass(frozen=True)
class Entry:
    name: str
    sizes: dict[str, int]
    where: Annotated[str, ReadWith(lambda given: given.strip())] = ""


def test_a_dataclass() -> None:
    assert read(Entry, {"name": "a", "sizes": {"x": 1}, "where": " y "}) == Entry("a", {"x": 1}, "y")
    assert flaw_of(Entry, {"name": "a", "sizes": {"x": 1.0}}) == Flaw(("sizes", "x"), 1.0, Allowed(int))
    assert flaw_of(Entry, {"name": "a", "sizes": {b"x": 1}}) == Flaw(("sizes", b"x"), b"x", Allowed(str))
    assert flaw_of(Entry, {"name": "\ud800", "sizes": {}}).problem == Allowed(str)


def test_types_are_read_once() -> None:
    assert reader(Entry) is reader(Entry)
