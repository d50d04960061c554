"""Read and constrain calls that are written as in Python: NAME(key=value, ...)."""

import ast
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.members import members_rule
from answer_formats.rules import NotOffered, Rules, Section, Shape, Wanted, literal
from answer_formats.schemas import Members, Schema
from answer_formats.source import Source, Steps
from answer_formats.values import strict_json, to_json

_NAME: Final = re.compile(r"[\w.\-]+")
_KEY: Final = re.compile(r"[^\W\d]\w*")
_LEXEME: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[^"\']', re.DOTALL
)
_MAY_GO_ON: Final = ('""', "''")
"""These may be empty strings, or begin a longer quote."""


def read_call(source: Source, calls: Calls, *, suffix: str = "") -> Steps[Found]:
    """Read one call. ``suffix``: text that may stand behind the name."""
    name = yield from source.word("()[]{}<>'\"`\n,;=")
    if name is None or not (yield from source.literal("(")) or not _NAME.fullmatch(name.strip()):
        return Found.NOTHING
    name = name.strip().removesuffix(suffix)
    if name not in calls.tools:
        while (yield from _argument(source)) is not None and (yield from source.literal(",")):
            pass
        yield from source.literal(")")
        return Found.TEXT
    calls.start(name)
    calls.arguments("{")
    root = calls.schema(name)
    members = Members.of(root, root)
    separator = ""
    while True:
        text = yield from _argument(source)
        if text is None:
            return Found.CALL
        if text.strip():
            calls.arguments(f"{separator}{_member(text, root, members)}")
            separator = ", "
        if not (yield from source.literal(",")):
            break
    if (yield from source.literal(")")):
        calls.arguments("}")
        calls.end()
    return Found.CALL


def read_listed(source: Source, calls: Calls, marker: str, *, end: str) -> Steps[Found]:
    """Read calls in a list, [NAME(key=value), ...], up to its end marker."""
    yield from source.blanks()
    if not (yield from source.literal("[")):
        return Found.NOTHING
    yield from source.blanks()
    found = yield from read_call(source, calls)
    if found is not Found.NOTHING:
        if found is Found.CALL:
            while (yield from calls.further(_read_further)):
                pass
        yield from source.blanks()
        if (yield from source.literal("]")):
            yield from source.blanks()
            yield from source.closing(end)
    return found


def _read_further(source: Source, calls: Calls) -> Steps[Found]:
    yield from source.blanks()
    if not (yield from source.literal(",")):
        return Found.NOTHING
    yield from source.blanks()
    return (yield from read_call(source, calls))


def rules_listed(rules: Rules, tools: Sequence[Wanted], *, end: str) -> Shape:
    """Write the grammar of calls in a list."""
    call = rules.any_of(call_rules(rules, tools))
    return Shape([Section(f'"[" {call}', f'", " {call}', f'"]" {literal(end)}')])


def _argument(source: Source) -> Steps[str | None]:
    """Read up to the comma or the bracket that ends an argument. Return the text; None if it does not end."""
    size = depth = 0
    while True:
        while found := _LEXEME.match(source.text, source.at + size):
            lexeme = found[0]
            if lexeme in _MAY_GO_ON and found.end() == len(source.text) and not source.ended:
                break
            if not depth and lexeme in ",)]}":
                source.at += size
                return source.text[source.at - size : source.at]
            depth += (lexeme in "([{") - (lexeme in ")]}")
            size += len(lexeme)
        if not (yield from source.more()):
            return None


def _member(text: str, root: Schema, members: Members) -> str:
    """Return an argument as a member of a JSON object."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key.strip()):
        # An argument without a key is the first one that the schema names: models leave out the key of a single one.
        key, value = next((named for named, _, _ in members.named), "value"), text
    key, value = key.strip(), value.strip()
    return f"{json.dumps(key, ensure_ascii=False)}: {python_value(value, root, members.schema_of(key))}"


def python_value(text: str, root: Schema, schema: Schema) -> str:
    """Return the JSON of a value that is written in Python, or in JSON."""
    if strict_json(text) is not None:
        return text
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return to_json(text, root, schema)


def call_rules(rules: Rules, tools: Sequence[Wanted]) -> list[str]:
    """Return an expression for a call of each tool. Values are JSON, which ``read_call`` reads, too."""
    made = []
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
        members = members_rule(rules, tool, partial(_argument_rule, tool), ", ", partial(_free_rule, tool))
        made.append(f'{literal(f"{tool.name}(")} {members} ")"')
    return made


def _argument_rule(tool: Wanted, key: str, schema: Schema) -> str:
    return f"{literal(f'{_key(tool, key)}=')} {tool.json(schema)}"


def _free_rule(tool: Wanted, schema: Schema) -> str:
    return f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}=/ {tool.json(schema)}"


def _key(tool: Wanted, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise NotOffered(f"tools: {tool.name[:64]}: the key {key[:64]!r} cannot be written in this model's format")
    return key
