"""Gemma: calls as Python or JSON in Markdown fences (Gemma 3), or in a syntax of their own between tokens.

Gemma 3        a fence tool_code with NAME(key=value); or {"name": NAME, "parameters": {...}}, bare or in a fence
FunctionGemma  <start_function_call>call:NAME{key:<escape>text<escape>,n:1}<end_function_call>
Gemma 4        <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from protocol.answer_formats.json_formats import (
    call_rules,
    looks_opened,
    objects,
    opened,
    opened_json,
    read_call,
    read_list,
)
from protocol.answer_formats.json_formats import read_object as read_json
from protocol.answer_formats.rules import (
    CallGrammar,
    NotOffered,
    Rules,
    Section,
    WantedTool,
    escaped,
    in_order,
    items_of,
    literal,
    members_of,
    text_piece,
    to_json,
)
from protocol.answer_formats.schemas import Members, Schema, branches, resolved, types, types_of_value
from protocol.answer_formats.source import DEEPEST, Found, ReadCalls, Source, Steps, Tell, ignore
from protocol.answer_formats.tag_values import string_expression

# Read and constrain values as Gemma 4 and FunctionGemma write them: bare keys, and strings between two quote tokens.
#
# {city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],at:{zip:75001}}


_ENDS: Final = ",}]"
_LONGEST_SCALAR: Final = 1000
_NO_KEY: Final = '<>{}[]:,"\n'


def read_value(source: Source, tell: Tell, quote: str, root: Schema, schema: Schema, depth: int) -> Steps[bool]:
    """Read a value, and tell its JSON as it comes. Return whether it is complete.

    depth  objects and lists around the value. A value with DEEPEST of them around it is not read, as if it were cut
    """
    yield from source.blanks()
    if (yield from source.literal(quote)):
        tell('"')
        if (yield from source.until((quote,), lambda text: tell(text_piece(text)))) is None:
            return False
        source.at += len(quote)
        tell('"')
        return True
    first = yield from source.peek()
    if first in ("{", "["):
        if depth >= DEEPEST:
            return False
        read = read_object if first == "{" else _read_array
        return (yield from read(source, tell, quote, root, schema, depth + 1))
    if first == '"' and (text := (yield from source.string())) is not None:
        tell(json.dumps(text, ensure_ascii=False))
        return True
    bare = yield from source.word(_ENDS, _LONGEST_SCALAR)
    if bare is None:
        return False
    tell(to_json(bare.strip(), root, schema))
    return True


def read_object(source: Source, tell: Tell, quote: str, root: Schema, schema: Schema, depth: int = 1) -> Steps[bool]:
    """Read an object."""
    source.at += 1
    members = Members.of(root, schema)
    tell("{")
    separator = ""
    while True:
        yield from source.blanks()
        if (yield from source.literal("}")):
            tell("}")
            return True
        key = yield from _read_key(source, quote)
        if key is None or not (yield from source.literal(":")):
            return False
        tell(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from read_value(source, tell, quote, root, members.schema_of(key), depth)):
            return False
        yield from source.blanks()
        yield from source.literal(",")


def _read_key(source: Source, quote: str) -> Steps[str | None]:
    pieces: list[str] = []
    if (yield from source.literal(quote)):
        if (yield from source.until((quote,), pieces.append)) is None:
            return None
        source.at += len(quote)
        return "".join(pieces)
    if (yield from source.peek()) == '"':
        return (yield from source.string())
    key = yield from source.word(_NO_KEY)
    return None if key is None else key.strip()


def _read_array(source: Source, tell: Tell, quote: str, root: Schema, schema: Schema, depth: int) -> Steps[bool]:
    source.at += 1
    whole = resolved(root, schema)
    items = whole.get("items", True) if isinstance(whole, Mapping) else True
    if not isinstance(items, Mapping | bool):
        items = True
    tell("[")
    separator = ""
    while True:
        yield from source.blanks()
        if (yield from source.literal("]")):
            tell("]")
            return True
        tell(separator)
        separator = ", "
        if not (yield from read_value(source, tell, quote, root, items, depth)):
            return False
        yield from source.blanks()
        if not (yield from source.literal(",")) and (yield from source.peek()) != "]":
            return False


class ValueRules:
    """Writes the rules of one tool's values.

    A schema that refers to itself becomes a rule that refers to itself.
    """

    def __init__(self, rules: Rules, tool: WantedTool, quote: str) -> None:
        self._rules, self._tool, self._quote = rules, tool, quote
        self._known: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the expression of the tool's arguments."""
        return self._object(self._tool.schema)

    def _value(self, key: str, schema: Schema) -> str:
        """Return the name of the rule for the values of a schema."""
        text = json.dumps(schema, sort_keys=True)
        if text not in self._known:
            self._known[text] = name = self._rules.reserve()
            made = [
                expression for branch in branches(self._tool.schema, schema) for expression in self._of(key, branch)
            ]
            self._rules.define(name, " | ".join(made) or self._tool.json(False))
        return self._known[text]

    def _of(self, key: str, branch: Schema) -> Iterator[str]:
        """Return expressions for the values of one alternative of a schema."""
        made: dict[str, Any] = {} if isinstance(branch, bool) else dict(branch)
        allowed = types(self._tool.schema, branch)
        values = made.get("enum", [made["const"]] if "const" in made else None)
        if isinstance(values, list):
            for value in values:
                if types_of_value(value) & allowed:
                    yield literal(self._written(value))
            return
        if "string" in allowed:
            string = string_expression(self._tool, key, made, escaped(self._quote))
            yield f"{literal(self._quote)} {self._rules.before(string, self._quote)}"
        if "array" in allowed:
            yield self._array(key, made)
        if "object" in allowed:
            yield self._object(made if "properties" in made else {"additionalProperties": True, **made})
        if scalars := allowed - {"string", "array", "object"}:
            yield self._tool.json({**made, "type": sorted(scalars)})

    def _array(self, key: str, schema: Mapping[str, Any]) -> str:
        inner, least, most = items_of(self._tool, key, schema)
        item = self._value(key, inner)
        if most == 0:
            return '"[]"'
        further = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        members = members_of(self._tool, schema)
        named = sorted(members.named)  # the chat templates sort keys
        made = in_order(
            self._rules,
            [(f"{literal(self._key(key) + ':')} {self._value(key, value)}", must) for key, value, must in named],
            ",",
        )
        if members.other is not None and not named:
            free = self._rules.before(r"/[A-Za-z_][A-Za-z0-9_\-]{0,63}/", ":")
            member = f"{free} {self._value('additionalProperties', members.other)}"
            made = f'({member} ("," {member})*)?'
        return f'"{{" {made} "}}"'

    def _key(self, key: str) -> str:
        if not key or key != key.strip() or set(_NO_KEY).intersection(key) or len(key) > 200:
            raise NotOffered(
                f"tools: {self._tool.name[:64]}: the key {key[:64]!r} cannot be written in this model's format"
            )
        return key

    def _written(self, value: Any) -> str:
        match value:
            case str():
                if self._quote in value:
                    raise NotOffered(f"tools: {self._tool.name[:64]}: enum: {value[:64]!r} holds {self._quote}")
                return f"{self._quote}{value}{self._quote}"
            case list():
                return f"[{','.join(map(self._written, value))}]"
            case dict():
                return f"{{{','.join(f'{self._key(key)}:{self._written(inner)}' for key, inner in value.items())}}}"
            case _:
                return json.dumps(value)


CODE: Final = "```tool_code"
JSON_FENCES: Final = ("```tool_call", '```json\n{"name":')
OPENING: Final = "{"
_FENCE: Final = "```"
FUNCTION_GEMMA: Final = ("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4: Final = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Before and behind a call, and on both sides of a string."""


def read_fences(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read what follows one of the beginnings of Gemma 3."""
    if marker == CODE:
        # Calls stand on lines of their own. Some models put them into print(...), or into a list.
        found = yield from _read_line(source, calls)
        yield from calls.further(found, _read_line)
    else:
        if marker == JSON_FENCES[1]:
            source.at -= len('{"name":')
        yield from source.blanks()
        if (yield from source.peek()) == "[":
            found = yield from read_list(source, calls)
        else:
            found = yield from read_json(source, calls, name_first=not marker)
    yield from calls.close_section(found, _FENCE if marker else "")
    return found


def _read_line(source: Source, calls: ReadCalls) -> Steps[Found]:
    for opening in ("[", ",", "print(", "default_api."):
        yield from source.blanks()
        yield from source.literal(opening)
    found = yield from read_call(source, calls)
    if found is not Found.NOTHING:
        for closing in (")", "]"):
            if (yield from source.peek()) == closing:
                source.at += 1
    return found


def rules_fences(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of Gemma 3's calls."""
    code = rules.any_of(call_rules(rules, tools))
    call = objects(rules, tools, "parameters")
    fence = literal(f"\n{_FENCE}")
    named = objects(rules, tools, "parameters", begun=True)
    return CallGrammar(
        [
            Section(f'"\\n" {code}', more=f'"\\n" {code}', close=fence),
            Section(f'"\\n" {call} {fence}'),
            Section(f"{named} {fence}"),
        ],
        opened=Section(opened(rules, tools, "parameters")),
        opened_json=Section(opened_json(rules, tools, "parameters")),
        looks=looks_opened(tools),
    )


def read_tokens(source: Source, calls: ReadCalls, marker: str, *, end: str, quote: str) -> Steps[Found]:
    """Read a call of FunctionGemma or Gemma 4."""
    yield from source.blanks()
    if not (yield from source.literal("call:")):
        return Found.NOTHING
    name = yield from source.word("<>{}\n")
    if name is None or (yield from source.peek()) != "{":
        return Found.NOTHING
    name = name.strip()
    if name not in calls.tools:
        yield from source.until((end,), ignore)
        yield from source.closing(end)
        return Found.TEXT
    calls.start(name)
    root = calls.schema(name)
    if (yield from read_object(source, calls.arguments, quote, root, root)):
        calls.end()
        yield from source.blanks()
        yield from source.closing(end)
    return Found.CALL


def rules_tokens(rules: Rules, tools: Sequence[WantedTool], *, end: str, quote: str) -> CallGrammar:
    """Write the grammar of the calls of FunctionGemma or Gemma 4."""
    for tool in tools:
        if set("<>{}\n").intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
    calls = (f"{literal(f'call:{tool.name}')} {ValueRules(rules, tool, quote).arguments()}" for tool in tools)
    return CallGrammar([Section(f"{rules.any_of(calls)} {literal(end)}")])
