"""Write rules of a grammar in the Lark dialect of llguidance."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import ge, gt, le, lt
from typing import Any, Final

from protocol.answer_formats.schemas import (
    EXACT,
    FORMATS,
    Members,
    Schema,
    branches,
    changed,
    fault,
    looks_around,
    part,
    resolved,
    types,
    types_of_value,
    without_annotations,
)
from protocol.answer_formats.source import BLANKS

_BESIDE_PROPERTIES: Final = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties", "not", "enum", "const")
)
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON as chat templates write it (``tojson``), or without blanks. Models that may write blanks anywhere write them
until the answer is cut."""


class NotOffered(Exception):
    """A tool's schema demands what the format's grammar cannot enforce. The message names the tool and the key."""


@dataclass(frozen=True, slots=True)
class WantedTool:
    """A tool that an answer may call.

    schema   the schema of its arguments, which is a map
    lenient  whether parts of the schema that cannot be enforced are left out; else they are refused
    """

    name: str
    schema: dict[str, Any]
    lenient: bool

    @classmethod
    def of(cls, tool: Mapping[str, Any], *, required: bool) -> "WantedTool":
        """Return a tool as the worker describes it: name, parameters and strict. Raises NotOffered for a schema that
        cannot be read."""
        schema = {key: value for key, value in tool["parameters"].items() if key != "x-guidance"}
        if wrong := fault(schema):
            raise NotOffered(f"tools: {tool['name'][:64]}: {wrong}")
        schema = changed(schema, without_annotations)
        if "object" not in types(schema, schema):
            raise NotOffered(f"tools: {tool['name'][:64]}: the schema allows no object, and arguments are one")
        if "$ref" not in schema:
            schema["type"] = "object"
        if not _BESIDE_PROPERTIES.intersection(schema):
            # A model that may invent arguments invents them. Only a schema that asks for other members gets them.
            schema.setdefault("properties", {})
            schema.setdefault("additionalProperties", False)
        return cls(tool["name"], schema, not (tool["strict"] or required))

    def json(self, schema: Any = None) -> str:
        """Return the expression for a JSON value of a part of the schema; None: of the whole."""
        made = dict(self.schema) if schema is None else part(self.schema, schema)
        made = changed(made, partial(_enforceable, lenient=self.lenient))
        made["x-guidance"] = {**_COMPACT, "lenient": self.lenient, "coerce_one_of": True}
        return f"%json {json.dumps(made, ensure_ascii=False)}"

    def refuse(self, key: str, why: str) -> None:
        """Raise NotOffered for a key of the schema, unless it may be left out."""
        if not self.lenient:
            raise NotOffered(f"tools: {self.name[:64]}: {key[:64]} {why}")


@dataclass(slots=True)
class Rules:
    """Collects rules. Each gets a name of its own."""

    lines: list[str] = field(default_factory=list)

    def rule(self, expression: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Add a terminal, an expression of regular expressions, and return its name."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def lazy(self, expression: str) -> str:
        """Add a rule that ends as soon as it matches."""
        return self.rule(self.terminal(expression), "[lazy]")

    def before(self, expression: str, end: str) -> str:
        """Add a rule for a text that ends with the first ``end``."""
        return self.rule(self.terminal(expression), f"[suffix={literal(end)}]")

    def reserve(self) -> str:
        """Return the name of a rule that ``define`` defines later. So a rule can refer to itself."""
        self.lines.append("")
        return f"r{len(self.lines) - 1}"

    def define(self, name: str, expression: str) -> None:
        """Define a rule whose name is reserved."""
        self.lines[int(name[1:])] = f"{name}: {expression}"

    def any_of(self, expressions: Iterable[str]) -> str:
        """Add a rule that matches one of the expressions."""
        return self.rule(" | ".join(expressions))


@dataclass(frozen=True, slots=True)
class Section:
    """The grammar of a section of calls, behind the marker that begins it.

    first  the first call
    more   a further call; None if the section has one call
    close  what ends the section
    """

    first: str
    more: str | None = None
    close: str = ""

    def calls(self, *, parallel: bool) -> str:
        """Return the expression of the section."""
        more = f" ({self.more})*" if parallel and self.more is not None else ""
        return f"{self.first}{more} {self.close}"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of the calls of a format.

    sections    for each marker with which calls may begin, what follows it. Required calls begin with the first one
    opened      a section that begins the answer, without a marker
    opened_json  the same section as JSON of a schema, for an answer that is JSON of another schema if it is no call
    looks       regular expression of how ``opened`` begins, in all ways that a parser reads
    between     text between two sections that are required
    not_behind  regular expression with which text behind a section may not begin, because a parser takes it for a
                further call
    """

    sections: Sequence[Section]
    opened: Section | None = None
    opened_json: Section | None = None
    looks: str = ""
    between: str = ""
    not_behind: str = ""


def literal(text: str) -> str:
    """Return the expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return the regular expression for a text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def without(*regexes: str) -> str:
    """Return what a terminal needs behind itself so that it holds none of these."""
    return f" & ~/(?s:.*)({'|'.join(regexes)})(?s:.*)/"


def _enforceable(part: dict[str, Any], *, lenient: bool) -> dict[str, Any]:
    """Return a part of a schema as llguidance enforces it."""
    pattern, format = part.get("pattern"), part.get("format")
    if lenient and isinstance(pattern, str) and looks_around(pattern):
        del part["pattern"]
    if format in EXACT and pattern is None:
        del part["format"]
        part["pattern"] = f"^{FORMATS[format]}$"
    return part


# Turn values that a model wrote as plain text into JSON, by the types that the tool's schema allows.


_BOUNDS: Final = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
_WHOLE_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which many chat templates write."""


def text_piece(text: str) -> str:
    """Return the inside of a JSON string for a piece of text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text(root: Schema, schema: Schema) -> bool:
    """Return whether a value can be nothing but a string. Then every text is one, also if it looks like a number."""
    return types(root, schema) <= {"string"}


def to_json(text: str, root: Schema, schema: Schema) -> str:
    """Return the JSON of a value. A text that is no value of the allowed types becomes a string, so nothing is lost.

    A number is written as the model wrote it, with all its digits.
    """
    allowed = types(root, schema)
    if not allowed <= {"string"}:
        bare = text.strip(BLANKS)
        bare = _WORDS.get(bare, bare)
        for candidate in (bare, _from_python(bare)):
            found = None if candidate is None else strict_json(candidate)
            if candidate is None or found is None or not found & (allowed - {"string"}):
                continue
            # Beside strings, "7" is a number only if the schema allows this number: an enum may hold the text "7".
            if "string" not in allowed or _allows(root, schema, json.loads(candidate)):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def _allows(root: Schema, schema: Schema, value: Any) -> bool:
    """Return whether one of a schema's alternatives allows a value, as far as types, lists and bounds say it."""
    return any(_fits(root, branch, value) for branch in branches(root, schema))


def _fits(root: Schema, branch: Schema, value: Any) -> bool:
    if isinstance(branch, bool) or not types_of_value(value) & types(root, branch):
        return branch is True
    listed = branch.get("enum", [branch["const"]] if "const" in branch else None)
    if listed is not None and not any(
        each == value and isinstance(each, bool) == isinstance(value, bool) for each in listed
    ):
        return False
    return not isinstance(value, int | float) or all(
        compare(value, branch[key]) for key, compare in _BOUNDS.items() if key in branch
    )


def strict_json(text: str) -> frozenset[str] | None:
    """Return the types of the value of a JSON text; None if the text is no JSON."""
    try:
        return types_of_value(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def open_in_string(text: str) -> bool:
    """Return whether a text ends within a JSON string."""
    return _WHOLE_STRING.sub("", text).count('"') > 0


def is_python(text: str) -> bool:
    """Return whether a text is a Python list or dict."""
    return _from_python(text) is not None


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _from_python(text: str) -> str | None:
    """Return the JSON of a Python list or dict; None if the text is none."""
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


# Rules for the members of an object, for formats that write an object in a way of their own.


_NOT_WRITTEN: Final = (
    "anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
    "patternProperties", "propertyNames", "minProperties", "maxProperties",
)  # fmt: skip
"""Keys of a schema that say more about an object than what its members are."""
_NOT_OF_LISTS: Final = ("prefixItems", "uniqueItems", "contains", "additionalItems", "unevaluatedItems")


def members_of(tool: WantedTool, schema: Schema | None = None) -> Members:
    """Return the members of an object; None: of the tool's arguments. Raises NotOffered."""
    whole = resolved(tool.schema, tool.schema if schema is None else schema)
    if not isinstance(whole, bool):
        for key in _NOT_WRITTEN:
            if key in whole and whole[key] != []:
                tool.refuse(key, "of an object is not offered in the format in which this model writes calls")
    return Members.of(tool.schema, whole)


def items_of(tool: WantedTool, key: str, schema: Mapping[str, Any]) -> tuple[Schema, int, int | None]:
    """Return (the schema of the items, the least number of items, the greatest one) of a list; None for no limit.
    Raises NotOffered."""
    for name in _NOT_OF_LISTS:
        if schema.get(name):
            tool.refuse(key, f"has {name}, which is not offered in this model's format")
    most = schema.get("maxItems")
    return schema.get("items", True), int(schema.get("minItems", 0)), None if most is None else int(most)


def members_rule(
    rules: Rules, tool: WantedTool, member: Callable[[str, Schema], str], separator: str, free: Callable[[Schema], str]
) -> str:
    """Add a rule for the members of the tool's arguments, in the schema's order, and return its name.

    member     returns the expression of one member
    separator  stands between two members
    free       returns the expression of a member whose key the schema does not name. Such members are written only
               if the schema names none
    """
    members = members_of(tool)
    if members.other is not None and not members.named:
        one = rules.rule(free(members.other))
        return rules.rule(f"({one} ({literal(separator)} {one})*)?")
    named = [(member(key, schema), must) for key, schema, must in members.named]
    return in_order(rules, named, separator)


def in_order(rules: Rules, named: list[tuple[str, bool]], separator: str) -> str:
    """Add a rule for expressions that come in this order, and return its name. Some of them may be left out."""
    text = literal(separator)
    # ``behind`` is the rule for the rest if something stands before it, ``first`` the one if nothing does.
    behind = first = rules.rule('""')
    for expression, must in reversed(named):
        one = rules.rule(expression)
        first, behind = (
            rules.rule(f"{one} {behind}" if must else f"{one} {behind} | {first}"),
            rules.rule(f"{text} {one} {behind}" if must else f"({text} {one})? {behind}"),
        )
    return first
