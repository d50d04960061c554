"""Grammars for calls of tools, in the Lark dialect of llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = '%llguidance { "no_forcing": true }\n'
"""Text that must come next is drawn like any other, so the model chooses the tokens that spell it."""


def grammar(format: str, tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool) -> str:
    """Return the grammar of an answer behind its reasoning.

    tools     maps with name, parameters (a JSON schema) and strict. Parts of a schema that cannot be enforced are
              refused if it is strict, and else ignored
    required  whether the answer consists of calls. If not, it is text, then calls or none
    parallel  whether there may be more than one call
    """
    assert format == "hermes"
    more = '("\\n" call)*' if parallel else ""
    if required:
        start = f"start: call {more}"
    else:
        # ``before`` ends as soon as a call begins, so that no text can hide one.
        start = "\n".join(
            (
                f"start: (before rest {more})? tail?" if not parallel else "start: (before rest)* tail?",
                'before[suffix="<tool_call>"]: /(?s:.*)/',
                "tail: TAIL",
                "TAIL: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/",
            )
        )
    lines = [start, 'call: "<tool_call>" rest', 'rest: "\\n" object "\\n</tool_call>"']
    lines.append("object: " + " | ".join(f"tool{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
        lines.append(f'tool{number}: {_literal(head)} %json {_schema(tool)} "}}"')
    return _HEAD + "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Mapping[str, Any]) -> str:
    schema = dict(tool["parameters"])
    schema.setdefault("type", "object")
    if "properties" not in schema and "$ref" not in schema:
        schema.setdefault("properties", {})
    schema["x-guidance"] = {"whitespace_flexible": False, "lenient": not tool["strict"], "coerce_one_of": True}
    return json.dumps(schema, ensure_ascii=False)
