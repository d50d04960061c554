"""Read and constrain arguments whose objects and lists are tags within tags, each tag behind a mark.

MiniMax M3 writes {"at": {"zip": 7}, "tags": ["a"]} so, with its mark before each "<":
<at><zip>7</zip></at><tags><item>a</item></tags>

A value without tags is plain text. It is a string, unless the tool's schema says that it is something else. A value
with nothing in it is a string, an object, a list or null: the first of these that the schema allows.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from answer_formats.calls import Calls
from answer_formats.members import in_order, items_of, members_of
from answer_formats.raw_rules import value_rule
from answer_formats.raw_values import Tags
from answer_formats.rules import NotOffered, Rules, Wanted, escaped, literal
from answer_formats.schemas import Members, Schema, branches, types
from answer_formats.source import BLANKS, DEEPEST, Source, Steps, Tell
from answer_formats.tagged import checked
from answer_formats.values import text_piece, to_json

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


def read_arguments(source: Source, calls: Calls, name: str, form: Nested) -> Steps[None]:
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


def arguments_rule(rules: Rules, tool: Wanted, form: Nested) -> str:
    """Add a rule for a tool's arguments, up to the end tag, and return its name. Raises NotOffered."""
    made = _ValueRules(rules, tool, form).members(tool.schema, frozenset({"object"}))
    return rules.rule(f"({made}) {literal(form.mark)} {literal(f'</{form.last}>')}")


class _ValueRules:
    """Writes the rules of one tool's values, each with the mark of the tag behind it.

    llguidance takes the longest lexeme. So the mark is always a lexeme of its own: what follows it tells whether a
    value goes on.
    A schema that refers to itself becomes a rule that refers to itself.
    """

    def __init__(self, rules: Rules, tool: Wanted, form: Nested) -> None:
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
