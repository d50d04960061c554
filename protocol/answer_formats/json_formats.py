"""Formats whose calls are JSON objects, or Python's calls: Hermes, Llama 3, Mistral, lists, named calls, plain JSON.

The objects are {"name": NAME, "arguments": {...}}, in any order of their keys."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from protocol.answer_formats.rules import (
    CallGrammar,
    NotOffered,
    Rules,
    Section,
    WantedTool,
    escaped,
    literal,
    members_rule,
    strict_json,
    to_json,
)
from protocol.answer_formats.schemas import Members, Schema
from protocol.answer_formats.source import Found, ReadCalls, Source, Steps, ignore, read_behind

NAMES: Final = ("name", "function", "tool_name")
ARGUMENTS: Final = ("arguments", "parameters")
"""Hermes and Mistral were trained with the first one, Llama 3 with the second one. Models mix them up."""


def read_object(source: Source, calls: ReadCalls, *, name_first: bool = False) -> Steps[Found]:
    """Read one call. Other keys, such as an id, are left out.

    name_first  whether the object is a call only if it begins with the name, or with {"type": "function"} and the name,
                and without escapes. The grammar looks for such a call where no marker begins it
    """
    if not (yield from source.literal("{")):
        return Found.NOTHING
    name: str | None = None
    early: str | None = None  # arguments in front of the name, or arguments that are no object
    is_told = False
    while True:
        yield from source.blanks()
        if (yield from source.literal("}")):
            break
        key = yield from _key(source, plain=name_first and name is None)
        if key is None:
            return Found.CALL if is_told else Found.NOTHING
        if key in NAMES and name is None and not is_told:
            name = yield from source.string(plain=name_first)
            if name is None:
                return Found.NOTHING
            if name not in calls.tools:
                yield from source.json(ignore, depth=1)
                return Found.TEXT
        elif name_first and name is None:
            if key != "type" or (yield from source.string(plain=True)) != "function":
                return Found.NOTHING
        elif key in ARGUMENTS and name is not None and not is_told and (yield from source.peek()) == "{":
            calls.start(name)
            is_told = True
            if not (yield from source.json(calls.arguments)):
                return Found.CALL
        elif key in ARGUMENTS and not is_told:
            pieces: list[str] = []
            yield from source.json(pieces.append)
            early = "".join(pieces)
        else:
            yield from source.json(ignore)
        yield from source.blanks()
        if not (yield from source.literal(",")):
            if not (yield from source.literal("}")):
                return Found.CALL if is_told else Found.NOTHING
            break
    if is_told:
        calls.end()
        return Found.CALL
    arguments = _object(early)
    if name is None or arguments is None:
        return Found.NOTHING
    calls.whole(name, arguments)
    return Found.CALL


def behind(
    separator: str, read_one: Callable[[Source, ReadCalls], Steps[Found]] = read_object
) -> Callable[[Source, ReadCalls], Steps[Found]]:
    """Return a function that reads one call with a separator in front of it."""

    def read(source: Source, calls: ReadCalls) -> Steps[Found]:
        yield from source.blanks()
        if not (yield from source.literal(separator)):
            return Found.NOTHING
        yield from source.blanks()
        return (yield from read_one(source, calls))

    return read


def read_list(source: Source, calls: ReadCalls) -> Steps[Found]:
    """Read calls in a JSON list."""
    yield from source.blanks()
    if not (yield from source.literal("[")):
        return Found.NOTHING
    yield from source.blanks()
    found = yield from read_object(source, calls)
    if found is Found.CALL:
        yield from calls.further(found, behind(","))
        yield from source.blanks()
        yield from source.literal("]")
    return found


def _key(source: Source, *, plain: bool) -> Steps[str | None]:
    """Read a key and its colon."""
    key = yield from source.string(plain=plain)
    yield from source.blanks()
    if key is None or not (yield from source.literal(":")):
        return None
    yield from source.blanks()
    return key


def _object(text: str | None) -> str | None:
    """Return arguments as a JSON object. Some models write the object as a string, or null for no arguments."""
    try:
        value = None if text is None else json.loads(text, strict=False)
        if isinstance(value, str):
            text, value = value, json.loads(value, strict=False)
    except ValueError:
        return None
    return "{}" if value is None else text if isinstance(value, dict) else None


# Rules for calls that are JSON objects, {"name": NAME, "arguments": {...}}.


BLANKS: Final = r"[ \t\r\n]{0,8}"
"""Blanks of JSON. In llguidance, \\s is every blank of Unicode. Some models write line breaks. A model that may write
blanks without end does that, too."""


def objects(
    rules: Rules,
    tools: Sequence[WantedTool],
    arguments: str,
    *,
    rest: str = "",
    name: str = '"name"',
    begun: bool = False,
) -> str:
    """Add a rule for a call of one of the tools, and return its name.

    arguments  the key of the arguments
    rest       regular expression of further members
    name       regular expression of the key of the name, with what stands before it
    begun      whether the marker in front of the call ends with the key of the name
    """
    head, middle = "/ ?" if begun else rf"/\{{{BLANKS}{name}: ?", f'/,{BLANKS}"{arguments}": ?/'
    return rules.any_of(f"{head}{escaped(literal(tool.name))}/ {middle} {tool.json()} {_end(rest)}" for tool in tools)


def opened(rules: Rules, tools: Sequence[WantedTool], arguments: str) -> str:
    """Add a rule for a call that begins an answer without a marker, with the blanks before it, and return its name.

    llguidance takes the longest lexeme. So all that text could begin with, too, is one lexeme: up to the arguments.
    """
    begin, middle = rf'{BLANKS}\{{{BLANKS}"name": ?', f',{BLANKS}"{arguments}": ?'
    return rules.any_of(f"/{begin}{escaped(literal(tool.name))}{middle}/ {tool.json()} {_end()}" for tool in tools)


def opened_json(rules: Rules, tools: Sequence[WantedTool], arguments: str) -> str:
    """Add a rule for a call that is JSON of a schema, and return its name."""
    made = []
    for tool in tools:
        members = {"name": {"const": tool.name}, arguments: {"$ref": "#"}}
        whole = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        made.append(tool.json(whole))
    return rules.any_of(made)


def _end(rest: str = "") -> str:
    return rf"/{rest}{BLANKS}\}}/"


def looks_opened(tools: Sequence[WantedTool]) -> str:
    """Return the regular expression of how ``opened`` begins, in all ways that a parser reads."""
    names = "|".join(escaped(tool.name) for tool in tools)
    any_blanks = r"[ \t\r\n]*"
    kind = f'("type"{any_blanks}:{any_blanks}"function"{any_blanks},{any_blanks})?'
    name = f'"(name|function|tool_name)"{any_blanks}:{any_blanks}"({names})"'
    return rf"{any_blanks}\{{{any_blanks}{kind}{name}"


# Hermes 2 and 3, Qwen 2.5 and Qwen 3: a JSON object between <tool_call> and </tool_call>, for each call.


HERMES_BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


def read_hermes(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read what follows <tool_call>."""
    yield from source.blanks()
    found = yield from read_object(source, calls)
    if found is not Found.NOTHING:
        yield from source.blanks()
        while (yield from source.literal("}")):  # models that lose count of their braces write one too many
            yield from source.blanks()
        yield from source.closing(END)
    return found


def hermes_rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    return CallGrammar([Section(f'"\\n" {objects(rules, tools, "arguments")} "\\n{END}"')], between="\n")


# Read and constrain calls that are written as in Python: NAME(key=value, ...).


_NAME: Final = re.compile(r"[\w.\-]+")
_KEY: Final = re.compile(r"[^\W\d]\w*")
_LEXEME: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[^"\']', re.DOTALL
)
_MAY_GO_ON: Final = ('""', "''")
"""These may be empty strings, or begin a longer quote."""


def read_call(source: Source, calls: ReadCalls, *, suffix: str = "") -> Steps[Found]:
    """Read one call. ``suffix``: text that may stand behind the name."""
    name = yield from source.word("()[]{}<>'\"`\n,;=")
    if name is None or not (yield from source.literal("(")) or not _NAME.fullmatch(name.strip()):
        return Found.NOTHING
    name = name.strip().removesuffix(suffix)
    if name not in calls.tools:
        while (yield from _argument(source)) is not None and (yield from source.literal(",")):
            pass
        yield from source.literal(")")
        return Found.TEXT
    calls.start(name)
    calls.arguments("{")
    root = calls.schema(name)
    members = Members.of(root, root)
    separator = ""
    while True:
        text = yield from _argument(source)
        if text is None:
            return Found.CALL
        if text.strip():
            calls.arguments(f"{separator}{_member(text, root, members)}")
            separator = ", "
        if not (yield from source.literal(",")):
            break
    if (yield from source.literal(")")):
        calls.arguments("}")
        calls.end()
    return Found.CALL


def read_listed(source: Source, calls: ReadCalls, marker: str, *, end: str) -> Steps[Found]:
    """Read calls in a list, [NAME(key=value), ...], up to its end marker."""
    yield from source.blanks()
    if not (yield from source.literal("[")):
        return Found.NOTHING
    yield from source.blanks()
    found = yield from read_call(source, calls)
    if found is not Found.NOTHING:
        yield from calls.further(found, behind(",", read_call))
        yield from source.blanks()
        if (yield from source.literal("]")):
            yield from calls.close_section(found, end)
    return found


def rules_listed(rules: Rules, tools: Sequence[WantedTool], *, end: str) -> CallGrammar:
    """Write the grammar of calls in a list."""
    call = rules.any_of(call_rules(rules, tools))
    return CallGrammar([Section(f'"[" {call}', f'", " {call}', f'"]" {literal(end)}')])


def _argument(source: Source) -> Steps[str | None]:
    """Read up to the comma or the bracket that ends an argument. Return the text; None if it does not end."""
    size = depth = 0
    while True:
        while found := _LEXEME.match(source.text, source.at + size):
            lexeme = found[0]
            if lexeme in _MAY_GO_ON and found.end() == len(source.text) and not source.ended:
                break
            if not depth and lexeme in ",)]}":
                source.at += size
                return source.text[source.at - size : source.at]
            depth += (lexeme in "([{") - (lexeme in ")]}")
            size += len(lexeme)
        if not (yield from source.more()):
            return None


def _member(text: str, root: Schema, members: Members) -> str:
    """Return an argument as a member of a JSON object."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key.strip()):
        # An argument without a key is the first one that the schema names: models leave out the key of a single one.
        key, value = next((named for named, _, _ in members.named), "value"), text
    key, value = key.strip(), value.strip()
    return f"{json.dumps(key, ensure_ascii=False)}: {python_value(value, root, members.schema_of(key))}"


def python_value(text: str, root: Schema, schema: Schema) -> str:
    """Return the JSON of a value that is written in Python, or in JSON."""
    if strict_json(text) is not None:
        return text
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return to_json(text, root, schema)


def call_rules(rules: Rules, tools: Sequence[WantedTool]) -> list[str]:
    """Return an expression for a call of each tool. Values are JSON, which ``read_call`` reads, too."""
    made = []
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
        members = members_rule(rules, tool, partial(_argument_rule, tool), ", ", partial(_free_rule, tool))
        made.append(f'{literal(f"{tool.name}(")} {members} ")"')
    return made


def _argument_rule(tool: WantedTool, key: str, schema: Schema) -> str:
    return f"{literal(f'{_keyword(tool, key)}=')} {tool.json(schema)}"


def _free_rule(tool: WantedTool, schema: Schema) -> str:
    return f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}=/ {tool.json(schema)}"


def _keyword(tool: WantedTool, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise NotOffered(f"tools: {tool.name[:64]}: the key {key[:64]!r} cannot be written in this model's format")
    return key


# Llama 3.1 to 3.3: JSON objects, or Python calls of built-in tools, behind <|python_tag|> or without a marker.
#
# A call without a marker is only a call at the beginning of an answer, and if it names a tool. So an answer that
# quotes JSON stays text.


LLAMA3_BEGIN: Final = "<|python_tag|>"
OPENING: Final = "{"


def read_llama3(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read calls that are joined by semicolons."""
    yield from source.blanks()
    if marker and (yield from source.peek()) not in ("{", ""):
        return (yield from read_call(source, calls, suffix=".call"))
    found = yield from read_object(source, calls, name_first=not marker)
    yield from calls.further(found, behind(";"))
    return found


def llama3_rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    call = objects(rules, tools, "parameters")
    more = f"/; ?/ {call}"
    return CallGrammar(
        [Section(call, more)],
        opened=Section(opened(rules, tools, "parameters"), more),
        opened_json=Section(opened_json(rules, tools, "parameters"), more),
        looks=looks_opened(tools),
        not_behind=r"[ \t\r\n]*;[ \t\r\n]*\{",
    )


# Mistral from tokenizer version 11 on: [TOOL_CALLS]NAME[ARGS]{...} for each call.
#
# Some models write the call's id, too: [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}. Earlier models write a list
# (json_lists).


MISTRAL_BEGIN: Final = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS: Final = "[ARGS]"
ID: Final = "[CALL_ID]"


def read_mistral(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read one call."""
    yield from source.blanks()
    name = yield from source.word("[{\n")
    if name is None:
        return Found.NOTHING
    call_id: str | None = None
    if (yield from source.literal(ID)):
        call_id = yield from source.word("[{\n")
    if not (yield from source.literal(MISTRAL_ARGUMENTS)):
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


def mistral_rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    for tool in tools:
        if set("[{\n").intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
    call_id = rules.rule(f'("{ID}" /[a-zA-Z0-9]{{9}}/)? "{MISTRAL_ARGUMENTS}"')
    return CallGrammar([Section(rules.any_of(f"{literal(tool.name)} {call_id} {tool.json()}" for tool in tools))])


# Calls that are JSON objects in a list behind a marker: MARKER [{"name": NAME, "arguments": {...}}, ...] END.
#
# Each model has its own marker, and some have keys of their own. MiniMax M1 writes the objects on lines, without
# brackets.


@dataclass(frozen=True, slots=True)
class ListForm:
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
MISTRAL: Final = ListForm("[TOOL_CALLS]", rest=_ID)
GRANITE: Final = ListForm("<|tool_call|>")
PHI4: Final = ListForm("<|tool_call|>", "<|/tool_call|>")
APRIEL: Final = ListForm("<tool_calls>", "</tool_calls>", rest=_ID)
MINIMAX_M1: Final = ListForm("<tool_calls>", "</tool_calls>", brackets=False)
NEMOTRON: Final = ListForm("<TOOLCALL>", "</TOOLCALL>")
COMMAND_R7B: Final = ListForm(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name=rf'"tool_call_id": ?"[0-9]{{1,4}}",{BLANKS}"tool_name"',
    arguments="parameters",
)


def read_json_list(source: Source, calls: ReadCalls, marker: str, *, form: ListForm) -> Steps[Found]:
    """Read the list of calls. Some models leave out its brackets."""
    yield from source.blanks()
    if (yield from source.peek()) == "[":
        found = yield from read_list(source, calls)
    else:
        found = yield from read_object(source, calls)
        yield from calls.further(found, behind(""))
    yield from calls.close_section(found, form.end)
    return found


def json_list_rules(rules: Rules, tools: Sequence[WantedTool], *, form: ListForm) -> CallGrammar:
    """Write the grammar of calls."""
    call = objects(rules, tools, form.arguments, rest=form.rest, name=form.name)
    end = literal(form.end) if form.end else ""
    if not form.brackets:
        return CallGrammar([Section(f'"\\n" {call}', f'"\\n" {call}', f'"\\n" {end}')])
    return CallGrammar([Section(rf"/ ?\[{BLANKS}/ {call}", f"/{BLANKS},{BLANKS}/ {call}", rf"/{BLANKS}\]/ {end}")])


# Calls that are a name and JSON arguments, with markers around them: CALL NAME SEPARATOR {...} CALL_END.
#
# DeepSeek V3 and R1  a section of calls; a call is CALL function SEP NAME "\n```json\n" {...} "\n```" CALL_END
# DeepSeek V3.1       a section of calls; a call is CALL NAME SEP {...} CALL_END Kimi K2             a section of
# calls; the name is functions.NAME:NUMBER, and this is also the call's id Functionary 3.1
# <function=NAME>{...}</function> for each call


_FENCE: Final = "```"
_NO_NAME: Final = "<\n`{"
_NUMBERED: Final = re.compile(r"functions\.(.+):[0-9]+")


@dataclass(frozen=True, slots=True)
class NamedForm:
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
DEEPSEEK_V3: Final = NamedForm(_DEEPSEEK, "<｜tool▁sep｜>", _DEEPSEEK_SECTION, fenced=True)
DEEPSEEK_V31: Final = NamedForm(_DEEPSEEK, "<｜tool▁sep｜>", _DEEPSEEK_SECTION)
KIMI_K2: Final = NamedForm(
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    numbered=True,
)
FUNCTIONARY_V31: Final = NamedForm(("<function=", "</function>"), ">")


def read_named(source: Source, calls: ReadCalls, marker: str, *, form: NamedForm) -> Steps[Found]:
    """Read a section of calls, or one call."""
    read_call = partial(_read_call, form=form)
    read_next = partial(read_behind, opening=form.call[0], read=read_call)
    begins_section = form.section is not None and marker == form.section[0]
    found = yield from (read_next if begins_section else read_call)(source, calls)
    if form.section is not None and found is not Found.NOTHING:
        if found is Found.CALL:
            yield from calls.further(found, read_next)
            yield from source.blanks()
        yield from source.closing(form.section[1])
    return found


def _read_call(source: Source, calls: ReadCalls, form: NamedForm) -> Steps[Found]:
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


def named_rules(rules: Rules, tools: Sequence[WantedTool], *, form: NamedForm) -> CallGrammar:
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
        return CallGrammar([Section(call)])
    between = '"\\n" ' if form.fenced else ""
    more, close = f"{between}{literal(form.call[0])} {call}", literal(form.section[1])
    return CallGrammar([Section(f"{literal(form.call[0])} {call}", more, close), Section(call, more, f"{close}?")])


# Calls for models whose chat template knows no tools: plain JSON, {"name": NAME, "arguments": {...}}.
#
# The tools stand in the system message (``tools_text``). A call is the whole answer, or begins it, or stands in a
# Markdown fence. Further calls follow on lines of their own.


BEGINS: Final = tuple(
    f'{_FENCE}{language}\n{{{blanks}"name":' for language in ("json", "") for blanks in ("", "\n  ", "\n    ")
)
"""With a shorter marker every block of JSON would be taken for a call."""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text for the end of the system message that describes the tools, and how they are called.

    tools  tools in OpenAI's shape, {type, function: {name, description, parameters}}. Other keys are left out
    """
    return "\n".join(
        (
            "You can call these tools. The parameters of each are a JSON schema:",
            *(_tool(tool.get("function", {})) for tool in tools),
            "To call a tool, answer with nothing but a JSON object, and then wait for the result:",
            '{"name": NAME, "arguments": {...}}',
            "To call several tools, write one such object on each line. If you need no tool, answer with text.",
        )
    )


def _tool(function: Mapping[str, Any]) -> str:
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return _json(kept)


def calls_text(calls: Sequence[tuple[str, Any]]) -> str:
    """Return an assistant's calls as the text of its turn, behind the turn's own text and a line break.

    calls  (name, arguments) of each call. Arguments are a map. Other values are written as they are
    """
    return "\n".join(_json({"name": name, "arguments": arguments}) for name, arguments in calls)


def result_text(name: str | None, content: str) -> str:
    """Return the result of a call as the text of a user's turn. Results of several calls are joined by line breaks.

    name  the name of the tool; None if it is not known
    """
    return f"Result of {name or 'the tool'}:\n{content}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_plain(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read calls at the beginning of an answer, or in a fence."""
    if marker:
        source.at -= len(marker) - marker.index("{")
    found = yield from read_object(source, calls, name_first=not marker)
    yield from calls.further(found, behind(""))
    yield from calls.close_section(found, _FENCE if marker else "")
    return found


def plain_rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    more = f"/\\n/ {objects(rules, tools, 'arguments')}"
    rest = objects(rules, tools, "arguments", begun=True)
    return CallGrammar(
        [Section(rest, more, f'"\\n{_FENCE}"')] * len(BEGINS),
        opened=Section(opened(rules, tools, "arguments"), more),
        opened_json=Section(opened_json(rules, tools, "arguments"), more),
        looks=looks_opened(tools),
        not_behind=r"[ \t\r\n]*\{",
    )
