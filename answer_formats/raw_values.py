"""Read arguments that stand as plain text between two tags, as in <arg_value>TEXT</arg_value>."""

from collections.abc import Sequence
from dataclasses import dataclass

from answer_formats.calls import Calls
from answer_formats.schemas import Schema, types
from answer_formats.source import BLANKS, Source, Steps
from answer_formats.values import is_python, is_text, open_in_string, text_piece, to_json


@dataclass(frozen=True, slots=True)
class Tags:
    """How a value stands in a call.

    end     the tag behind a value
    line    whether the value stands on lines of its own: the line breaks beside the tags are no part of it
    cut     two tags, one behind the other, that end the value, too, where they end the whole answer: the model has
            forgotten the tag behind the value
    nested  whether objects and lists stand in tags of their own, and not as JSON
    """

    end: str
    line: bool
    cut: tuple[str, str] | None = None
    nested: bool = False

    @property
    def end_of_line(self) -> str:
        """Return what ends a value that begins as the chat template writes it."""
        return f"\n{self.end}" if self.line else self.end


class _Value:
    """Collects the text of a value, and tells the JSON of a string while the string comes.

    inline  whether the value has no line of its own, although the format writes lines. A line break at its end is then
            no part of it
    """

    def __init__(self, calls: Calls, root: Schema, schema: Schema, *, inline: bool) -> None:
        self._calls, self._root, self._schema, self._inline = calls, root, schema, inline
        self._is_text = is_text(root, schema)
        self._may_hold_tags = bool(types(root, schema) & {"array", "object"})
        self._text = ""
        """What has not been told."""
        if self._is_text:
            calls.arguments('"')

    def tell(self, text: str) -> None:
        self._text += text
        if self._is_text:
            waits = self._inline and self._text.endswith("\n")
            self._calls.arguments(text_piece(self._text[: len(self._text) - waits]))
            self._text = "\n" if waits else ""

    @property
    def is_open(self) -> bool:
        """Return whether the text is the beginning of JSON, up to the inside of a string, which may hold tags."""
        text = self._text.lstrip(BLANKS)
        if not self._may_hold_tags or not text.startswith(("[", "{")) or not open_in_string(text):
            return False
        return not is_python(text)

    def cut(self) -> None:
        """Tell what there is of a value that the answer's end has cut off."""
        self._calls.arguments(text_piece(self._text) if self._is_text else self._text)

    def end(self) -> None:
        if self._is_text:
            self._calls.arguments('"')
        else:
            text = self._text.removesuffix("\n") if self._inline else self._text
            self._calls.arguments(to_json(text, self._root, self._schema))


def read_value(source: Source, calls: Calls, tags: Tags, root: Schema, schema: Schema) -> Steps[bool]:
    """Read a value with the tag behind it, and tell its JSON. Return False if the answer ends within the value."""
    has_line = tags.line and (yield from source.peek()) == "\n"
    end = tags.end_of_line if has_line else tags.end
    value = _Value(calls, root, schema, inline=tags.line and not has_line)
    if has_line and not (yield from source.literal(end)):
        source.at += 1
    elif has_line:
        value.end()
        return True
    cut = () if tags.cut is None else (("\n" if has_line else "") + tags.cut[0], tags.cut[1])
    markers = (end, *cut[:1])
    while True:
        marker = yield from source.until(markers, value.tell)
        if marker is None:
            value.cut()
            return False
        if value.is_open:
            pass
        elif marker == end:
            source.at += len(marker)
            break
        elif (yield from _is_cut(source, cut)):
            break
        source.at += 1
        value.tell(marker[0])
    value.end()
    return True


def _is_cut(source: Source, tags: Sequence[str]) -> Steps[bool]:
    """Return whether these tags end the answer. They are not read."""
    source.mark()
    found = True
    for tag in tags:
        found = found and (yield from source.literal(tag))
        yield from source.blanks()
    found = found and not (yield from source.peek())
    source.back()
    return found
