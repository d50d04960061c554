"""Calls that are JSON objects in a list behind a marker: MARKER [{"name": NAME, "arguments": {...}}, ...] END.

Each model has its own marker, and some have keys of their own. MiniMax M1 writes the objects on lines, without
brackets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from answer_formats.calls import Calls, Found
from answer_formats.json_calls import behind, read_list, read_object
from answer_formats.json_rules import BLANKS, objects
from answer_formats.rules import Rules, Section, Shape, Wanted, literal
from answer_formats.source import Source, Steps


@dataclass(frozen=True, slots=True)
class Form:
    """How a format writes calls.

    begin      marker before the list
    end        marker behind the list; "" if there is none
    name       regular expression of the key of the name, with what stands before it
    arguments  key of the arguments
    rest       regular expression of further members
    brackets   whether the objects stand in brackets. If not, they stand on lines
    """

    begin: str
    end: str = ""
    name: str = '"name"'
    arguments: str = "arguments"
    rest: str = ""
    brackets: bool = True


_ID: Final = r'(, ?"id": ?"[a-zA-Z0-9_\-]{1,64}")?'
MISTRAL: Final = Form("[TOOL_CALLS]", rest=_ID)
GRANITE: Final = Form("<|tool_call|>")
PHI4: Final = Form("<|tool_call|>", "<|/tool_call|>")
APRIEL: Final = Form("<tool_calls>", "</tool_calls>", rest=_ID)
MINIMAX_M1: Final = Form("<tool_calls>", "</tool_calls>", brackets=False)
NEMOTRON: Final = Form("<TOOLCALL>", "</TOOLCALL>")
COMMAND_R7B: Final = Form(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name=rf'"tool_call_id": ?"[0-9]{{1,4}}",{BLANKS}"tool_name"',
    arguments="parameters",
)


def read(source: Source, calls: Calls, marker: str, *, form: Form) -> Steps[Found]:
    """Read the list of calls. Some models leave out its brackets."""
    yield from source.blanks()
    if (yield from source.peek()) == "[":
        found = yield from read_list(source, calls)
    else:
        found = yield from read_object(source, calls)
        if found is Found.CALL:
            while (yield from calls.further(behind(""))):
                pass
    if form.end and found is not Found.NOTHING:
        yield from source.blanks()
        yield from source.closing(form.end)
    return found


def rules(rules: Rules, tools: Sequence[Wanted], *, form: Form) -> Shape:
    """Write the grammar of calls."""
    call = objects(rules, tools, form.arguments, rest=form.rest, name=form.name)
    end = literal(form.end) if form.end else ""
    if not form.brackets:
        return Shape([Section(f'"\\n" {call}', f'"\\n" {call}', f'"\\n" {end}')])
    return Shape([Section(rf"/ ?\[{BLANKS}/ {call}", f"/{BLANKS},{BLANKS}/ {call}", rf"/{BLANKS}\]/ {end}")])
