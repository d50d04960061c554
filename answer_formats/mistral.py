"""Mistral from tokenizer version 11 on: [TOOL_CALLS]NAME[ARGS]{...} for each call.

Some models write the call's id, too: [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}. Earlier models write a list (json_lists).
"""

from collections.abc import Sequence
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.rules import NotOffered, Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps, ignore

BEGIN: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
ID: Final = "[CALL_ID]"


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read one call."""
    yield from source.blanks()
    name = yield from source.word("[{\n")
    if name is None:
        return Found.NOTHING
    call_id: str | None = None
    if (yield from source.literal(ID)):
        call_id = yield from source.word("[{\n")
    if not (yield from source.literal(ARGUMENTS)):
        return Found.NOTHING
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        return Found.NOTHING
    name = name.strip()
    if name not in calls.tools:
        yield from source.json(ignore)
        return Found.TEXT
    calls.start(name, call_id)
    if (yield from source.json(calls.arguments)):
        calls.end()
    return Found.CALL


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    for tool in tools:
        if set("[{\n").intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
    call_id = rules.rule(f'("{ID}" /[a-zA-Z0-9]{{9}}/)? "{ARGUMENTS}"')
    return Shape([Section(rules.any_of(f"{literal(tool.name)} {call_id} {tool.json()}" for tool in tools))])
