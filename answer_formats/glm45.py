"""GLM 4.5 to 4.7: <tool_call>NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument.

A value is plain text. It is a string, unless the tool's schema says that it is something else.
"""

from collections.abc import Sequence
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.raw_values import Tags
from answer_formats.rules import Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps
from answer_formats.tagged import Form, arguments_rule, checked, read_arguments, skip_call

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
_KEY: Final = ("<arg_key>", "</arg_key>")
_VALUE: Final = ("<arg_value>", "</arg_value>")
ALSO: Final = (END, *_KEY, *_VALUE)
_LINE: Final = '"\\n"?'
"""GLM 4.7 leaves out the line breaks between tags."""
_FORM: Final = Form(_KEY, _VALUE[0], Tags(_VALUE[1], line=False), END, _LINE)


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read what follows <tool_call>."""
    yield from source.blanks()
    name = yield from source.word("<\n{")
    if name is None or not name.strip():
        return Found.NOTHING
    yield from source.blanks()
    if not ((yield from _stands(source, _KEY[0])) or (yield from _stands(source, END))):
        return Found.NOTHING
    if name.strip() not in calls.tools:
        yield from skip_call(source, END)
        return Found.TEXT
    yield from read_arguments(source, calls, name.strip(), _FORM)
    return Found.CALL


def _stands(source: Source, tag: str) -> Steps[bool]:
    """Return whether a tag stands here. It is not read."""
    found = yield from source.literal(tag)
    if found:
        source.at -= len(tag)
    return found


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    calls = (f"{literal(checked(tool, tool.name))} {arguments_rule(rules, tool, _FORM)}" for tool in tools)
    return Shape([Section(rules.any_of(calls))], between="\n")
