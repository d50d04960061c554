"""The calls of tools that a parser has found, and what the readers of formats say about the text that they read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from answer_formats.parts import CallArguments, CallEnd, CallStart, Part, Text
from answer_formats.schemas import readable
from answer_formats.source import Source, Steps


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. ``parameters`` is a JSON schema."""

    name: str
    parameters: dict[str, Any]


class Found(Enum):
    """What stands where a call may begin."""

    CALL = "a call"
    TEXT = "a call of an unknown tool. All that was read is text"
    NOTHING = "no call. Only the marker in front of it is known to be text"


class Calls:
    """Collects the parts of calls. ``parts`` is where they go."""

    def __init__(self, source: Source, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.parts: list[Part] = []
        self.count = 0
        self._schemas: dict[str, dict[str, Any]] = {}
        self._source = source
        self._is_open = self._may_go_back = False

    def schema(self, name: str) -> dict[str, Any]:
        """Return the schema of a tool's arguments; one that says nothing if the tool's schema cannot be read."""
        if name not in self._schemas:
            self._schemas[name] = readable(self.tools[name].parameters)
        return self._schemas[name]

    def start(self, name: str, id: str | None = None) -> None:
        """Begin a call. The text before it is not needed any more."""
        self.parts.append(CallStart(self.count, name, None if id is None else _escaped(id)))
        self.count += 1
        self._is_open = True
        if not self._may_go_back:
            self._source.forget_marks()

    def is_within_string(self, piece: str) -> bool:
        """Return whether the next piece of the text just continues a string in the arguments of a call."""
        return (
            self._source.in_string_for == self.arguments
            and not self._may_go_back
            and '"' not in piece
            and "\\" not in piece
        )

    def arguments(self, json: str) -> None:
        """Add a piece of the arguments of the call that has begun."""
        if json:
            self.parts.append(CallArguments(self.count - 1, _escaped(json)))

    def end(self) -> None:
        """End the call that has begun."""
        self.parts.append(CallEnd(self.count - 1))
        self._is_open = False

    def whole(self, name: str, arguments: str, id: str | None = None) -> None:
        """Add a complete call."""
        self.start(name, id)
        self.arguments(arguments)
        self.end()

    def close(self) -> bool:
        """End a call whose text has ended before the call. Return whether there is one."""
        if was_open := self._is_open:
            self.end()
        return was_open

    def draft(self) -> int:
        """Collect parts that may turn out to be no calls. The text that was read is kept. Return the place to which
        ``undo`` goes back."""
        self._may_go_back = True
        return self.count

    def commit(self) -> None:
        """End a draft: its parts are calls."""
        self._may_go_back = False

    def undo(self, place: int) -> None:
        """End a draft: its parts are no calls."""
        self._is_open = self._may_go_back = False
        self.count = place

    def further(self, read: Callable[[Source, "Calls"], Steps[Found]]) -> Steps[bool]:
        """Read a further call of a section, with what stands in front of it. Return False, and read nothing, if there
        is none. A call of an unknown tool is text."""
        source = self._source
        source.mark()
        found = yield from read(source, self)
        if found is Found.NOTHING:
            source.back()
        elif found is Found.TEXT:
            self.parts.append(Text(source.marked()))
        return found is not Found.NOTHING


def _escaped(text: str) -> str:
    """Return a text with its lone surrogates as JSON escapes them. A model may write the escape of half a character,
    within a string that has to be decoded. The half can be in a str, but not in a message."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


Reader = Callable[[Source, Calls, str], Steps[Found]]
"""Reads what follows a marker (the third argument; "" at the beginning of an answer) with which calls may begin."""
