"""Turn the text of an answer into parts, while it is generated."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from answer_formats.families import markers_of
from answer_formats.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text

_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_BLANKS: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. ``parameters`` is a JSON schema."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and behind the reasoning."""

    start: str
    end: str


class AnswerParser:
    """Parses one answer. The parts do not depend on how the text was divided.

    tool_format       name of the format of calls; None if it is not known
    tools             the tools that may be called. A call of another tool is text
    reasoning         the markers of the reasoning; None if there is none
    inside_reasoning  whether the answer begins within the reasoning

    Blanks beside the reasoning, and beside calls, are no part of the text.
    """

    def __init__(
        self,
        *,
        tool_format: str | None,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningMarkers | None = None,
        inside_reasoning: bool = False,
    ) -> None:
        self._names = {tool.name for tool in tools} if tool_format is not None else set()
        self._begin, self._end = markers_of(tool_format)[:2] if tool_format is not None and self._names else ("", "")
        self._reasoning = reasoning
        self._inside = inside_reasoning and reasoning is not None
        self._text = ""
        """What has not become parts."""
        self._is_start = True  # of a text or of the reasoning, whose blanks are left out
        starts = {
            marker[0] for marker in (self._begin, *((reasoning.start, reasoning.end) if reasoning else ())) if marker
        }
        self._may_begin = re.compile("[" + re.escape("".join(sorted(starts))) + "]").search if starts else None
        """Finds the first character of a marker."""
        self._call: _Arguments | None = None
        self._in_call = False
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        """Return the parts that the next piece of the text completes."""
        if self._goes_on(text):  # this runs for each token, and nearly every token takes this road
            return [Reasoning(text) if self._inside else Text(text)]
        self._text += text
        return self._parse(last=False)

    def finish(self) -> list[Part]:
        """Return what was held back. A call that has not ended is ended as it is."""
        parts = self._parse(last=True)
        if self._call is not None:
            parts.append(CallEnd(self._calls - 1))
            self._call = None
        return parts

    def _goes_on(self, text: str) -> bool:
        """Return whether a piece just continues the text or the reasoning, and nothing of it has to be held back."""
        return not (
            self._text
            or self._is_start
            or self._in_call
            or text[-1:] in _BLANKS
            or (self._may_begin is not None and self._may_begin(text))
        )

    def _parse(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._step(parts, last):
            pass
        return parts

    def _step(self, parts: list[Part], last: bool) -> bool:
        """Parse up to the next marker. Return whether there may be more."""
        if self._call is not None:
            return self._go_on(self._call, parts)
        if self._in_call:
            return self._open(parts, last)
        markers = self._markers()
        found = min(((at, marker) for marker in markers if (at := self._text.find(marker)) >= 0), default=None)
        if found is None:
            size = len(self._text) if last else len(self._text) - _held(self._text, markers)
            self._text = self._emit(parts, self._text[:size], keep_blanks=last) + self._text[size:]
            return False
        at, marker = found
        self._emit(parts, self._text[:at], keep_blanks=False)
        self._text = self._text[at + len(marker) :]
        self._in_call = marker == self._begin
        if not self._in_call:
            self._inside = not self._inside
        self._is_start = True
        return True

    def _markers(self) -> list[str]:
        reasoning = self._reasoning
        if self._inside and reasoning is not None:
            return [reasoning.end]
        return [marker for marker in (reasoning.start if reasoning else "", self._begin) if marker]

    def _emit(self, parts: list[Part], text: str, *, keep_blanks: bool) -> str:
        """Add a piece of the text or of the reasoning. Return the blanks at its end, if they are not to be kept."""
        if self._is_start:
            text = text.lstrip(_BLANKS)
        told = text if keep_blanks else text.rstrip(_BLANKS)
        if told:
            self._is_start = False
            parts.append(Reasoning(told) if self._inside else Text(told))
        return text[len(told) :]

    def _open(self, parts: list[Part], last: bool) -> bool:
        """Parse the beginning of a call, up to its arguments."""
        head = _HEAD.match(self._text)
        if head is not None and (name := _string(head[1])) in self._names:
            parts.append(CallStart(self._calls, name))
            self._calls += 1
            self._call = _Arguments()
            self._text = self._text[head.end() :]
            return True
        at = self._text.find(self._end)
        if at < 0 and not last:
            return False
        body = self._text if at < 0 else self._text[:at]
        size = len(body) if at < 0 else at + len(self._end)
        raw, self._text, self._in_call = self._begin + self._text[:size], self._text[size:], False
        call = _whole(body) if at >= 0 else None
        if call is None or call[0] not in self._names:
            parts.append(Text(raw))
            self._is_start = False
        else:
            parts += [CallStart(self._calls, call[0]), CallArguments(self._calls, call[1]), CallEnd(self._calls)]
            self._calls += 1
            self._is_start = True
        return bool(self._text)

    def _go_on(self, call: "_Arguments", parts: list[Part]) -> bool:
        """Parse the arguments of a call, and what stands behind them."""
        if not call.complete:
            size = call.scan(self._text)
            if size:
                parts.append(CallArguments(self._calls - 1, self._text[:size]))
                self._text = self._text[size:]
            if not call.complete:
                return False
        at = self._text.find(self._end)
        if at < 0:
            return False
        parts.append(CallEnd(self._calls - 1))
        self._text = self._text[at + len(self._end) :]
        self._call, self._in_call, self._is_start = None, False, True
        return True


class _Arguments:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """Return how many characters of a piece belong to the object."""
        if self._in_string and not self._escaped and '"' not in text and "\\" not in text:
            return len(text)
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return at + 1
        return len(text)


def _whole(body: str) -> tuple[str, str] | None:
    """Return (name, arguments as JSON) of a call whose keys stand in an unusual order; None if it is no call."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a marker."""
    return max(
        (
            size
            for marker in markers
            for size in range(1, min(len(marker), len(text) + 1))
            if text.endswith(marker[:size])
        ),
        default=0,
    )
