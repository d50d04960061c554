"""Calls for models whose chat template knows no tools: plain JSON, {"name": NAME, "arguments": {...}}.

The tools stand in the system message (``tools_text``). A call is the whole answer, or begins it, or stands in a
Markdown fence. Further calls follow on lines of their own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from answer_formats.calls import Calls, Found
from answer_formats.json_calls import behind, read_object
from answer_formats.json_rules import looks_opened, objects, opened, opened_json
from answer_formats.rules import Rules, Section, Shape, Wanted
from answer_formats.source import Source, Steps

OPENING: Final = "{"
_FENCE: Final = "```"
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


def read(source: Source, calls: Calls, marker: str) -> Steps[Found]:
    """Read calls at the beginning of an answer, or in a fence."""
    if marker:
        source.at -= len(marker) - marker.index("{")
    found = yield from read_object(source, calls, name_first=not marker)
    if found is Found.CALL:
        while (yield from calls.further(behind(""))):
            pass
    if marker and found is not Found.NOTHING:
        yield from source.blanks()
        yield from source.closing(_FENCE)
    return found


def rules(rules: Rules, tools: Sequence[Wanted]) -> Shape:
    """Write the grammar of calls."""
    more = f"/\\n/ {objects(rules, tools, 'arguments')}"
    rest = objects(rules, tools, "arguments", begun=True)
    return Shape(
        [Section(rest, more, f'"\\n{_FENCE}"')] * len(BEGINS),
        opened=Section(opened(rules, tools, "arguments"), more),
        opened_json=Section(opened_json(rules, tools, "arguments"), more),
        looks=looks_opened(tools),
        not_behind=r"[ \t\r\n]*\{",
    )
