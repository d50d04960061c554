"""Calls that are a name and JSON arguments, with markers around them: CALL NAME SEPARATOR {...} CALL_END.

DeepSeek V3 and R1  a section of calls; a call is CALL function SEP NAME "\\n```json\\n" {...} "\\n```" CALL_END
DeepSeek V3.1       a section of calls; a call is CALL NAME SEP {...} CALL_END
Kimi K2             a section of calls; the name is functions.NAME:NUMBER, and this is also the call's id
Functionary 3.1     <function=NAME>{...}</function> for each call
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.rules import NotOffered, Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps, ignore

_FENCE: Final = "```"
_NO_NAME: Final = "<\n`{"
_NUMBERED: Final = re.compile(r"functions\.(.+):[0-9]+")


@dataclass(frozen=True, slots=True)
class Form:
    """How a format writes calls.

    call       markers before and behind a call
    separator  between name and arguments
    section    markers before and behind all calls; None if each call stands alone. Some models leave out the first one
    fenced     whether a kind stands in front of the name, and the arguments in a Markdown fence
    numbered   whether the name has a number, as in functions.NAME:0
    """

    call: tuple[str, str]
    separator: str
    section: tuple[str, str] | None = None
    fenced: bool = False
    numbered: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.call[0],) if self.section is None else (self.section[0], self.call[0])

    @property
    def also(self) -> tuple[str, ...]:
        """Return further markers. Where each call stands alone, the markers are no tokens."""
        return () if self.section is None else (self.call[1], self.separator, self.section[1])


_DEEPSEEK: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3: Final = Form(_DEEPSEEK, "<｜tool▁sep｜>", _DEEPSEEK_SECTION, fenced=True)
DEEPSEEK_V31: Final = Form(_DEEPSEEK, "<｜tool▁sep｜>", _DEEPSEEK_SECTION)
KIMI_K2: Final = Form(
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    numbered=True,
)
FUNCTIONARY_V31: Final = Form(("<function=", "</function>"), ">")


def read(source: Source, calls: Calls, marker: str, *, form: Form) -> Steps[Found]:
    """Read a section of calls, or one call."""
    if form.section is not None and marker == form.section[0]:
        yield from source.blanks()
        if not (yield from source.literal(form.call[0])):
            return Found.NOTHING
    found = yield from _read_call(source, calls, form)
    if form.section is not None and found is not Found.NOTHING:
        if found is Found.CALL:
            while (yield from calls.further(partial(_read_further, form=form))):
                pass
            yield from source.blanks()
        yield from source.closing(form.section[1])
    return found


def _read_further(source: Source, calls: Calls, *, form: Form) -> Steps[Found]:
    yield from source.blanks()
    if not (yield from source.literal(form.call[0])):
        return Found.NOTHING
    return (yield from _read_call(source, calls, form))


def _read_call(source: Source, calls: Calls, form: Form) -> Steps[Found]:
    """Read one call behind its marker."""
    ends = {*_NO_NAME, form.separator[0]}
    name = yield from source.word(ends)
    if name is None or not (yield from source.literal(form.separator)):
        return Found.NOTHING
    if form.fenced:
        name = yield from source.word(ends)
        if name is None:
            return Found.NOTHING
        yield from source.blanks()
        if (yield from source.literal(_FENCE)):
            yield from source.literal("json")
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        return Found.NOTHING
    name = name.strip()
    call_id: str | None = None
    if form.numbered and (numbered := _NUMBERED.fullmatch(name)):
        name, call_id = numbered[1], name
    is_known = name in calls.tools
    if is_known:
        calls.start(name, call_id)
    if (yield from source.json(calls.arguments if is_known else ignore)):
        if is_known:
            calls.end()
        yield from source.blanks()
        if form.fenced and (yield from source.closing(_FENCE)):
            yield from source.blanks()
        yield from source.closing(form.call[1])
    return Found.CALL if is_known else Found.TEXT


def rules(rules: Rules, tools: Sequence[Wanted], *, form: Form) -> Shape:
    """Write the grammar of calls."""
    calls = []
    for tool in tools:
        if not tool.name.strip() or {*_NO_NAME, form.separator[0]}.intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
        head = literal(f"{tool.name}{form.separator}")
        if form.fenced:
            head = literal(f"function{form.separator}{tool.name}\n```json\n")
        elif form.numbered:
            head = f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {literal(form.separator)}"
        calls.append(f"{head} {tool.json()}")
    end = literal(f"\n{_FENCE}{form.call[1]}" if form.fenced else form.call[1])
    call = rules.rule(f"({' | '.join(calls)}) {end}")
    if form.section is None:
        return Shape([Section(call)])
    between = '"\\n" ' if form.fenced else ""
    more, close = f"{between}{literal(form.call[0])} {call}", literal(form.section[1])
    return Shape([Section(f"{literal(form.call[0])} {call}", more, close), Section(call, more, f"{close}?")])
