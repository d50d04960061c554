"""Answers in Harmony, the format of gpt-oss: messages with headers, of which no reader of the answer sees anything."""

import pytest

from protocol.answer_formats.families import ALL_MARKERS, FAMILIES, reasoning_tokens
from protocol.answer_formats.parser import MarkerPair
from tests.answer_formats.answers import EMPTY, RECEIVER_FIRST, SIMPLE, WRITERS
from tests.answer_formats.splitting import check_divisions

MARKERS = MarkerPair("<|channel|>analysis<|message|>", "<|end|>")
THOUGHT = "<|channel|>analysis<|message|>hm <x>.<|end|>"
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WRITE = WRITERS["harmony"][1]


@pytest.mark.parametrize("tools", [True, False])
def test_reasoning_and_text(tools: bool) -> None:
    for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        for end in ("", "<|return|>", "<|end|>"):
            text = f"{THOUGHT}{START}{header}Hello <b> to=x.{end}"
            meant: list[tuple[str, object]] = [("reasoning", "hm <x>."), ("text", "Hello <b> to=x.")]
            check_divisions("harmony", text, meant, markers=MARKERS, tools=tools)
            check_divisions("harmony", f"{header}Hello.{end}", [("text", "Hello.")], markers=MARKERS, tools=tools)


def test_a_preamble_and_several_messages_of_reasoning() -> None:
    text = f"{THOUGHT}{START}<|channel|>commentary<|message|>I look.<|end|>{START}{THOUGHT}{START}{WRITE([SIMPLE])}"
    check_divisions(
        "harmony",
        text,
        [("reasoning", "hm <x>."), ("text", "I look."), ("reasoning", "hm <x>."), SIMPLE],
        markers=MARKERS,
    )
    text = f"<|channel|>commentary<|message|>I look.<|end|>{START}{FINAL}Done."
    check_divisions("harmony", text, [("text", "I look.\n\nDone.")], markers=MARKERS)


def test_calls_with_the_receiver_before_the_channel() -> None:
    check_divisions("harmony", RECEIVER_FIRST([SIMPLE, EMPTY]), [SIMPLE, EMPTY], markers=MARKERS)
    first = RECEIVER_FIRST([SIMPLE]).removeprefix(START)
    check_divisions("harmony", first, [SIMPLE], markers=MARKERS)
    check_divisions(
        "harmony", f"{THOUGHT}{RECEIVER_FIRST([SIMPLE])}", [("reasoning", "hm <x>."), SIMPLE], markers=MARKERS
    )
    text = first.replace("get_weather", "rm")
    check_divisions("harmony", text, [("text", text.lstrip())], markers=MARKERS)
    check_divisions("harmony", "to=functions. is a text", [("text", "to=functions. is a text")], markers=MARKERS)


def test_its_tokens_are_known() -> None:
    tokens = reasoning_tokens(("<|channel|>analysis<|message|>", "<|end|>"))
    assert tokens == ("<|channel|>", "<|message|>", "<|end|>")
    assert {*tokens, "<|start|>", "<|constrain|>"} <= ALL_MARKERS
    assert FAMILIES["harmony"].ends == ("<|call|>", "<|return|>")


def test_other_formats_have_headers_too() -> None:
    check_divisions("command_r7b", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", [("text", "Hello.")])
    check_divisions(
        "apriel", "hm</think>\nHello.\n[END FINAL RESPONSE]", [("reasoning", "hm"), ("text", "Hello.")], inside=True
    )
