"""Rules for calls that are JSON objects, {"name": NAME, "arguments": {...}}."""

from collections.abc import Sequence
from typing import Final

from answer_formats.rules import Rules, Wanted, escaped, literal

BLANKS: Final = r"[ \t\r\n]{0,8}"
"""Blanks of JSON. In llguidance, \\s is every blank of Unicode. Some models write line breaks. A model that may write
blanks without end does that, too."""


def objects(
    rules: Rules,
    tools: Sequence[Wanted],
    arguments: str,
    *,
    rest: str = "",
    name: str = '"name"',
    begun: bool = False,
) -> str:
    """Add a rule for a call of one of the tools, and return its name.

    arguments  the key of the arguments
    rest       regular expression of further members
    name       regular expression of the key of the name, with what stands before it
    begun      whether the marker in front of the call ends with the key of the name
    """
    head, middle = "/ ?" if begun else rf"/\{{{BLANKS}{name}: ?", f'/,{BLANKS}"{arguments}": ?/'
    return rules.any_of(f"{head}{escaped(literal(tool.name))}/ {middle} {tool.json()} {_end(rest)}" for tool in tools)


def opened(rules: Rules, tools: Sequence[Wanted], arguments: str) -> str:
    """Add a rule for a call that begins an answer without a marker, with the blanks before it, and return its name.

    llguidance takes the longest lexeme. So all that text could begin with, too, is one lexeme: up to the arguments.
    """
    begin, middle = rf'{BLANKS}\{{{BLANKS}"name": ?', f',{BLANKS}"{arguments}": ?'
    return rules.any_of(f"/{begin}{escaped(literal(tool.name))}{middle}/ {tool.json()} {_end()}" for tool in tools)


def opened_json(rules: Rules, tools: Sequence[Wanted], arguments: str) -> str:
    """Add a rule for a call that is JSON of a schema, and return its name."""
    made = []
    for tool in tools:
        members = {"name": {"const": tool.name}, arguments: {"$ref": "#"}}
        whole = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        made.append(tool.json(whole))
    return rules.any_of(made)


def _end(rest: str = "") -> str:
    return rf"/{rest}{BLANKS}\}}/"


def looks_opened(tools: Sequence[Wanted]) -> str:
    """Return the regular expression of how ``opened`` begins, in all ways that a parser reads."""
    names = "|".join(escaped(tool.name) for tool in tools)
    any_blanks = r"[ \t\r\n]*"
    kind = f'("type"{any_blanks}:{any_blanks}"function"{any_blanks},{any_blanks})?'
    name = f'"(name|function|tool_name)"{any_blanks}:{any_blanks}"({names})"'
    return rf"{any_blanks}\{{{any_blanks}{kind}{name}"
