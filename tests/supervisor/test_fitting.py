"""Plain data becomes dataclasses strictly, and the error names everything that does not fit."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values import ReadWith, Unfit, Within
from supervisor.config.models import ModelConfig
from supervisor.config.reading import fit
from supervisor.config.server import FileConfig, SupervisorConfig


def _even(value: object) -> int:
    if not isinstance(value, int) or value % 2:
        raise ValueError("must be even")
    return value // 2


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Annotated[int, Within(1, 9)]


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    flag: bool = False
    share: Annotated[float, Within(0, 1, above=True)] | None = None
    mode: Literal["a", "b"] | None = None
    half: Annotated[Any, ReadWith(_even)] = None
    sizes: list[Annotated[int, Within(1, 9)]] | None = None
    inner: Inner = field(default_factory=lambda: Inner(size=1))
    inners: dict[str, Inner] | None = None


def test_what_fits() -> None:
    assert fit(Outer, {"name": "x"}) == Outer(name="x")
    given = {"name": "x", "flag": True, "share": 1, "mode": "b", "half": 8, "sizes": [1, 9], "inner": {"size": 2}}
    made = fit(Outer, {**given, "inners": {"one": {"size": 3}}})
    assert (made.flag, made.share, made.mode, made.half, made.sizes) == (True, 1.0, "b", 4, [1, 9])
    assert type(made.share) is float
    assert (made.inner, made.inners) == (Inner(size=2), {"one": Inner(size=3)})
    assert fit(Outer, {"name": "x", "share": None, "sizes": None}).sizes is None


@pytest.mark.parametrize(
    ("key", "value", "path", "message"),
    [
        ("name", 5, ("name",), "is 5: must be text; put it into quotes"),
        ("name", None, ("name",), "is null: must be text"),
        ("name", "\ud800", ("name",), r"is '\ud800': must be text"),
        ("half", "\ud800", ("half",), r"is '\ud800': must be text"),
        ("flag", 1, ("flag",), "is 1: must be true or false"),
        ("flag", None, ("flag",), "is null: must be true or false"),
        ("share", 0, ("share",), "is 0: must be a number above 0, at most 1"),
        ("share", True, ("share",), "is true: must be a number above 0, at most 1"),
        ("share", float("nan"), ("share",), "is nan: must be a number above 0, at most 1"),
        pytest.param(
            "share", 10**5000, ("share",), "is a long number: must be a number above 0, at most 1", id="digits"
        ),
        ("mode", "c", ("mode",), "is 'c': must be one of 'a', 'b'"),
        ("mode", ["a"], ("mode",), "is ['a']: must be one of 'a', 'b'"),
        ("mode", [True, None, {"a": 1}], ("mode",), "is [true, null, {'a': 1}]: must be one of 'a', 'b'"),
        ("mode", "c" * 61, ("mode",), "is a string of 61 characters: must be one of 'a', 'b'"),
        ("half", 3, ("half",), "is 3: must be even"),
        ("sizes", 3, ("sizes",), "is 3: must be a list"),
        ("sizes", [1, 2.0], ("sizes", 1), "is 2.0: must be a whole number from 1 to 9"),
        ("sizes", [0], ("sizes", 0), "is 0: must be a whole number from 1 to 9"),
        ("inner", None, ("inner",), "is null: must be a mapping (key: value lines)"),
        ("inner", {}, ("inner", "size"), "is missing; add it"),
        ("inner", {"size": 1, "sise": 1}, ("inner", "sise"), "unknown key; did you mean 'size'?"),
        ("inners", {"one": {"size": True}}, ("inners", "one", "size"), "is true: must be a whole number from 1 to 9"),
        ("inners", ["x" * 99], ("inners",), "is a list: must be a mapping (key: value lines)"),
    ],
)
def test_what_does_not(key: str, value: object, path: tuple[str | int, ...], message: str) -> None:
    with pytest.raises(Unfit) as caught:
        fit(Outer, {"name": "x", key: value})
    assert [(flaw.path, flaw.message) for flaw in caught.value.flaws] == [(path, message)]


def test_known_keys_are_listed_once() -> None:
    with pytest.raises(Unfit) as caught:
        fit(Outer, {"name": "x", "inners": {"one": {"size": 1, "zzz": 1, "sise": 2}, "two": {"size": 1, "yyy": 1}}})
    assert [flaw.message for flaw in caught.value.flaws] == [
        "unknown key; known are size",
        "unknown key; did you mean 'size'?",
        "unknown key; the known keys are listed at inners.one.zzz",
    ]


_KEYS = sorted({f.name for kind in (FileConfig, ModelConfig, SupervisorConfig) for f in fields(kind)})
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["1s", "cpu"])
_DATA = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*_KEYS, "x"]), inner, max_size=4),
)


@settings(max_examples=80, deadline=None)
@given(
    _DATA, st.dictionaries(st.sampled_from(_KEYS), _DATA, max_size=4), st.dictionaries(st.sampled_from(_KEYS), _DATA)
)
def test_whatever_a_file_holds_it_fits_or_is_told(
    anything: Any, model: dict[str, Any], section: dict[str, Any]
) -> None:
    for data in anything, {"models": {"a": {"model_dir": ".", **model}}, "supervisor": section}:
        try:
            made = fit(FileConfig, data)
        except Unfit as e:
            made, flaws = None, e.flaws
        if made is None:
            assert flaws
        else:
            assert all(isinstance(config, ModelConfig) for config in made.models.values())
            assert isinstance(made.supervisor, SupervisorConfig)
