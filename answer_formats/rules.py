"""Write rules of a grammar in the Lark dialect of llguidance."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from answer_formats.schemas import changed, fault, part, types, without_annotations
from answer_formats.string_regexes import EXACT, FORMATS, looks_around

_BESIDE_PROPERTIES: Final = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties", "not", "enum", "const")
)
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON as chat templates write it (``tojson``), or without blanks. Models that may write blanks anywhere write them
until the answer is cut."""


class NotOffered(Exception):
    """A tool's schema demands what the format's grammar cannot enforce. The message names the tool and the key."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tool that an answer may call.

    schema   the schema of its arguments, which is a map
    lenient  whether parts of the schema that cannot be enforced are left out; else they are refused
    """

    name: str
    schema: dict[str, Any]
    lenient: bool

    @classmethod
    def of(cls, tool: Mapping[str, Any], *, required: bool) -> "Wanted":
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
class Shape:
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
