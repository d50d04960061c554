"""Say in words what does not fit in a section of models.yaml. ``protocol.values`` reads the section. Pure."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from protocol.values import Flaw, Unfit, Wanted, read
from supervisor.spelling import quotes_for, spelled

T = TypeVar("T")
_NAMES: Mapping[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list",
    dict: "a mapping (key: value lines)",
}  # fmt: skip


def fit(kind: type[T], value: object) -> T:
    """Return an instance of a dataclass made from a mapping. Raises Unfit with all flaws, in words."""
    try:
        return read(kind, value, every=True)
    except Unfit as e:
        flaws: list[Flaw] = []
        for flaw in e.flaws:
            flaws.append(replace(flaw, message=_message(flaw, flaws)))
        raise Unfit(flaws) from None


def _message(flaw: Flaw, others: list[Flaw]) -> str:
    problem = flaw.problem
    if problem is None:
        return "is missing; add it"
    if isinstance(problem, Wanted):
        quotes = quotes_for(flaw.value) if problem.kind is str or isinstance(problem.kind, tuple) else ""
        return f"is {spelled(flaw.value)}: must be {_wanted(problem)}{quotes}"
    if isinstance(problem, str):
        return f"is {spelled(flaw.value)}: {problem}"
    assert isinstance(problem, Collection)
    return f"unknown key; {_hint(str(flaw.path[-1]), problem, others)}"


def _wanted(wanted: Wanted) -> str:
    if isinstance(wanted.kind, tuple):
        return f"one of {', '.join(map(repr, wanted.kind))}"
    return f"{_NAMES[wanted.kind]}{'' if wanted.bounds is None else f' {wanted.bounds}'}"


def _hint(key: str, known: Collection[str], others: list[Flaw]) -> str:
    """Return the known key that was probably meant, else all known keys. Only one fault lists them."""
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]!r}?"
    listed = f"known are {', '.join(sorted(known))}"
    place = next((flaw.path for flaw in others if flaw.message.endswith(listed)), None)
    return listed if place is None else f"the known keys are listed at {'.'.join(map(str, place))}"
