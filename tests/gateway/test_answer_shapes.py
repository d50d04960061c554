"""Answers in the shapes of Anthropic's API and of the Responses API."""

from typing import Any

import orjson
import pytest

from gateway.answering import TOOL_CALLS, ParsedAnswer, Piece
from gateway.anthropic.blocks import MessageEvents, Thinking, reasoning_in, stop_of, usage_of, whole_message
from gateway.http.errors import ApiError
from gateway.responses import answers
from gateway.responses.answers import ResponseEvents
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning, Text

USAGE = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3, "reasoning_tokens": 2}
CALL: list[Part] = [CallStart(0, "look", None), CallArguments(0, '{"at": '), CallArguments(0, "1}"), CallEnd(0)]


def answer(parts: list[Part], reason: str = "stop") -> ParsedAnswer:
    parsed = ParsedAnswer()
    parsed.add(Piece(0, parts, (), reason))
    return parsed


def message(parts: list[Part], *, thinking: Thinking = "shown") -> list[Any]:
    """Return the content of a message of Anthropic's API."""
    shown = whole_message("msg_1", "m", answer(parts), {}, usage_of({}), thinking=thinking)
    content: list[Any] = shown["content"]
    return content


@pytest.mark.parametrize(
    ("reason", "found", "cut", "stop"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", None, True, ("end_turn", None)),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
        (TOOL_CALLS, None, True, ("tool_use", None)),
        ("banned_strings", None, False, ("refusal", None)),
        ("loop", None, False, ("end_turn", None)),
    ],
)
def test_the_reason_of_anthropics_api(reason: str, found: str | None, cut: bool, stop: tuple[str, str | None]) -> None:
    assert tuple(stop_of(reason, found, cut=cut).values()) == stop


def test_an_answer_that_somebody_else_cancelled_is_an_error_in_each_api() -> None:
    with pytest.raises(ApiError, match="an operator cancelled"):
        stop_of("cancelled", None, cut=False)
    with pytest.raises(ApiError, match="an operator cancelled"):
        ResponseEvents(answers.ResponseObject("m", {}), lambda item: None).finish("cancelled", {})


def test_half_a_character_in_the_arguments_of_a_call_is_replaced() -> None:
    """Its escape is JSON that a model may write. As a value it would be no text, and the call would be lost."""
    half = CallArguments(0, '{"at": "\\ud800!", "on": "\\ud83d\\ude00"}')
    (call,) = message([CallStart(0, "look", None), half, CallEnd(0)])
    assert call["input"] == {"at": "?!", "on": "\U0001f600"}
    orjson.dumps(call)


def test_the_counts_of_tokens() -> None:
    assert usage_of(USAGE) == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert answers.usage_of(USAGE) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }


def test_the_blocks_of_a_whole_message() -> None:
    thinking, text, call = message([Reasoning("hm"), Text("a"), Text("b"), *CALL])
    assert (thinking["type"], thinking["thinking"], reasoning_in(thinking["signature"])) == ("thinking", "hm", "")
    assert text == {"type": "text", "text": "ab"}
    assert call == {"type": "tool_use", "id": call["id"], "name": "look", "input": {"at": 1}}
    assert call["id"].startswith("toolu_")
    (omitted,) = message([Reasoning("hm")], thinking="signed")
    assert (omitted["thinking"], reasoning_in(omitted["signature"])) == ("", "hm")
    assert message([Reasoning("hm")], thinking="none") == []
    assert message([CallStart(0, "look", "own id"), CallEnd(0)]) == [
        {"type": "tool_use", "id": "own id", "name": "look", "input": {}}
    ]


def test_a_call_that_was_cut_is_nothing_that_a_client_may_run() -> None:
    assert message([Text("a"), *CALL[:2], CallEnd(0)]) == [{"type": "text", "text": "a"}]
    whole = answers.ResponseObject("m", {}).whole(answer([*CALL[:2], CallEnd(0)], "length"), USAGE)
    (item,) = whole["output"]
    assert (whole["status"], item["status"], item["arguments"]) == ("incomplete", "incomplete", '{"at": ')


def test_events_that_keep_a_stream_open_come_before_and_between_the_others() -> None:
    events = MessageEvents("msg_1", "m", thinking="shown")
    first = events.silence()
    assert first.startswith(b"event: message_start\n")
    assert events.silence() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert b"message_start" not in events.parts([Text("a")])
    response = ResponseEvents(answers.ResponseObject("m", {}), lambda item: None)
    assert response.silence().startswith(b"event: response.created\n")
    assert response.silence().startswith(b'event: response.in_progress\ndata: {"type":"response.in_progress","seq')
    assert b"response.created" not in response.parts([Text("a")])
