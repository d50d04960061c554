"""Read and constrain arguments that stand between tags: a key, then its value as plain text."""

import json
from dataclasses import dataclass

from answer_formats.calls import Calls
from answer_formats.members import in_order, members_of
from answer_formats.raw_rules import value_rule
from answer_formats.raw_values import Tags, read_value
from answer_formats.rules import NotOffered, Rules, Wanted, escaped, literal
from answer_formats.schemas import Members, Schema
from answer_formats.source import Source, Steps, ignore


@dataclass(frozen=True, slots=True)
class Form:
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


def read_arguments(source: Source, calls: Calls, name: str, form: Form) -> Steps[None]:
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


def arguments_rule(rules: Rules, tool: Wanted, form: Form) -> str:
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


def _member(rules: Rules, tool: Wanted, name: str, key: str, schema: Schema, form: Form) -> str:
    value = f"{form.line} {literal(form.value)} " if form.value else ""
    return f"{form.line} {key} {value}{value_rule(rules, tool, name, schema, form.tags)}"


def checked(tool: Wanted, text: str) -> str:
    """Return a name or a key. Raises NotOffered if the format cannot write it."""
    if not text or text != text.strip() or any(c in text for c in ("<", ">", "\n", '"')) or len(text) > 200:
        raise NotOffered(
            f"tools: {tool.name[:64]}: {text[:64]!r} cannot be written in the format in which this model writes calls"
        )
    return text
