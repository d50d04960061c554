"""Answers in the Hermes format: the parts do not depend on how the text was cut, and nothing is lost or doubled."""

import json
import random

import pytest

from protocol.answer_formats.parser import AnswerParser, MarkerPair
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning, Text, Tool

THINK = MarkerPair("<think>", "</think>")
TOOLS = (Tool("get_weather", {}), Tool("get_time", {}))
ARGUMENTS = '{"city": "Łódź \\"}</tool_call>", "n": [1, {"a": 2}]}'
WEATHER = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CITY = {"city": 'Łódź "}</tool_call>', "n": [1, {"a": 2}]}
ODD = '<tool_call>{"arguments": {"x": 1}, "name": "get_time"}</tool_call>'

CASES = [
    ("Hello <b>you</b>, 1 < 2.\n", False, [("text", "Hello <b>you</b>, 1 < 2.\n")]),
    ("", False, []),
    (f"I look.\n\n{WEATHER}\n{TIME}", False, [("text", "I look."), ("get_weather", CITY), ("get_time", {})]),
    (f"<think>\nwell\n</think>\n\n{TIME}", False, [("reasoning", "well"), ("get_time", {})]),
    ("so\n</think>\n\nYes.", True, [("reasoning", "so"), ("text", "Yes.")]),
    ("cut in the reasoning ", True, [("reasoning", "cut in the reasoning ")]),
    (f"{ODD} and more", False, [("get_time", {"x": 1}), ("text", "and more")]),
    ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', False,
     [("text", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>')]),
    ("<tool_call>no JSON</tool_call>", False, [("text", "<tool_call>no JSON</tool_call>")]),
    ('<tool_call>\n{"name": "get_time"', False, [("text", '<tool_call>\n{"name": "get_time"')]),
    ("a <tool_cal", False, [("text", "a <tool_cal")]),
]  # fmt: skip


def put_together(parts: list[Part]) -> list[tuple[str, object]]:
    """Return neighbouring parts of a kind as one. Check the order of the parts of calls."""
    found: list[tuple[str, object]] = []
    calls = 0
    arguments: str | None = None
    for part in parts:
        if isinstance(part, CallStart):
            assert arguments is None
            assert part.index == calls
            found.append((part.name, ""))
            arguments = ""
        elif isinstance(part, CallArguments):
            assert arguments is not None
            assert part.index == calls
            assert part.json
            arguments += part.json
        elif isinstance(part, CallEnd):
            assert arguments is not None
            assert part.index == calls
            found[-1] = (found[-1][0], json.loads(arguments))
            calls, arguments = calls + 1, None
        else:
            kind = "text" if isinstance(part, Text) else "reasoning"
            assert part.text
            assert isinstance(part, Text | Reasoning)
            if found and found[-1][0] == kind:
                found[-1] = (kind, str(found[-1][1]) + part.text)
            else:
                found.append((kind, part.text))
    return found


def parsed(pieces: list[str], inside: bool) -> list[tuple[str, object]]:
    parser = AnswerParser(tool_format="hermes", tools=TOOLS, reasoning=THINK, inside_reasoning=inside)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return put_together([*parts, *parser.finish()])


@pytest.mark.parametrize(("text", "inside", "meant"), CASES)
def test_every_way_to_cut_an_answer(text: str, inside: bool, meant: list[tuple[str, object]]) -> None:
    assert parsed([text], inside) == meant
    assert parsed(list(text), inside) == meant
    for at in range(len(text)):
        assert parsed([text[:at], text[at:]], inside) == meant, text[:at]
    rng = random.Random(1)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 6))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(pieces, inside) == meant, pieces


def test_arguments_that_are_cut_off_are_told_as_they_are() -> None:
    parser = AnswerParser(tool_format="hermes", tools=TOOLS)
    parts = [*parser.feed('<tool_call>{"name": "get_time", "arguments": {"zone": "Eur'), *parser.finish()]
    assert parts == [CallStart(0, "get_time"), CallArguments(0, '{"zone": "Eur'), CallEnd(0)]


def test_arguments_come_in_pieces() -> None:
    parser = AnswerParser(tool_format="hermes", tools=TOOLS)
    pieces = [len(parser.feed(character)) for character in WEATHER]
    assert sum(pieces) > 30


def test_without_tools_a_call_is_text() -> None:
    parser = AnswerParser(tool_format="hermes")
    assert [*parser.feed(TIME), *parser.finish()] == [Text(TIME)]
