"""Formats whose calls stand between tags, with plain text as values: GLM, nested tags, and tags of functions.

GLM 4.5 to 4.7: <tool_call>NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument.

A value is plain text. It is a string, unless the tool's schema says that it is something else.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

from protocol.answer_formats.rules import (
    CallGrammar,
    NotOffered,
    Rules,
    Section,
    WantedTool,
    escaped,
    in_order,
    items_of,
    literal,
    members_of,
    text_piece,
    to_json,
)
from protocol.answer_formats.schemas import Members, Schema, branches, types
from protocol.answer_formats.source import BLANKS, DEEPEST, Found, ReadCalls, Source, Steps, Tell, ignore, read_behind
from protocol.answer_formats.tag_values import Tags, read_value, value_rule

# Read and constrain arguments that stand between tags: a key, then its value as plain text.


@dataclass(frozen=True, slots=True)
class TagForm:
    """How a format writes the arguments of a call.

    key    tags before and behind a key
    value  tag before a value; "" if there is none
    tags   what ends a value
    end    the tag behind the last argument
    line   expression of what stands in front of a tag
    """

    key: tuple[str, str]
    value: str
    tags: Tags
    end: str
    line: str


def read_arguments(source: Source, calls: ReadCalls, name: str, form: TagForm) -> Steps[None]:
    """Read the arguments of a known tool, and what ends the call."""
    calls.start(name)
    calls.arguments("{")
    root = calls.schema(name)
    members = Members.of(root, root)
    separator = ""
    while True:
        yield from source.blanks()
        if not (yield from source.literal(form.key[0])):
            break
        key = yield from source.word(form.key[1][0] + "\n")
        if key is None or not (yield from source.closing(form.key[1])):
            return
        if form.value:
            yield from source.blanks()
            if not (yield from source.closing(form.value)):
                return
        key = key.strip()
        calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from read_value(source, calls, form.tags, root, members.schema_of(key))):
            return
    if (yield from source.closing(form.key[0])) or (yield from source.closing(form.end)) or (yield from source.peek()):
        # Another text than the end tag ends the call, too: the model has left the format.
        calls.arguments("}")
        calls.end()


def skip_call(source: Source, end: str) -> Steps[None]:
    """Read to the end of a call of an unknown tool."""
    yield from source.until((end,), ignore)
    yield from source.closing(end)


def arguments_rule(rules: Rules, tool: WantedTool, form: TagForm) -> str:
    """Add a rule for a tool's arguments, up to the end tag, and return its name. Raises NotOffered."""
    members = members_of(tool)
    named = [
        (
            _member(rules, tool, key, literal("".join((form.key[0], checked(tool, key), form.key[1]))), schema, form),
            must,
        )
        for key, schema, must in members.named
    ]
    text = in_order(rules, named, "")
    other = ""
    if members.other is not None:
        begin, end = map(escaped, form.key)
        names = "|".join(escaped(key) for key, _, _ in members.named)
        not_named = f" & ~/{begin}({names}){end}/" if names else ""
        key = rules.terminal(rf"/{begin}[^<>\n\" ][^<>\n\"]{{0,63}}{end}/{not_named}")
        other = f"({_member(rules, tool, 'additionalProperties', key, members.other, form)})*"
    return rules.rule(f"{text} {other} {form.line} {literal(form.end)}")


def _member(rules: Rules, tool: WantedTool, name: str, key: str, schema: Schema, form: TagForm) -> str:
    value = f"{form.line} {literal(form.value)} " if form.value else ""
    return f"{form.line} {key} {value}{value_rule(rules, tool, name, schema, form.tags)}"


def checked(tool: WantedTool, text: str) -> str:
    """Return a name or a key. Raises NotOffered if the format cannot write it."""
    if not text or text != text.strip() or any(c in text for c in ("<", ">", "\n", '"')) or len(text) > 200:
        raise NotOffered(
            f"tools: {tool.name[:64]}: {text[:64]!r} cannot be written in the format in which this model writes calls"
        )
    return text


BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
_KEY: Final = ("<arg_key>", "</arg_key>")
_VALUE: Final = ("<arg_value>", "</arg_value>")
ALSO: Final = (END, *_KEY, *_VALUE)
_LINE: Final = '"\\n"?'
"""GLM 4.7 leaves out the line breaks between tags."""
_FORM: Final = TagForm(_KEY, _VALUE[0], Tags(_VALUE[1], line=False), END, _LINE)


def read_glm45(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
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


def glm45_rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    calls = (f"{literal(checked(tool, tool.name))} {arguments_rule(rules, tool, _FORM)}" for tool in tools)
    return CallGrammar([Section(rules.any_of(calls))], between="\n")


# Read and constrain arguments whose objects and lists are tags within tags, each tag behind a mark.
#
# MiniMax M3 writes {"at": {"zip": 7}, "tags": ["a"]} so, with its mark before each "<":
# <at><zip>7</zip></at><tags><item>a</item></tags>
#
# A value without tags is plain text. It is a string, unless the tool's schema says that it is something else. A value
# with nothing in it is a string, an object, a list or null: the first of these that the schema allows.


_ITEM: Final = "item"
_MOST_BRANCHES: Final = 16
"""Alternatives of a schema that are looked at. A schema that refers to itself may have more on each level."""
_EMPTY: Final = (("string", '""'), ("object", "{}"), ("array", "[]"), ("null", "null"))
_NESTED: Final = frozenset(("array", "object"))


@dataclass(frozen=True, slots=True)
class Nested:
    """How a format writes the arguments of a call.

    mark  stands in front of each tag. No string can hold it
    last  name of the tag around a call
    """

    mark: str
    last: str

    @property
    def end(self) -> str:
        """Return the tag behind the last argument."""
        return f"{self.mark}</{self.last}>"


def _empty(allowed: frozenset[str]) -> tuple[str, str]:
    """Return (type, JSON) of a value with nothing in it."""
    return next((empty for empty in _EMPTY if empty[0] in allowed), _EMPTY[0])


# --- reading


def read_nested_arguments(source: Source, calls: ReadCalls, name: str, form: Nested) -> Steps[None]:
    """Read the arguments of a known tool, and what ends the call."""
    calls.start(name)
    root = calls.schema(name)
    if (yield from _read_tags(source, calls.arguments, form, root, root, "object", 0)) and (
        (yield from source.closing(form.end)) or (yield from source.peek())
    ):
        # Another text than the end tag ends the call, too: the model has left the format.
        calls.end()


def _read_tags(
    source: Source, tell: Tell, form: Nested, root: Schema, schema: Schema, kind: str, depth: int
) -> Steps[bool]:
    """Read the members of an object, or the items of an array. Return False if the answer ends before the last one."""
    begin, end = "{}" if kind == "object" else "[]"
    tell(begin)
    separator = ""
    while True:
        yield from source.blanks()
        source.mark()
        if not (yield from source.literal(f"{form.mark}<")) or (yield from source.peek()) == "/":
            break
        source.marked()
        key = yield from source.word("<>\n")
        if key is None or not (yield from source.literal(">")):
            return False
        tell(f"{separator}{json.dumps(key, ensure_ascii=False)}: " if kind == "object" else separator)
        separator = ", "
        if not (yield from _read_value(source, tell, form, key, root, _inner(root, schema, kind, key), depth + 1)):
            return False
    source.back()
    if source.ended and f"{form.mark}</".startswith(source.text[source.at :]):
        return False
    tell(end)
    return True


def _read_value(
    source: Source, tell: Tell, form: Nested, key: str, root: Schema, schema: Schema, depth: int
) -> Steps[bool]:
    """Read a value with the tag behind it. Return False if the answer ends within the value."""
    allowed = types(root, schema)
    is_text = allowed <= {"string"}
    may_be_tags = bool(allowed & _NESTED) and depth < DEEPEST
    pieces: list[str] = []
    if is_text:
        tell('"')

    def add(text: str) -> None:
        nonlocal may_be_tags
        may_be_tags = may_be_tags and not text.strip(BLANKS)
        if is_text:
            tell(text_piece(text))
        else:
            pieces.append(text)

    while (yield from source.until((form.mark,), add)) is not None:
        if (yield from _read_end(source, form, key)):
            text = "".join(pieces)
            if is_text:
                tell('"')
            elif not text.strip(BLANKS) and "string" not in allowed:
                tell(_empty(allowed)[1])
            else:
                tell(to_json(text, root, schema))
            return True
        if may_be_tags:
            source.mark()
            name = None
            if (yield from source.literal(f"{form.mark}<")):
                name = yield from source.word("<>\n")
            source.back()
            if name is not None:
                is_list = "array" in allowed and (name == _ITEM or "object" not in allowed)
                kind = "array" if is_list else "object"
                if not (yield from _read_tags(source, tell, form, root, schema, kind, depth)):
                    return False
                # Another text than the end tag ends the value, too.
                return (yield from _read_end(source, form, key)) or bool((yield from source.peek()))
        source.at += 1
        add(form.mark[0])
    tell("".join(pieces))
    return False


def _read_end(source: Source, form: Nested, key: str) -> Steps[bool]:
    """Read the tag behind a value. Return False, and read nothing, if another text stands here.

    The tag may name another key: a grammar cannot compare the names of keys that the schema does not name. The tag
    behind the call ends a value, too, and is not read.
    """
    source.mark()
    if (yield from source.literal(f"{form.mark}</")):
        name = yield from source.word("<>\n")
        if name is not None and (yield from source.literal(">")):
            if name == form.last != key:
                source.back()
            else:
                source.marked()
            return True
    source.back()
    return False


def _inner(root: Schema, schema: Schema, kind: str, key: str) -> Schema:
    """Return the schema of a member or of an item. Several alternatives may have one."""
    found: list[Schema] = []
    for branch in islice(branches(root, schema), _MOST_BRANCHES):
        if kind in types(root, branch):
            inner: Any = True
            if kind == "object":
                inner = Members.of(root, branch).schema_of(key)
            elif isinstance(branch, Mapping):
                inner = branch.get("items", True)
            if inner not in found:
                found.append(inner if isinstance(inner, Mapping | bool) else True)
    return {"anyOf": found} if len(found) > 1 else found[0] if found else True


# --- the grammar


def nested_arguments_rule(rules: Rules, tool: WantedTool, form: Nested) -> str:
    """Add a rule for a tool's arguments, up to the end tag, and return its name. Raises NotOffered."""
    made = _ValueRules(rules, tool, form).members(tool.schema, frozenset({"object"}))
    return rules.rule(f"({made}) {literal(form.mark)} {literal(f'</{form.last}>')}")


class _ValueRules:
    """Writes the rules of one tool's values, each with the mark of the tag behind it.

    llguidance takes the longest lexeme. So the mark is always a lexeme of its own: what follows it tells whether a
    value goes on.
    A schema that refers to itself becomes a rule that refers to itself.
    """

    def __init__(self, rules: Rules, tool: WantedTool, form: Nested) -> None:
        self._rules, self._tool, self._form = rules, tool, form
        self._tags = Tags(form.mark, line=False, nested=True)
        self._known: dict[str, str] = {}

    def _value(self, key: str, schema: Schema) -> str:
        """Return the name of the rule for the values of a schema."""
        text = json.dumps(schema, sort_keys=True)
        if text not in self._known:
            self._known[text] = name = self._rules.reserve()
            self._rules.define(name, " | ".join(self._of(key, schema)) or self._tool.json(False))
        return self._known[text]

    def _of(self, key: str, schema: Schema) -> Iterator[str]:
        """Return expressions for the values of a schema."""
        allowed = types(self._tool.schema, schema)
        if "string" in allowed or not allowed & _NESTED:
            yield value_rule(self._rules, self._tool, key, schema, self._tags)
        mark = literal(self._form.mark)
        seen: set[str] = set()
        for branch in branches(self._tool.schema, schema):
            made: dict[str, Any] = {} if isinstance(branch, bool) else dict(branch)
            kinds = types(self._tool.schema, branch)
            is_listed = "enum" in made or "const" in made
            as_json = kinds if is_listed else kinds - _NESTED
            if as_json and allowed & _NESTED and "string" not in allowed:
                yield f"{self._tool.json({**made, 'type': sorted(as_json)})} {mark}"
            if is_listed:
                continue
            for kind in sorted(kinds & _NESTED):
                if kind in seen:
                    # The reader sees one list of members. It cannot tell which alternative a member belongs to.
                    self._tool.refuse(key, "has several alternatives that are objects or lists, which is not offered")
                    continue
                seen.add(kind)
                yield f"({self._array(key, made, allowed) if kind == 'array' else self.members(made, allowed)}) {mark}"

    def _array(self, key: str, schema: Mapping[str, Any], allowed: frozenset[str]) -> str:
        """Return the expression of the items of an array."""
        inner, least, most = items_of(self._tool, key, schema)
        if _empty(allowed)[0] != "array":
            least = max(least, 1)
        item = f"{self._open(_ITEM)} {self._value(key, inner)} {self._close(_ITEM)}"
        return f"({item}){{{least},{'' if most is None else max(most, least)}}}" if most != 0 else '""'

    def members(self, schema: Mapping[str, Any], allowed: frozenset[str]) -> str:
        """Return the expression of the members of an object.

        allowed  all types that a value may have at this place
        """
        if schema is not self._tool.schema and "properties" not in schema:
            schema = {"additionalProperties": True, **schema}
        members = members_of(self._tool, schema)
        keys = [key for key, _, _ in members.named]
        if "array" in allowed and _ITEM in keys:
            raise NotOffered(f"tools: {self._tool.name[:64]}: {_ITEM} is what items of lists are called in this format")
        named = [
            (f"{self._open(key)} {self._value(key, inner)} {self._close(key)}", must)
            for key, inner, must in members.named
        ]
        other = ""
        if members.other is not None:
            taken = [*keys, *([_ITEM] if "array" in allowed else [])]
            other = self._rules.rule(f"{self._free(taken)} {self._value('additionalProperties', members.other)} "
                                     f"{self._free_end()}")  # fmt: skip
        if _empty(allowed)[0] == "object":
            return f"{in_order(self._rules, named, '')}{f' {other}*' if other else ''}"
        return " | ".join(self._not_empty(named, other)) or self._tool.json(False)

    def _not_empty(self, named: list[tuple[str, bool]], other: str) -> Iterator[str]:
        """Return expressions for at least one member: one for each that may be the first."""
        for at, (expression, must) in enumerate(named):
            rest = in_order(self._rules, named[at + 1 :], "")
            yield f"{expression} {rest}{f' {other}*' if other else ''}"
            if must:
                return
        if other:
            yield f"{other}+"

    def _open(self, key: str) -> str:
        return f"{literal(self._form.mark)} {literal(f'<{self._key(key)}>')}"

    def _close(self, key: str) -> str:
        return literal(f"</{key}>")

    def _key(self, key: str) -> str:
        if key.startswith("/"):
            raise NotOffered(f"tools: {self._tool.name[:64]}: {key[:64]!r} cannot be written in this model's format")
        return checked(self._tool, key)

    def _free(self, taken: list[str]) -> str:
        """Return the expression of the tag before a member that the schema does not name."""
        but = f" & ~/<({'|'.join(map(escaped, taken))})>/" if taken else ""
        name = self._rules.terminal(rf"/<[^<>\/\n\" ][^<>\n\" ]{{0,63}}>/{but}")
        return f"{literal(self._form.mark)} {name}"

    def _free_end(self) -> str:
        """Return a terminal for the tag behind a member that the schema does not name."""
        return self._rules.terminal(rf"/<\/[^<>\n\" ]{{1,64}}>/ & ~/{escaped(f'</{self._form.last}>')}/")


# Calls that name a function in a tag, with tags around each argument's value, which is plain text.
#
# Qwen3-Coder and Qwen 3.5  <tool_call><function=NAME><parameter=KEY>, the value on lines of its own, and </parameter>
# Seed-OSS                  <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
# MiniMax M2                <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>, and
#                           further calls up to </minimax:tool_call>
# MiniMax M3                ]<]minimax[>[ before each tag: <tool_call><invoke name="NAME"><KEY>VALUE</KEY></invoke>, and
#                           further calls up to </tool_call>. nested_tags.py reads and constrains the arguments
#
# A value is a string, unless the tool's schema says that it is something else.


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
    form: TagForm | Nested
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


def _form(section_end: str, key: tuple[str, str], function_end: str, *, line: bool = False) -> TagForm:
    return TagForm(key, "", Tags("</parameter>", line=line, cut=(function_end, section_end)), function_end, '"\\n"')


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


def read_functions(source: Source, calls: ReadCalls, marker: str, *, functions: Functions) -> Steps[Found]:
    """Read a call, or a section of calls."""
    read_call = partial(_read_call, functions=functions)
    read_next = partial(read_behind, opening=functions.function[0], read=read_call)
    found = yield from (read_next if marker == functions.section[0] else read_call)(source, calls)
    if functions.several:
        yield from calls.further(found, read_next)
    yield from calls.close_section(found, functions.section[1])
    return found


def _read_call(source: Source, calls: ReadCalls, functions: Functions) -> Steps[Found]:
    """Read one call behind the beginning of its tag."""
    name = yield from source.word({"<", ">", "\n", functions.function[1][0]})
    if name is None or not name.strip() or not (yield from source.literal(functions.function[1])):
        return Found.NOTHING
    if name.strip() not in calls.tools:
        yield from skip_call(source, functions.form.end)
        return Found.TEXT
    if isinstance(functions.form, Nested):
        yield from read_nested_arguments(source, calls, name.strip(), functions.form)
    else:
        yield from read_arguments(source, calls, name.strip(), functions.form)
    return Found.CALL


def _arguments_rule(rules: Rules, tool: WantedTool, form: TagForm | Nested) -> str:
    if isinstance(form, Nested):
        return nested_arguments_rule(rules, tool, form)
    return arguments_rule(rules, tool, form)


def functions_rules(rules: Rules, tools: Sequence[WantedTool], *, functions: Functions) -> CallGrammar:
    """Write the grammar of calls."""
    end = literal(functions.function[1])
    calls = rules.any_of(
        f"{literal(checked(tool, tool.name))} {end} {_arguments_rule(rules, tool, functions.form)}" for tool in tools
    )
    first = f"{literal(functions.function[0])} {calls}"
    close = f'"\\n" {literal(functions.section[1])}'
    if functions.several:
        return CallGrammar([Section(f'"\\n" {first}', f'"\\n" {first}', close)])
    sections = [Section(f'"\\n" {first} {close}'), Section(f"{calls} {close}")]
    return CallGrammar(sections if functions.alone else sections[:1], between="\n")
