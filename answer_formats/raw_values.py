"""Read and constrain arguments that stand as plain text between two tags, as in <arg_value>TEXT</arg_value>."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from answer_formats.calls import Calls
from answer_formats.rules import Rules, Wanted, escaped, literal, without
from answer_formats.schemas import Schema, branches, types, types_of_value
from answer_formats.source import Source, Steps
from answer_formats.string_regexes import FORMATS, looks_around, of_length, of_pattern
from answer_formats.values import is_text, text_piece, to_json

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


@dataclass(frozen=True, slots=True)
class Tags:
    """How a value stands in a call.

    end    the tag behind a value
    line   whether the value stands on lines of its own: one line break on each side is no part of it
    cut    two tags, one behind the other, that end a value whose own tag the model has forgotten
    """

    end: str
    line: bool
    cut: tuple[str, str] | None = None


class _Value:
    """Collects the text of a value, and tells the JSON of a string while the string comes."""

    def __init__(self, calls: Calls, tags: Tags, root: Schema, schema: Schema) -> None:
        self._calls, self._tags, self._root, self._schema = calls, tags, root, schema
        self._is_text = is_text(root, schema)
        self._text = ""
        """What has not been told. The last line break of a string waits."""
        if self._is_text:
            calls.arguments('"')

    def tell(self, text: str) -> None:
        self._text += text
        if self._is_text:
            waits = self._tags.line and self._text.endswith("\n")
            self._calls.arguments(text_piece(self._text[: len(self._text) - waits]))
            self._text = "\n" if waits else ""

    def cut(self) -> None:
        """Tell what there is of a value that the answer's end has cut off."""
        self._calls.arguments(text_piece(self._text) if self._is_text else self._text)

    def end(self) -> None:
        if self._is_text:
            self._calls.arguments('"')
        else:
            text = self._text.removesuffix("\n") if self._tags.line else self._text
            self._calls.arguments(to_json(text, self._root, self._schema))


def read_value(source: Source, calls: Calls, tags: Tags, root: Schema, schema: Schema) -> Steps[bool]:
    """Read a value with the tag behind it, and tell its JSON. Return False if the answer ends within the value."""
    if tags.line:
        yield from source.literal("\n")
    value = _Value(calls, tags, root, schema)
    markers = (tags.end,) if tags.cut is None else (tags.end, tags.cut[0])
    while True:
        marker = yield from source.until(markers, value.tell)
        if marker is None:
            value.cut()
            return False
        if marker == tags.end:
            source.at += len(marker)
            break
        if tags.cut is not None and (yield from _is_cut(source, tags.cut)):
            break
        source.at += 1
        value.tell(marker[0])
    value.end()
    return True


def _is_cut(source: Source, tags: tuple[str, str]) -> Steps[bool]:
    """Return whether these two tags stand here, with blanks between them. They are not read."""
    source.mark()
    yield from source.literal(tags[0])
    yield from source.blanks()
    found = yield from source.literal(tags[1])
    source.back()
    return found


# --- grammar


def _end(tags: Tags) -> str:
    return f"\n{tags.end}" if tags.line else tags.end


def value_rule(rules: Rules, tool: Wanted, key: str, schema: Schema, tags: Tags) -> str:
    """Add a rule for a value with the tag behind it, and return its name. Raises NotOffered."""
    end = _end(tags)
    if "string" in types(tool.schema, schema):
        made = " | ".join(_beside_strings(rules, tool, key, schema, tags))
    else:
        made = f"{tool.json(schema)} {literal(end)}"
    start = '"\\n" ' if tags.line else ""
    return rules.rule(f"{start}({made})")


def _beside_strings(rules: Rules, tool: Wanted, key: str, schema: Schema, tags: Tags) -> Iterator[str]:
    """Return expressions for the values of a schema that allows strings.

    llguidance takes the longest lexeme at each place. A text goes on where a number has ended. So texts, numbers, words
    and the tag behind them have to be one lexeme. Only values that no text begins like are JSON of their own.
    """
    looks = [_LOOKS_LIKE[name] for name in sorted(types(tool.schema, schema) - {"string"})]
    texts: list[tuple[str, bool]] = []  # expression, and whether it is that of strings
    for branch in branches(tool.schema, schema):
        made: dict[str, Any] = {} if isinstance(branch, bool) else dict(branch)
        allowed = types(tool.schema, branch)
        values = made.get("enum", [made["const"]] if "const" in made else None)
        if isinstance(values, list):
            yield from _listed(tool, key, values, allowed, tags)
            continue
        by_json = allowed & {"array", "object"}
        if _BOUNDS.intersection(made) and (numbers := allowed & {"integer", "number"}):
            by_json |= numbers
            looks.append(r"-?[0-9](?s:.*)")
        if by_json:
            yield f"{tool.json({**made, 'type': sorted(by_json)})} {literal(_end(tags))}"
        texts += [(f"/{_WRITTEN[name]}/", False) for name in sorted(allowed - by_json - {"string"})]
        if "string" in allowed:
            texts.append((string_expression(tool, key, made, _forbidden(tags)), True))
    not_other = f" & ~/[ \\t\\r\\n]*({'|'.join(looks)})[ \\t\\r\\n]*/" if looks else ""
    terminals = [rules.terminal(text + not_other if is_string else text) for text, is_string in texts]
    if terminals:
        yield rules.before(" | ".join(terminals), _end(tags))


def _forbidden(tags: Tags) -> tuple[str, ...]:
    """Return regular expressions of what would end a text."""
    if tags.cut is None:
        return (escaped(tags.end),)
    return escaped(tags.end), rf"{escaped(tags.cut[0])}[ \t\r\n]*{escaped(tags.cut[1])}"


def _listed(tool: Wanted, key: str, values: Sequence[Any], allowed: frozenset[str], tags: Tags) -> Iterator[str]:
    """Return expressions for the values of an enum."""
    for value in values:
        if not types_of_value(value) & allowed:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if any(tag in text for tag in (tags.end, *(tags.cut or ()))):
            tool.refuse(key, "has a value that cannot be written in the format in which this model writes calls")
        else:
            yield literal(text + _end(tags))


def string_expression(tool: Wanted, key: str, schema: Mapping[str, Any], forbidden: Sequence[str]) -> str:
    """Return the expression of a terminal for the strings of a schema, as they are written without quotes.

    forbidden  regular expressions of what would end the string
    """
    for name in _NOT_WRITTEN:
        if name in schema:
            tool.refuse(key, f"has {name}, which is not offered in the format in which this model writes calls")
    wanted = []
    pattern, format = schema.get("pattern"), schema.get("format")
    if pattern is not None and not (tool.lenient and looks_around(pattern)):
        wanted.append(of_pattern(pattern))
    if format in FORMATS:
        wanted.append(FORMATS[format])
    elif format is not None:
        tool.refuse(key, f'has the format "{str(format)[:64]}", which is not offered in this model\'s format')
    if "minLength" in schema or "maxLength" in schema:
        wanted.append(of_length(int(schema.get("minLength", 0)), schema.get("maxLength")))
    return " & ".join(f"/{regex}/" for regex in wanted or ["(?s:.*)"]) + without(*forbidden)
