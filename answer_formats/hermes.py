"""Hermes 2 and 3, Qwen 2.5 and Qwen 3: a JSON object between <tool_call> and </tool_call>, for each call."""

from collections.abc import Sequence
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.json_calls import read_object
from answer_formats.json_rules import objects
from answer_formats.rules import Rules, Section, Shape, Wanted
from answer_formats.source import Source, Steps

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read what follows <tool_call>."""
    yield from source.blanks()
    found = yield from read_object(source, calls)
    if found is not Found.NOTHING:
        yield from source.blanks()
        while (yield from source.literal("}")):  # models that lose count of their braces write one too many
            yield from source.blanks()
        yield from source.closing(END)
    return found


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    return Shape([Section(f'"\\n" {objects(rules, tools, "arguments")} "\\n{END}"')], between="\n")
