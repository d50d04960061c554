"""Llama 3.1 to 3.3: JSON objects, or Python calls of built-in tools, behind <|python_tag|> or without a marker.

A call without a marker is only a call at the beginning of an answer, and if it names a tool. So an answer that quotes
JSON stays text.
"""

from collections.abc import Sequence
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.json_calls import behind, read_object
from answer_formats.json_rules import looks_opened, objects, opened, opened_json
from answer_formats.python_calls import read_call
from answer_formats.rules import Rules, Section, Shape, Wanted
from answer_formats.source import Source, Steps

BEGIN: Final = "<|python_tag|>"
OPENING: Final = "{"


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read calls that are joined by semicolons."""
    yield from source.blanks()
    if marker and (yield from source.peek()) not in ("{", ""):
        return (yield from read_call(source, calls, suffix=".call"))
    found = yield from read_object(source, calls, name_first=not marker)
    if found is Found.CALL:
        while (yield from calls.further(behind(";"))):
            pass
    return found


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    call = objects(rules, tools, "parameters")
    more = f"/; ?/ {call}"
    return Shape(
        [Section(call, more)],
        opened=Section(opened(rules, tools, "parameters"), more),
        opened_json=Section(opened_json(rules, tools, "parameters"), more),
        looks=looks_opened(tools),
        not_behind=r"[ \t\r\n]*;[ \t\r\n]*\{",
    )
