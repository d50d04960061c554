"""Grammars for calls of tools, in the Lark dialect of llguidance."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from protocol.answer_formats.families import FAMILIES
from protocol.answer_formats.rules import NotOffered, Rules, WantedTool, escaped, literal, without

__all__ = ["NotOffered", "grammar"]

_HEAD: Final = '%llguidance { "no_forcing": true }\n'
"""Text that must come next is drawn like any other, so the model chooses the tokens that spell it."""


def grammar(
    format: str, tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool, text: str | None = None
) -> str:
    """Return the grammar of an answer behind its reasoning. Raises NotOffered.

    tools     maps with name, parameters (a JSON schema) and strict. Parts of a schema that cannot be enforced are
              refused if the tool is strict or a call is required, and else ignored
    required  whether the answer consists of calls. If not, it is text, then calls or none
    parallel  whether there may be more than one call
    text      the expression of an answer without calls: of JSON, or a regular expression. With it, no text stands
              beside calls. None for any text
    """
    family = FAMILIES[format]
    rules = Rules()
    lead, head = (f"{literal(family.lead)}?" if family.lead else "", literal(family.head) if family.head else "")
    if text is not None and not tools:
        return _whole(rules, f"{lead} {head} {text}")
    wanted = [WantedTool.of(tool, required=required) for tool in tools]
    shape = family.rules(rules, wanted)
    sections = [section.calls(parallel=parallel) for section in shape.sections]
    if required or text is not None:
        usual = [f"{lead} {literal(begin)} {section}" for begin, section in zip(family.begins, sections, strict=True)]
        further = rules.any_of(usual[:1] if required or lead else usual)
        first = [further]
        if shape.opened is not None:
            # llguidance takes the longest lexeme. One that begins as JSON does would hide a text that is JSON.
            first.append((shape.opened if text is None else shape.opened_json or shape.opened).calls(parallel=parallel))
        is_apart = all(section.more is None for section in shape.sections)
        again = f"({literal(shape.between)} {further})*" if parallel and is_apart else ""
        calls = f"{rules.any_of(first)} {again}"
        if required or text is None:
            return _whole(rules, calls)
        if text.startswith("/"):
            # A text that begins like a call would hide the call.
            text = rules.terminal(f"{text} & ~/({'|'.join(map(escaped, family.begins))})(?s:.*)/")
        return _whole(rules, f"{calls} | {lead} {head} {text}")
    begins = [escaped(begin) for begin in family.begins]
    behind = f" & ~/{shape.not_behind}(?s:.*)/" if shape.not_behind else ""
    later, tail = _texts(rules, begins, sections, behind)
    earliest, last = later, tail
    if shape.opened is not None:
        # The beginning of a text must not look like a call without being one.
        earliest, last = _texts(rules, begins, sections, f" & ~/{shape.looks}(?s:.*)/")
        earliest = [*earliest, shape.opened.calls(parallel=parallel)]
    again = f"({' | '.join(later)})*" if parallel else ""
    return _whole(rules, f"({' | '.join(earliest)}) {again} {tail}? | {last}?")


def _texts(rules: Rules, begins: Sequence[str], sections: Sequence[str], but: str) -> tuple[list[str], str]:
    """Return expressions for text that ends where a call begins, with the call, and a rule for text without a call. So
    no text can hide a call.

    but  what the text must not be

    The rules are lazy: llguidance ends each text at the first marker, also if another rule could go on.
    """
    before = [
        f"{rules.lazy(f'/(?s:.*){begin}/{but}')} {section}" for begin, section in zip(begins, sections, strict=True)
    ]
    return before, rules.rule(rules.terminal(f"/(?s:.+)/{without(*begins)}{but}"))


def _whole(rules: Rules, start: str) -> str:
    return _HEAD + "\n".join((f"start: {start}", *rules.lines))
