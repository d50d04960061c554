"""Tools and calls as text, for models whose chat template knows no tools."""

import json

from protocol.answer_formats.json_formats import calls_text, result_text, tools_text
from tests.answer_formats.answers import EMPTY, SIMPLE
from tests.answer_formats.splitting import check_divisions

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Say ü.\nNow.", "parameters": {"type": "object"}, "strict": True},
}


def test_tools_are_one_line_each() -> None:
    lines = tools_text([TOOL, {"function": {"name": "g"}}]).splitlines()
    assert [json.loads(line) for line in lines[1:3]] == [
        {"name": "f", "description": "Say ü.\nNow.", "parameters": {"type": "object"}},
        {"name": "g"},
    ]
    assert "ü" in lines[1]


def test_calls_of_the_history_are_written_as_the_model_writes_them() -> None:
    calls = [SIMPLE, EMPTY]
    check_divisions("json", calls_text(calls), calls)
    assert json.loads(calls_text([("f", '{"cut')])) == {"name": "f", "arguments": '{"cut'}
    assert result_text("f", "a\nb") == "Result of f:\na\nb"
    assert result_text(None, "") == "Result of the tool:\n"


def test_calls_as_models_print_them() -> None:
    pretty = json.dumps({"name": SIMPLE[0], "arguments": SIMPLE[1]}, indent=2, ensure_ascii=False)
    for text in (pretty, f"```json\n{pretty}\n```", f"```\n{pretty}\n```"):
        check_divisions("json", text, [SIMPLE])
    check_divisions("json", f"I call:\n```json\n{pretty}\n```\nSo.", [("text", "I call:"), SIMPLE, ("text", "So.")])
    for text in ('```json\n{"name": "Ada"}\n```', '```\n{"a": 1}\n```', '{"name": "get_time"', '{"arguments": {}}'):
        check_divisions("json", text, [("text", text)])
