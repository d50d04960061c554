"""Gemma: calls as Python or JSON in Markdown fences (Gemma 3), or in a syntax of their own between tokens.

Gemma 3        a fence tool_code with NAME(key=value); or {"name": NAME, "parameters": {...}}, bare or in a fence
FunctionGemma  <start_function_call>call:NAME{key:<escape>text<escape>,n:1}<end_function_call>
Gemma 4        <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>
"""

from collections.abc import Sequence
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.gemma_values import ValueRules, read_object
from answer_formats.json_calls import read_list
from answer_formats.json_calls import read_object as read_json
from answer_formats.json_rules import looks_opened, objects, opened, opened_json
from answer_formats.python_calls import call_rules, read_call
from answer_formats.rules import NotOffered, Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps, ignore

CODE: Final = "```tool_code"
JSON_FENCES: Final = ("```tool_call", '```json\n{"name":')
OPENING: Final = "{"
_FENCE: Final = "```"
FUNCTION_GEMMA: Final = ("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4: Final = ("<|tool_call>", "<tool_call|>", '<|"|>')
"""Before and behind a call, and on both sides of a string."""


def read_fences(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read what follows one of the beginnings of Gemma 3."""
    if marker == CODE:
        found = yield from _read_code(source, calls)
    else:
        if marker == JSON_FENCES[1]:
            source.at -= len('{"name":')
        yield from source.blanks()
        if (yield from source.peek()) == "[":
            found = yield from read_list(source, calls)
        else:
            found = yield from read_json(source, calls, name_first=not marker)
    if marker and found is not Found.NOTHING:
        yield from source.blanks()
        yield from source.closing(_FENCE)
    return found


def _read_code(source: Source, calls: Calls) -> Steps[Found]:
    """Read calls on lines of their own. Some models put them into print(...), or into a list."""
    found = yield from _read_line(source, calls)
    if found is Found.CALL:
        while (yield from calls.further(_read_line)):
            pass
    return found


def _read_line(source: Source, calls: Calls) -> Steps[Found]:
    for opening in ("[", ",", "print(", "default_api."):
        yield from source.blanks()
        yield from source.literal(opening)
    found = yield from read_call(source, calls)
    if found is not Found.NOTHING:
        for closing in (")", "]"):
            if (yield from source.peek()) == closing:
                source.at += 1
    return found


def rules_fences(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of Gemma 3's calls."""
    code = rules.any_of(call_rules(rules, tools))
    call = objects(rules, tools, "parameters")
    fence = literal(f"\n{_FENCE}")
    named = objects(rules, tools, "parameters", begun=True)
    return Shape(
        [
            Section(f'"\\n" {code}', more=f'"\\n" {code}', close=fence),
            Section(f'"\\n" {call} {fence}'),
            Section(f"{named} {fence}"),
        ],
        opened=Section(opened(rules, tools, "parameters")),
        opened_json=Section(opened_json(rules, tools, "parameters")),
        looks=looks_opened(tools),
    )


def read_tokens(source: Source, calls: Calls, marker: str, *, end: str, quote: str) -> Steps[Found]:
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


def rules_tokens(rules: Rules, tools: Sequence[Wanted], *, end: str, quote: str) -> Shape:
    """Write the grammar of the calls of FunctionGemma or Gemma 4."""
    for tool in tools:
        if set("<>{}\n").intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
    calls = (f"{literal(f'call:{tool.name}')} {ValueRules(rules, tool, quote).arguments()}" for tool in tools)
    return Shape([Section(f"{rules.any_of(calls)} {literal(end)}")])
