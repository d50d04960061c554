"""Read the text of an answer that comes in pieces: steps that wait for more text where they need more.

A step is a generator. It yields where it needs the next piece, and it looks at characters only. So what it reads does
not depend on how the text was divided.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from protocol.answer_formats.schemas import readable

T = TypeVar("T")
Steps = Generator[None, None, T]
Tell = Callable[[str], None]

BLANKS: Final = " \t\r\n"
DEEPEST: Final = 50
"""Values within one another that readers follow. Each takes levels of Python's stack, and models write thousands."""
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OUTSIDE: Final = re.compile(r'[{}\[\]"]')
_INSIDE: Final = re.compile(r'\\.|"', re.DOTALL)
_SCALAR: Final = re.compile(r"[-+.\w]*")


def ignore(_: str) -> None:
    """Drop a piece of text."""


class Source:
    """The text of one answer that has come and has not been read.

    text   what has come. ``at`` is the position of the next character
    ended  whether no more will come

    in_string_for  who is told the JSON string that goes on where the text ends; None if it does not end in a string
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.in_string_for: Tell | None = None
        self._marks: list[int] = []

    def feed(self, piece: str) -> None:
        """Add the next piece."""
        read = self._marks[0] if self._marks else self.at
        self.text = self.text[read:] + piece
        self.at -= read
        self._marks = [mark - read for mark in self._marks]

    # --- going back

    def mark(self) -> None:
        """Remember this position. Marks form a stack."""
        self._marks.append(self.at)

    def marked(self) -> str:
        """Forget the last mark, and return the text that was read since."""
        return self.text[self._marks.pop() : self.at]

    def back(self) -> None:
        """Go back to the last mark, and forget it."""
        self.at = self._marks.pop()

    def forget_marks(self) -> None:
        self._marks.clear()

    # --- steps

    def more(self) -> Steps[bool]:
        """Wait for more text. Return False if the answer has ended before."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the answer."""
        while self.at == len(self.text) and (yield from self.more()):
            pass
        return self.text[self.at : self.at + 1]

    def blanks(self) -> Steps[None]:
        """Read white space."""
        while (yield from self.peek()) and self.text[self.at] in BLANKS:
            self.at += 1

    def literal(self, expected: str) -> Steps[bool]:
        """Read a text. Return False, and read nothing, if another one stands here."""
        while not self.text.startswith(expected, self.at):
            if not expected.startswith(self.text[self.at :]) or not (yield from self.more()):
                return False
        self.at += len(expected)
        return True

    def closing(self, expected: str) -> Steps[bool]:
        """Read a text that ends something. Return False if another one stands here, or only its beginning at the end of
        the answer, which is read then."""
        found = yield from self.literal(expected)
        if not found and self.ended and expected.startswith(self.text[self.at :]):
            self.at = len(self.text)
        return found

    def word(self, ends: Collection[str], limit: int = 200) -> Steps[str | None]:
        """Read the characters before one of ``ends``. Return None if there are more than ``limit``, or if the answer
        ends before."""
        size = 0
        while True:
            while self.at + size < len(self.text):
                if self.text[self.at + size] in ends:
                    self.at += size
                    return self.text[self.at - size : self.at]
                size += 1
                if size > limit:
                    return None
            if not (yield from self.more()):
                return None

    def until(self, markers: tuple[str, ...], tell: Tell) -> Steps[str | None]:
        """Read the text before the first marker, and tell it as it comes. Return the marker, which is not read; None if
        the answer ends without one. Of two markers at one place, the longer one counts."""
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self.text.find(marker, self.at)) >= 0]
            at, _, marker = min(found, default=(len(self.text) - self._held(markers), 0, None))
            if at > self.at:
                tell(self.text[self.at : at])
                self.at = at
            if marker is not None and (self.ended or not self._may_become_longer(marker, markers)):
                return marker
            if not (yield from self.more()):
                if self.at < len(self.text):
                    tell(self.text[self.at :])
                    self.at = len(self.text)
                return None

    def _may_become_longer(self, marker: str, markers: tuple[str, ...]) -> bool:
        """Return whether the marker that stands here, with all text behind it, begins a longer marker."""
        rest = self.text[self.at :]
        return any(len(other) > len(rest) and other.startswith(rest) for other in markers if len(other) > len(marker))

    def _held(self, markers: tuple[str, ...]) -> int:
        """Return how many characters at the end may begin a marker."""
        text = self.text
        for size in range(min(max(map(len, markers), default=1) - 1, len(text) - self.at), 0, -1):
            end = text[-size:]
            if any(marker.startswith(end) for marker in markers):
                return size
        return 0

    def string(self, *, plain: bool = False) -> Steps[str | None]:
        """Read a JSON string, and return its value. Return None if there is none, or one with escapes if it has to be
        plain."""
        if (yield from self.peek()) != '"':
            return None
        while (found := _STRING.match(self.text, self.at)) is None:
            if not (yield from self.more()):
                return None
        if plain and "\\" in found[0]:
            return None
        try:
            value = json.loads(found[0], strict=False)
        except ValueError:
            return None
        self.at = found.end()
        return str(value)

    def json(self, tell: Tell, depth: int = 0) -> Steps[bool]:
        """Read a JSON value, and tell it as it comes. Return whether it is complete.

        depth  number of brackets that are open already. The value ends with the last one
        """
        first = yield from self.peek()
        if not depth and first not in '{["':
            return (yield from self._scalar(tell))
        in_string = False
        while True:
            begin = at = self.at
            complete = False
            while found := (_INSIDE if in_string else _OUTSIDE).search(self.text, at):
                at = found.end()
                if found[0] == '"':
                    in_string = not in_string
                elif not in_string:
                    depth += 1 if found[0] in "{[" else -1
                complete = depth <= 0 and not in_string
                if complete:
                    break
            # A backslash at the end waits for the character that it escapes.
            open_escape = in_string and not complete and _ends_with_escape(self.text, at)
            self.at = at if complete else len(self.text) - open_escape
            if self.at > begin:
                tell(self.text[begin : self.at])
            if complete:
                return True
            self.in_string_for = tell if in_string and not open_escape else None
            more = yield from self.more()
            self.in_string_for = None
            if not more:
                if open_escape:
                    tell(self.text[self.at :])
                    self.at = len(self.text)
                return False

    def _scalar(self, tell: Tell) -> Steps[bool]:
        while (found := _SCALAR.match(self.text, self.at)) and found.end() == len(self.text):
            if not (yield from self.more()):
                break
        assert found is not None
        if found[0]:
            tell(found[0])
        self.at = found.end()
        return bool(found[0])


def _ends_with_escape(text: str, at: int) -> bool:
    """Return whether a text ends with a backslash that escapes what follows. No escape stands between ``at`` and it."""
    return len(text) > at and text[-1] == "\\"


# The parts of an answer, in the order in which the model writes them.


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


# The calls of tools that a parser has found, and what the readers of formats say about the text that they read.


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


class ReadCalls:
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

    def further(self, first: Found, read: Callable[[Source, "ReadCalls"], Steps[Found]]) -> Steps[None]:
        """Read the further calls of a section, each with what stands in front of it. A call of an unknown tool is text.

        first  what stands at the beginning of the section. Only a call has further ones
        """
        source, found = self._source, first
        while first is Found.CALL and found is not Found.NOTHING:
            source.mark()
            found = yield from read(source, self)
            if found is Found.NOTHING:
                source.back()
            elif found is Found.TEXT:
                self.parts.append(Text(source.marked()))

    def close_section(self, found: Found, end: str) -> Steps[None]:
        """Read white space and the text that ends a section of calls.

        found  what stands in the section. If it is no call, nothing is read
        end    the text; "" for none
        """
        if end and found is not Found.NOTHING:
            yield from self._source.blanks()
            yield from self._source.closing(end)


def _escaped(text: str) -> str:
    """Return a text with its lone surrogates as JSON escapes them. A model may write the escape of half a character,
    within a string that has to be decoded. The half can be in a str, but not in a message."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


Reader = Callable[[Source, ReadCalls, str], Steps[Found]]


def read_behind(
    source: Source, calls: ReadCalls, *, opening: str, read: Callable[[Source, ReadCalls], Steps[Found]]
) -> Steps[Found]:
    """Read white space, the text that opens a call, and the call. Return NOTHING if another text stands there."""
    yield from source.blanks()
    if not (yield from source.literal(opening)):
        return Found.NOTHING
    return (yield from read(source, calls))


"""Reads what follows a marker (the third argument; "" at the beginning of an answer) with which calls may begin."""
