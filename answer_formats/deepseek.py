"""DeepSeek: a section of calls, each between markers of its own. V3 and R1 put the arguments into a Markdown fence.

V3 and R1:  BEGIN CALL function SEP NAME "\\n```json\\n" {...} "\\n```" CALL_END, further calls, END
V3.1:       BEGIN CALL NAME SEP {...} CALL_END, further calls, END
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.rules import NotOffered, Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps, ignore

BEGIN: Final = "<｜tool▁calls▁begin｜>"
END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
BEGINS: Final = (BEGIN, CALL)
"""Some models leave out the first one."""
ALSO: Final = (END, CALL_END, SEPARATOR)
_FENCE: Final = "```"
_NO_NAME: Final = "<\n`{"


def read(source: Source, calls: Calls, marker: str, *, fenced: bool) -> Steps[Found]:
    """Read a section of calls."""
    one = partial(_read_call, fenced=fenced)
    if marker == BEGIN:
        yield from source.blanks()
        if not (yield from source.literal(CALL)):
            return Found.NOTHING
    found = yield from one(source, calls)
    if found is Found.CALL:
        while (yield from calls.further(partial(_read_further, fenced=fenced))):
            pass
        yield from source.blanks()
    if found is not Found.NOTHING:
        yield from source.closing(END)
    return found


def _read_further(source: Source, calls: Calls, *, fenced: bool) -> Steps[Found]:
    yield from source.blanks()
    if not (yield from source.literal(CALL)):
        return Found.NOTHING
    return (yield from _read_call(source, calls, fenced=fenced))


def _read_call(source: Source, calls: Calls, *, fenced: bool) -> Steps[Found]:
    """Read one call behind its marker."""
    name = yield from source.word(_NO_NAME)
    if name is None or not (yield from source.literal(SEPARATOR)):
        return Found.NOTHING
    if fenced:
        name = yield from source.word(_NO_NAME)
        if name is None:
            return Found.NOTHING
        yield from source.blanks()
        if (yield from source.literal(_FENCE)):
            yield from source.literal("json")
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        return Found.NOTHING
    name = name.strip()
    is_known = name in calls.tools
    if is_known:
        calls.start(name)
    if (yield from source.json(calls.arguments if is_known else ignore)):
        if is_known:
            calls.end()
        yield from source.blanks()
        if fenced and (yield from source.closing(_FENCE)):
            yield from source.blanks()
        yield from source.closing(CALL_END)
    return Found.CALL if is_known else Found.TEXT


def rules(rules: Rules, tools: Sequence[Wanted], *, fenced: bool) -> Shape:
    """Write the grammar of calls."""
    calls = []
    for tool in tools:
        if not tool.name.strip() or set(_NO_NAME).intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
        head = f"function{SEPARATOR}{tool.name}\n```json\n" if fenced else f"{tool.name}{SEPARATOR}"
        calls.append(f"{literal(head)} {tool.json()}")
    end = literal(f"\n{_FENCE}{CALL_END}" if fenced else CALL_END)
    call = rules.rule(f"({' | '.join(calls)}) {end}")
    between = '"\\n" ' if fenced else ""
    more, close = f"{between}{literal(CALL)} {call}", literal(END)
    return Shape([Section(f"{literal(CALL)} {call}", more, close), Section(call, more, f"{close}?")])
