"""The parts of an answer, in the order in which the model writes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins.

    index  counts the calls of an answer from 0
    id     None if the model gave none
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call ``index``. All pieces of a call together are one JSON object."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the call ``index`` are complete."""

    index: int


Part = Reasoning | Text | CallStart | CallArguments | CallEnd
