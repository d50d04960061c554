"""Answers of all families: the parts do not depend on how the text was divided, and nothing is lost or doubled."""

import json
from typing import Any

import pytest

from protocol.answer_formats.parser import AnswerParser
from protocol.answer_formats.source import CallArguments, Tool
from tests.answer_formats.answers import (
    EMPTY,
    LINES,
    NESTED,
    NUMBER,
    SIMPLE,
    WRITERS,
    Call,
    bare,
    markers_in_a_string,
)
from tests.answer_formats.splitting import EVERY, check_divisions, parsed

ways = pytest.mark.parametrize("way", WRITERS)


def written(way: str, *calls: Call) -> tuple[str, str]:
    format, write = WRITERS[way]
    return format, write(calls)


@ways
@pytest.mark.parametrize("call", [SIMPLE, NESTED, EMPTY, LINES, NUMBER])
def test_one_call(way: str, call: Call) -> None:
    format, text = written(way, call)
    check_divisions(format, text, [call], every=EVERY or call is EMPTY)


@ways
def test_markers_in_a_string(way: str) -> None:
    call = markers_in_a_string(WRITERS[way][0])
    format, text = written(way, call)
    check_divisions(format, text, [call])


@ways
def test_several_calls(way: str) -> None:
    format, text = written(way, EMPTY, SIMPLE, EMPTY)
    check_divisions(format, text, [EMPTY, SIMPLE, EMPTY])


@ways
def test_text_around_a_call(way: str) -> None:
    format, text = written(way, EMPTY)
    check_divisions(format, f"I <b>look</b> [up].\n\n{text}\n Done {{x}}. ", [
        ("text", "I <b>look</b> [up]."), EMPTY, ("text", "Done {x}. "),
    ])  # fmt: skip


@ways
def test_reasoning_before_a_call(way: str) -> None:
    format, text = written(way, EMPTY)
    check_divisions(format, f"\nhm <x>\n</think>\n\n{text}", [("reasoning", "hm <x>"), EMPTY], inside=True)
    check_divisions(format, f"<think>\nhm\n</think>\n\nso\n{text}", [("reasoning", "hm"), ("text", "so"), EMPTY])


def test_an_answer_that_begins_behind_the_reasoning() -> None:
    """A model may write the end marker alone if it does not reason."""
    check_divisions("hermes", "</think>Well. </think>", [("text", "Well. </think>")])
    check_divisions("json", '\n</think>\n{"name": "get_time", "arguments": {}}', [EMPTY])


@ways
def test_drafts_within_the_reasoning_are_reasoning(way: str) -> None:
    format, text = written(way, EMPTY)
    check_divisions(format, f"a {text} b</think>{text}", [("reasoning", f"a {text} b"), EMPTY], inside=True)


@ways
def test_calls_end_a_reasoning_that_has_not_ended(way: str) -> None:
    format, text = written(way, EMPTY, SIMPLE)
    check_divisions(format, f"a\n{text}\n", [("reasoning", "a"), EMPTY, SIMPLE], inside=True)


@ways
def test_a_call_of_an_unknown_tool_is_text(way: str) -> None:
    format, text = written(way, ("rm", {"path": "x", "n": 1}))
    check_divisions(format, f"a \n{text} b", [("text", f"a \n{text} b")])


@ways
def test_every_beginning_of_an_answer(way: str) -> None:
    """An answer that was cut has the beginning of the parts. No text is lost in front of the call."""
    format, text = written(way, SIMPLE)
    whole = f"Well. {text}"
    for size in range(len(whole)):
        cut = whole[:size]
        found = parsed(format, list(cut))
        assert found == parsed(format, [cut])
        if [kind for kind, _ in found] in (["text"], []):
            assert "".join(str(part) for _, part in found) == cut
        else:
            assert found[0] == ("text", "Well.")
            assert found[1][0] == "get_weather"
            assert len(found) == 2 or (len(found) == 3 and cut.endswith(str(found[2][1]))), found


@pytest.mark.parametrize("way", [way for way in WRITERS if way != "harmony"])
def test_without_tools_calls_are_text(way: str) -> None:
    format, text = written(way, SIMPLE, EMPTY)
    assert parsed(format, list(text), tools=False) == [("text", text)]


@pytest.mark.parametrize("format", ["llama3", "gemma3", "json"])
def test_a_call_without_a_marker(format: str) -> None:
    write = bare(format)
    assert write is not None
    check_divisions(format, write([SIMPLE]), [SIMPLE])
    check_divisions(format, f"\n {write([EMPTY])} so", [EMPTY, ("text", "so")])
    check_divisions(format, f"hm</think>\n{write([EMPTY])}", [("reasoning", "hm"), EMPTY], inside=True)
    for text in (
        f"So: {write([EMPTY])}", '{"name": "Ada", "age": 36}', '{"a": 1}', "{", '{"name"', write([("rm", {"a": "b"})]),
    ):  # fmt: skip
        check_divisions(format, text, [("text", text)])


@ways
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": None, "properties": None},
        {"properties": {"city": None, "days": {"type": "INTEGER", "enum": None}}},
        {"properties": {"city": {"type": [None, {}]}, "days": {"minimum": "0", "type": ["string", "integer"]}}},
        {"properties": {"city": {"anyOf": 7}, "days": {"$ref": "#/$defs/0"}}, "required": ["x"]},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_cannot_be_read_hinders_no_call(way: str, schema: dict[str, Any]) -> None:
    """The gateway parses calls of tools whose schemas the worker does not enforce."""
    format, text = written(way, SIMPLE)
    parser = AnswerParser(tool_format=format, tools=[Tool("get_weather", schema)])
    parts = parser.feed(text) + parser.finish()
    assert json.loads("".join(part.json for part in parts if isinstance(part, CallArguments))) == SIMPLE[1]
