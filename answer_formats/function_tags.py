"""Calls that name a function in a tag, with tags around each argument's value, which is plain text.

Qwen3-Coder and Qwen 3.5  <tool_call><function=NAME><parameter=KEY>, the value on lines of its own, and </parameter>
Seed-OSS                  <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
MiniMax M2                <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>, and
                          further calls up to </minimax:tool_call>
MiniMax M3                ]<]minimax[>[ before each tag: <tool_call><invoke name="NAME"><KEY>VALUE</KEY></invoke>, and
                          further calls up to </tool_call>. nested_tags.py reads and constrains the arguments

A value is a string, unless the tool's schema says that it is something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from answer_formats import nested_tags
from answer_formats.calls import Calls, Found
from answer_formats.nested_tags import Nested
from answer_formats.raw_values import Tags
from answer_formats.rules import Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps
from answer_formats.tagged import Form, arguments_rule, checked, read_arguments, skip_call


@dataclass(frozen=True, slots=True)
class Functions:
    """How a format writes calls.

    section   tags before and behind a call
    function  what stands before and behind the name
    form      how the arguments are written
    alone     whether a call may begin with ``function`` itself: models leave out the tag before it at times
    several   whether a section may have several calls
    """

    section: tuple[str, str]
    function: tuple[str, str]
    form: Form | Nested
    alone: bool = False
    several: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.section[0], self.function[0]) if self.alone else (self.section[0],)

    @property
    def also(self) -> tuple[str, ...]:
        """Return what may be special tokens, besides the beginnings: a tag with its mark may be two of them."""
        mark = self.form.mark if isinstance(self.form, Nested) else ""
        return (self.section[1], *((mark, *(tag.removeprefix(mark) for tag in self.section)) if mark else ()))


def _form(section_end: str, key: tuple[str, str], function_end: str, *, line: bool = False) -> Form:
    return Form(key, "", Tags("</parameter>", line=line, cut=(function_end, section_end)), function_end, '"\\n"')


QWEN3_CODER: Final = Functions(
    ("<tool_call>", "</tool_call>"),
    ("<function=", ">"),
    _form("</tool_call>", ("<parameter=", ">"), "</function>", line=True),
    alone=True,
)
SEED_OSS: Final = Functions(
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">"),
    _form("</seed:tool_call>", ("<parameter=", ">"), "</function>"),
    alone=True,
)
MINIMAX_M2: Final = Functions(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">'),
    _form("</minimax:tool_call>", ('<parameter name="', '">'), "</invoke>"),
    several=True,
)
_MARK: Final = "]<]minimax[>["
MINIMAX_M3: Final = Functions(
    (f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"),
    (f'{_MARK}<invoke name="', '">'),
    Nested(_MARK, "invoke"),
    several=True,
)


def read(source: Source, calls: Calls, marker: str, *, functions: Functions) -> Steps[Found]:
    """Read a call, or a section of calls."""
    if marker == functions.section[0]:
        yield from source.blanks()
        if not (yield from source.literal(functions.function[0])):
            return Found.NOTHING
    found = yield from _read_call(source, calls, functions)
    if found is not Found.NOTHING:
        if functions.several and found is Found.CALL:
            while (yield from calls.further(partial(_read_further, functions=functions))):
                pass
        yield from source.blanks()
        yield from source.closing(functions.section[1])
    return found


def _read_further(source: Source, calls: Calls, *, functions: Functions) -> Steps[Found]:
    yield from source.blanks()
    if not (yield from source.literal(functions.function[0])):
        return Found.NOTHING
    return (yield from _read_call(source, calls, functions))


def _read_call(source: Source, calls: Calls, functions: Functions) -> Steps[Found]:
    """Read one call behind the beginning of its tag."""
    name = yield from source.word({"<", ">", "\n", functions.function[1][0]})
    if name is None or not name.strip() or not (yield from source.literal(functions.function[1])):
        return Found.NOTHING
    if name.strip() not in calls.tools:
        yield from skip_call(source, functions.form.end)
        return Found.TEXT
    if isinstance(functions.form, Nested):
        yield from nested_tags.read_arguments(source, calls, name.strip(), functions.form)
    else:
        yield from read_arguments(source, calls, name.strip(), functions.form)
    return Found.CALL


def _arguments_rule(rules: Rules, tool: Wanted, form: Form | Nested) -> str:
    if isinstance(form, Nested):
        return nested_tags.arguments_rule(rules, tool, form)
    return arguments_rule(rules, tool, form)


def rules(rules: Rules, tools: Sequence[Wanted], *, functions: Functions) -> Shape:
    """Write the grammar of calls."""
    end = literal(functions.function[1])
    calls = rules.any_of(
        f"{literal(checked(tool, tool.name))} {end} {_arguments_rule(rules, tool, functions.form)}" for tool in tools
    )
    first = f"{literal(functions.function[0])} {calls}"
    close = f'"\\n" {literal(functions.section[1])}'
    if functions.several:
        return Shape([Section(f'"\\n" {first}', f'"\\n" {first}', close)])
    sections = [Section(f'"\\n" {first} {close}'), Section(f"{calls} {close}")]
    return Shape(sections if functions.alone else sections[:1], between="\n")
