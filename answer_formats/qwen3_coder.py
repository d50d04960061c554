"""Qwen3-Coder and Qwen 3.5: <tool_call><function=NAME>, then <parameter=KEY> and </parameter> around each value.

A value is plain text on lines of its own. It is a string, unless the tool's schema says that it is something else.
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
FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_VALUE_END: Final = "</parameter>"
_TAGS: Final = Tags(_VALUE_END, line=True, cut=(_FUNCTION_END, END))
_FORM: Final = Form(("<parameter=", ">"), "", _TAGS, _FUNCTION_END, '"\\n"')


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read a call. Models leave out <tool_call> at times."""
    if marker == BEGIN:
        yield from source.blanks()
        if not (yield from source.literal(FUNCTION)):
            return Found.NOTHING
    name = yield from source.word("<>\n")
    if name is None or not name.strip() or not (yield from source.literal(">")):
        return Found.NOTHING
    is_known = name.strip() in calls.tools
    if is_known:
        yield from read_arguments(source, calls, name.strip(), _FORM)
    else:
        yield from skip_call(source, _FORM)
    yield from source.blanks()
    yield from source.closing(END)
    return Found.CALL if is_known else Found.TEXT


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    calls = rules.any_of(
        f"{literal(checked(tool, tool.name) + '>')} {arguments_rule(rules, tool, _FORM)}" for tool in tools
    )
    return Shape([Section(f'"\\n{FUNCTION}" {calls} "\\n{END}"'), Section(f'{calls} "\\n{END}"')], between="\n")
