"""Read arguments that stand as plain text between two tags, as in <arg_value>TEXT</arg_value>."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol.answer_formats.rules import (
    Rules,
    WantedTool,
    escaped,
    is_python,
    is_text,
    literal,
    open_in_string,
    text_piece,
    to_json,
    without,
)
from protocol.answer_formats.schemas import (
    FORMATS,
    Schema,
    branches,
    looks_around,
    of_length,
    of_pattern,
    types,
    types_of_value,
)
from protocol.answer_formats.source import BLANKS, ReadCalls, Source, Steps


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

    def __init__(self, calls: ReadCalls, root: Schema, schema: Schema, *, inline: bool) -> None:
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


def read_value(source: Source, calls: ReadCalls, tags: Tags, root: Schema, schema: Schema) -> Steps[bool]:
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


# Constrain arguments that stand as plain text between two tags, as in <arg_value>TEXT</arg_value>.


_LOOKS_LIKE: Final = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?[0-9][0-9.eE+\-]*",
    "number": r"-?[0-9][0-9.eE+\-]*",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""Texts that are read as a value of a type, if the schema allows that type beside strings."""
_WRITTEN: Final = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,29})",
    "number": r"-?(0|[1-9][0-9]{0,29})(\.[0-9]{1,30})?([eE][+\-]?[0-9]{1,2})?",
}
_BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_NOT_WRITTEN: Final = ("not", "if", "allOf", "anyOf", "oneOf")


def value_rule(rules: Rules, tool: WantedTool, key: str, schema: Schema, tags: Tags) -> str:
    """Add a rule for a value with the tag behind it, and return its name. Raises NotOffered."""
    end = tags.end_of_line
    if "string" in types(tool.schema, schema):
        made = " | ".join(_beside_strings(rules, tool, key, schema, tags))
    else:
        made = f"{tool.json(schema)} {literal(end)}"
    start = '"\\n" ' if tags.line else ""
    return rules.rule(f"{start}({made})")


def _beside_strings(rules: Rules, tool: WantedTool, key: str, schema: Schema, tags: Tags) -> Iterator[str]:
    """Return expressions for the values of a schema that allows strings.

    llguidance takes the longest lexeme at each place. A text goes on where a number has ended. So texts, numbers, words
    and the tag behind them have to be one lexeme. Only values that no text begins like are JSON of their own.
    """
    end = escaped(tags.end_of_line)
    looks = [_LOOKS_LIKE[name] for name in sorted(types(tool.schema, schema) - {"string"})]
    beside_tags = tags.nested and bool(types(tool.schema, schema) & {"array", "object"})
    texts: list[tuple[str, bool]] = []  # expression, and whether it is that of strings
    for branch in branches(tool.schema, schema):
        made: dict[str, Any] = {} if isinstance(branch, bool) else dict(branch)
        allowed = types(tool.schema, branch)
        values = made.get("enum", [made["const"]] if "const" in made else None)
        if isinstance(values, list):
            yield from _listed(tool, key, values, allowed, tags)
            continue
        by_json = allowed & {"array", "object"}
        if tags.nested:
            allowed, by_json = allowed - by_json, frozenset()
        if _BOUNDS.intersection(made) and (numbers := allowed & {"integer", "number"}):
            by_json |= numbers
            looks.append(r"-?[0-9](?s:.*)")
        if by_json:
            yield f"{tool.json({**made, 'type': sorted(by_json)})} {literal(tags.end_of_line)}"
        texts += [(f"/{_WRITTEN[name]}/", False) for name in sorted(allowed - by_json - {"string"})]
        if "string" in allowed:
            # A line that begins with the tag ends an empty value. A list or an object begins with it, too.
            not_empty = f" & ~/{escaped(tags.end)}(?s:.*)/" if tags.line or beside_tags else ""
            if beside_tags:
                not_empty += " & /(?s:.+)/"
                if not any(name in made for name in ("pattern", "format", "minLength")):
                    yield literal(tags.end)
            texts.append((string_expression(tool, key, made, end) + not_empty, True))
    # A text that looks like another value is none, also if it goes on behind the tag that would end it.
    not_other = f" & ~/[ \\t\\r\\n]*({'|'.join(looks)})[ \\t\\r\\n]*({end}(?s:.*))?/" if looks else ""
    terminals = [rules.terminal(text + not_other if is_string else text) for text, is_string in texts]
    if terminals:
        yield rules.before(" | ".join(terminals), tags.end_of_line)


def _listed(tool: WantedTool, key: str, values: Sequence[Any], allowed: frozenset[str], tags: Tags) -> Iterator[str]:
    """Return expressions for the values of an enum."""
    for value in values:
        if not types_of_value(value) & allowed:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if tags.end in text:
            tool.refuse(key, "has a value that cannot be written in the format in which this model writes calls")
        else:
            yield literal(text + tags.end_of_line)


def string_expression(tool: WantedTool, key: str, schema: Mapping[str, Any], end: str) -> str:
    """Return the expression of a terminal for the strings of a schema, as they are written without quotes.

    end  regular expression of what ends a string
    """
    for name in _NOT_WRITTEN:
        if name in schema:
            tool.refuse(key, f"has {name}, which is not offered in the format in which this model writes calls")
    wanted = []
    pattern, format = schema.get("pattern"), schema.get("format")
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if pattern is not None and not (tool.lenient and looks_around(pattern)):
        wanted.append(of_pattern(pattern))
    if format in FORMATS:
        wanted.append(FORMATS[format])
    elif format is not None:
        tool.refuse(key, f'has the format "{str(format)[:64]}", which is not offered in this model\'s format')
    if least or most is not None:
        wanted.append(of_length(least, most))
    # The first ``end`` ends a string of any form. Where a string may be too short for its schema, it must not go on
    # behind an ``end``.
    may_go_on = least or pattern is not None or format is not None
    return " & ".join(f"/{regex}/" for regex in wanted or ["(?s:.*)"]) + (without(end) if may_go_on else "")
