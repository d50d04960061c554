"""Requests are refused by naming field, value and limit, and without repeating anybody's text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError
from protocol.request import GenerateRequest, parse_generate

SECRET = "the secret of the prompt"
NAN, INF = float("nan"), float("inf")


def refusal(fields: dict[Any, Any]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        parse_generate(pack_body(fields))
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert SECRET not in str(refused.value)
    assert len(str(refused.value)) < 400
    return refused.value


def test_defaults_are_neutral() -> None:
    request = parse_generate(pack_body({"prompt": "x"}))
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1, 0, 1, 0)
    assert (request.repetition_penalty, request.frequency_penalty, request.presence_penalty) == (1, 0, 0)
    assert (request.seed, request.max_tokens, request.stop) == (None, None, ())


def test_what_is_asked_for_is_kept() -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stop": ["a", "b"], "temperature": 0}
    request = parse_generate(pack_body(fields))
    assert request.messages is not None
    assert (request.messages[0].role, request.messages[0].content) == ("user", "hi")
    assert (request.max_tokens, request.stop, request.greedy) == (5, ("a", "b"), True)
    assert parse_generate(pack_body({"token_ids": b"\1\0\0\0"})).token_ids == b"\1\0\0\0"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens is 0: must be at least 1"),
        ("max_tokens", -1, "max_tokens is -1: must be at least 1"),
        ("max_tokens", 1.5, "max_tokens is 1.5: must be a whole number from 1 to 2147483648"),
        ("max_tokens", True, "max_tokens is True: must be a whole number from 1 to 2147483648"),
        ("max_tokens", SECRET, "max_tokens is a string of 24 characters: must be a whole number from 1 to 2147483648"),
        ("max_tokens", 1 << 40, "max_tokens is 1099511627776: must be at most 2147483648"),
        ("temperature", NAN, "temperature is nan: must be a finite number from 0 to 10"),
        ("temperature", INF, "temperature is inf: must be a finite number from 0 to 10"),
        ("temperature", -1, "temperature is -1: must be at least 0"),
        ("temperature", 10.5, "temperature is 10.5: must be at most 10"),
        ("temperature", None, "temperature is nil: must be a finite number from 0 to 10"),
        ("temperature", [SECRET], "temperature is a list of 1 element: must be a finite number from 0 to 10"),
        ("top_p", 0, "top_p is 0: must be more than 0"),
        ("top_p", NAN, "top_p is nan: must be a finite number, more than 0 and at most 1"),
        ("top_k", 1.0, "top_k is 1.0: must be a whole number from 0 to 1000000"),
        ("seed", 1 << 63, "seed is 9223372036854775808: must be less than 9223372036854775808"),
        ("seed", "x", "must be a whole number, at least 0 and less than 9223372036854775808"),
        ("frequency_penalty", -3, "frequency_penalty is -3: must be at least -2"),
        ("stop", SECRET, "stop is a string of 24 characters: must be a list of strings"),
        ("stop", [5], "stop.0 is 5: must be a string"),
        ("stop", [""], "stop.0 is a string of 0 characters: must be at least 1 character long"),
        ("stop", ["ok", "x" * 257], "stop.1 is a string of 257 characters: must be at most 256 characters long"),
        ("stop", ["x"] * 17, "stop is a list of 17 elements: must be at most 16 long"),
        ("stop", None, "stop is nil: must be a list of strings"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(field: str, value: object, message: str) -> None:
    error = refusal({"prompt": SECRET, field: value})
    assert message in error.message
    assert (error.field or "").partition(".")[0] == field


@pytest.mark.parametrize(
    ("fields", "message", "field"),
    [
        ({}, "give exactly one of prompt, messages and token_ids, not 0", None),
        ({"prompt": SECRET, "token_ids": b"abcd"}, "give exactly one of prompt, messages and token_ids, not 2", None),
        ({"prompt": 5}, "prompt is 5: must be a string", "prompt"),
        ({"prompt": SECRET.encode()}, "prompt is a bin of 24 bytes: must be a string", "prompt"),
        ({"messages": SECRET}, "messages is a string of 24 characters: must be a list of messages", "messages"),
        ({"messages": []}, "messages is a list of 0 elements: must be at least 1 long", "messages"),
        ({"messages": [SECRET]}, "messages.0 is a string of 24 characters: must be a map of role and", "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing", "messages.0.content"),
        (
            {"messages": [{"role": SECRET, "content": SECRET}]},
            "messages.0.role is a string of 24 characters: must be system, user, assistant or tool",
            "messages.0.role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]},
            "messages.0.content is a list of 1 element: must be a string",
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": SECRET, "contents": 1}]},
            "unknown field 'messages.0.contents': did you mean 'content'?",
            "messages.0.contents",
        ),
        ({"token_ids": b"abc"}, "token_ids is a bin of 3 bytes: must be at least one id of 4 bytes", "token_ids"),
        ({"token_ids": [1, 2]}, "token_ids is a list of 2 elements: must be a bin of token ids (u32", "token_ids"),
        ({"prompt": SECRET, "temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?", "temprature"),
        ({"prompt": SECRET, "zzz": SECRET}, "unknown field 'zzz': known are frequency_penalty, max_tokens", "zzz"),
        ({"prompt": SECRET, "x" * 5000: 1}, "unknown field 'xxxx", "x" * 64 + "..."),
        ({"prompt": SECRET, b"stop": 1}, "did you mean 'stop'?", "b'stop'"),
    ],
)
def test_a_bad_shape_is_named(fields: dict[Any, Any], message: str, field: str | None) -> None:
    error = refusal(fields)
    assert message in error.message
    assert error.field == field


def test_a_body_that_is_no_map() -> None:
    for body in (b"", b"\xc0", b"\x90", b"\xa5hello", b"\xc1"):
        with pytest.raises(RequestError, match="body") as refused:
            parse_generate(body)
        assert refused.value.field == "body"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.just(SECRET)
    | st.just(SECRET.encode()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*GenerateRequest.model_fields, "tempurature"]), VALUES, max_size=4))
def test_any_fields_make_a_request_or_a_request_error(fields: dict[str, Any]) -> None:
    try:
        parse_generate(pack_body(fields))
        message = ""
    except RequestError as e:
        message = e.message
    for never in (SECRET, "validation", "Input should", "tuple"):
        assert never not in message
