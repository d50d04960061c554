"""Turn the text of an answer into parts, while it is generated."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from protocol.answer_formats.families import FAMILIES
from protocol.answer_formats.source import (
    BLANKS,
    CallArguments,
    Found,
    Part,
    ReadCalls,
    Reasoning,
    Source,
    Steps,
    Text,
    Tool,
)

__all__ = ["AnswerParser", "MarkerPair", "Tool"]


@dataclass(frozen=True, slots=True)
class MarkerPair:
    """The markers before and behind the reasoning."""

    start: str
    end: str


class AnswerParser:
    """Parses one answer. The parts, put together, do not depend on how the text was divided.

    tool_format       name of the format of calls; None if it is not known
    tools             the tools that may be called. A call of another tool is text
    reasoning         the markers of the reasoning; None if there is none
    inside_reasoning  whether the answer begins within the reasoning

    Blanks beside the reasoning, and beside calls, are no part of the text. Calls within the reasoning are drafts: they
    are reasoning, too. But complete calls at the end of an answer end a reasoning that has not ended: some models
    forget its marker.
    """

    def __init__(
        self,
        *,
        tool_format: str | None,
        tools: Sequence[Tool] = (),
        reasoning: MarkerPair | None = None,
        inside_reasoning: bool = False,
    ) -> None:
        family = FAMILIES[tool_format] if tool_format is not None else None
        self._headers = () if family is None else family.headers
        self._family = family if tools else None
        begins = self._family.begins if self._family is not None else ()
        self._start, self._end = (reasoning.start, reasoning.end) if reasoning is not None else ("", "")
        self._markers_outside = tuple(marker for marker in (self._start, *begins, *self._headers) if marker)
        self._markers_inside = (self._end, *begins)
        self._inside = inside_reasoning and reasoning is not None
        self._parts: list[Part] = []
        self._blanks = ""
        """Blanks that are left out if a marker follows."""
        self._has_text = False  # since the last reasoning or call
        self._is_apart = False  # behind a header: the texts of two messages are two paragraphs
        self._is_start = True  # of a text or of the reasoning, whose blanks are left out
        self._source = Source()
        self._calls = ReadCalls(self._source, tools)
        self._calls.parts = self._parts
        starts = {marker[0] for marker in (*self._markers_outside, *self._markers_inside) if marker}
        self._may_begin = re.compile("[" + re.escape("".join(sorted(starts))) + "]").search if starts else None
        """Finds the first character of a marker."""
        self._in_calls = False
        self._steps = self._read()
        next(self._steps)

    def continues(self, text: str) -> type[Reasoning] | type[Text] | None:
        """Return what the next piece just continues: then the piece is a part as it is, and need not be fed. None if it
        has to be.

        This runs for each token, and nearly every token takes this road.
        """
        if (
            self._in_calls
            or self._is_start
            or self._blanks
            or self._source.at < len(self._source.text)
            or text[-1:] in BLANKS
            or (self._may_begin is not None and self._may_begin(text))
        ):
            return None
        return Reasoning if self._inside else Text

    def feed(self, text: str) -> list[Part]:
        """Return the parts that the next piece of the text completes."""
        if (kind := self.continues(text)) is not None:
            return [kind(text)]
        if self._in_calls and text and self._calls.is_within_string(text):  # the next most frequent road
            return [CallArguments(self._calls.count - 1, text)]
        self._source.feed(text)
        next(self._steps)
        parts = self._parts.copy()
        self._parts.clear()
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back. A call that has not ended is ended as it is."""
        self._source.ended = True
        with suppress(StopIteration):
            next(self._steps)
        return self._parts

    def _read(self) -> Steps[None]:
        """Read the answer."""
        yield
        source = self._source
        if not self._inside:
            if self._end:
                yield from source.blanks()
                yield from source.literal(self._end)  # MiniMax M3 begins so if it does not reason
            yield from self._open()
        while True:
            markers = self._markers_inside if self._inside else self._markers_outside
            marker = yield from source.until(markers, self._tell)
            if marker is None:
                break
            if self._inside and marker == self._end:
                self._turn(marker, inside=False)
                yield from self._open()
            elif not self._inside and marker == self._start:
                self._turn(marker, inside=True)
            elif marker in self._headers:
                source.at += len(marker)
                self._blanks, self._is_start, self._is_apart = "", True, self._has_text
            else:
                self._in_calls = True
                yield from self._draft(marker) if self._inside else self._call(marker)
                self._in_calls = False
        self._tell_raw("")

    def _turn(self, marker: str, *, inside: bool) -> None:
        """Go over to the reasoning, or leave it."""
        self._source.at += len(marker)
        self._inside, self._blanks, self._is_start, self._has_text, self._is_apart = inside, "", True, False, False

    def _open(self) -> Steps[None]:
        """Read a call that begins the text without a marker."""
        if self._family is not None and self._family.opening:
            yield from self._source.blanks()
            if (yield from self._source.peek()) == self._family.opening:
                self._in_calls = True
                yield from self._call("")
                self._in_calls = False

    def _call(self, marker: str) -> Steps[None]:
        """Read calls that may begin here."""
        source, calls = self._source, self._calls
        assert self._family is not None
        source.mark()
        source.at += len(marker)
        found = yield from self._family.read(source, calls, marker)
        if found is Found.CALL:
            if calls.close() and source.ended:
                source.at = len(source.text)  # the beginning of a tag or of a value that the answer's end has cut off
            self._blanks, self._is_start, self._has_text, self._is_apart = "", True, False, False
        elif found is Found.TEXT:
            self._tell_raw(source.marked())
        else:
            source.back()
            source.at += len(marker)
            self._tell_raw(marker)

    def _draft(self, marker: str) -> Steps[None]:
        """Read calls within the reasoning."""
        source, calls = self._source, self._calls
        held: list[Part] = []
        calls.parts = held
        place = calls.draft()
        source.mark()
        next_marker: str | None = marker
        while next_marker is not None and (yield from self._draft_one(next_marker, held)):
            next_marker = yield from self._begin_of_next()
        calls.parts = self._parts
        if held and next_marker is None and not (yield from source.peek()):
            source.forget_marks()
            calls.commit()
            self._inside, self._blanks, self._is_start = False, "", True
            self._parts += held
        else:
            calls.undo(place)
            self._tell(source.marked())

    def _draft_one(self, marker: str, held: list[Part]) -> Steps[bool]:
        """Read one call within the reasoning, or one section of calls. Return False, and read only the marker, if it is
        not complete: the end of the reasoning may stand in it."""
        source = self._source
        assert self._family is not None
        source.mark()
        source.at += len(marker)
        found = yield from self._family.read(source, self._calls, marker)
        is_cut = self._calls.close()
        if found is Found.CALL and not is_cut and not any(isinstance(part, Text) for part in held):
            source.marked()
            return True
        held.clear()
        source.back()
        source.at += len(marker)
        return False

    def _begin_of_next(self) -> Steps[str | None]:
        """Read blanks and headers. Return the marker of a further call, which is not read; None if there is none."""
        assert self._family is not None
        while True:
            yield from self._source.blanks()
            for marker in self._family.begins:
                if (yield from self._source.literal(marker)):
                    self._source.at -= len(marker)
                    return marker
            for header in self._headers:
                if (yield from self._source.literal(header)):
                    break
            else:
                return None

    def _tell(self, text: str) -> None:
        """Add a piece of the text or of the reasoning. Blanks at its end wait."""
        if self._is_start:
            text = text.lstrip(BLANKS)
        told = text.rstrip(BLANKS)
        if told:
            self._tell_raw(f"\n\n{told}" if self._is_apart else told)
        self._blanks += text[len(told) :]

    def _tell_raw(self, text: str) -> None:
        """Add a piece of the text or of the reasoning as it is, behind the blanks that have waited."""
        text, self._blanks = self._blanks + text, ""
        if text:
            self._is_start, self._has_text, self._is_apart = False, True, False
            self._parts.append(Reasoning(text) if self._inside else Text(text))
