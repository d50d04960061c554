"""A refusal of a request names the field, the value and the limit, and repeats no text of the request."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chat import ChatFields
from protocol.client.request_options import RequestOptions
from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError
from protocol.messages import ROUTE_KEYS
from protocol.request import ALIASES, GenerateRequest, SamplingParams, parse_generate
from protocol.values import Unfit, defaults_of, hints_of

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


FIELDS: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 10], "top_k": [0, 40], "top_p": [0.5, 1], "min_p": [0, 0.05, 1], "top_a": [0.2],
    "typical_p": [0.9], "tfs": [0.95], "skew": [-1.5, 2], "smoothing_factor": [0.3], "temperature_last": [True, False],
    "max_temp": [1.5], "min_temp": [0.5], "temp_exponent": [2], "repetition_penalty": [1.1], "penalty_range": [-1, 64],
    "repetition_decay": [32], "frequency_penalty": [-2, 0.5], "presence_penalty": [2], "dry_multiplier": [0.8],
    "dry_base": [1.75], "dry_allowed_length": [3], "dry_range": [0, 21], "dry_sequence_breakers": [["\n", ":"], []],
    "xtc_probability": [0.5], "xtc_threshold": [0.1], "mirostat_mode": [0, 2], "mirostat_tau": [5], "mirostat_eta": [1],
    "logit_bias": [{}, {"5": 1, "7": -100.0}, None], "banned_tokens": [[], [5, 7]], "allowed_tokens": [[1]],
    "ignore_eos": [True], "cfg_scale": [0, 1.5], "seed": [0, (1 << 63) - 1, None], "max_tokens": [0, 1, None],
    "stop": [["a"]], "min_tokens": [0, 9], "stop_token_ids": [[2, 3]],
    "stop_on_loop": [0, 12, 4096], "banned_strings": [["shiver", "spine"]],
    "token_healing": [True], "logprobs": [True, False], "top_logprobs": [0],
    "prompt_logprobs": [0, 20, None], "prompt_logprobs_from": [1], "preset": ["none", None],
    "json_schema": ['{"type":"integer"}', None], "regex": ["[a-z]+", None], "choice": [["yes", "no"], None],
    "whitespace_flexible": [False], "cut_to_context": [True], "budget_if_reasoning": [True],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in FIELDS.items() for v in values])
def test_every_field_is_taken(field: str, value: Any) -> None:
    request = parse_generate(pack_body({"prompt": "x", field: value}))
    kept = getattr(request, field)
    if field == "logit_bias" and value is not None:
        assert kept == {int(token): float(bias) for token, bias in value.items()}
    else:
        assert kept == (tuple(value) if isinstance(value, list) else value)
    assert type(kept) is not bool or type(value) is bool


OF_CHATS = {"with_format", "tool_choice", "allowed_tools", "parallel_tool_calls", "reasoning_budget"}
"""Fields that need messages. ``test_chat_fields`` has them."""


def test_no_field_goes_untested() -> None:
    others = {"prompt", "token_ids", "negative_prompt", *hints_of(ChatFields), *OF_CHATS}
    assert set(hints_of(GenerateRequest)) == FIELDS.keys() | others
    assert set(ALIASES.values()) <= set(hints_of(GenerateRequest))
    assert not ALIASES.keys() & set(hints_of(GenerateRequest))
    neutral = parse_generate(pack_body({"prompt": "x"}))
    assert neutral == GenerateRequest(prompt="x")
    assert {name: getattr(neutral, name) for name in hints_of(SamplingParams)} == defaults_of(SamplingParams)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_other_names_are_the_same_fields(alias: str) -> None:
    name = ALIASES[alias]
    value = FIELDS[name][-1] if FIELDS[name][-1] is not None else 5
    assert getattr(parse_generate(pack_body({"prompt": "x", alias: value})), name) == getattr(
        parse_generate(pack_body({"prompt": "x", name: value})), name
    )
    error = refusal({"prompt": SECRET, alias: value, name: value})
    assert error.message == f"{alias} and {name} are the same field: give one of them"
    assert error.field == alias
    bad = refusal({"prompt": SECRET, alias: [{}]})
    assert bad.message.startswith(f"{alias}")
    assert (bad.field or "").partition(".")[0] == alias


def test_two_other_names_of_one_field() -> None:
    error = refusal({"prompt": SECRET, "max_length": 5, "max_completion_tokens": 5})
    assert error.message == "max_length and max_completion_tokens are the same field: give one of them"


def test_a_schema_is_kept_as_text_without_spaces() -> None:
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    text = '{"type":"object","properties":{"ü":{"type":"integer"}}}'
    for given_as in (schema, json.dumps(schema, indent=2), text):
        request = parse_generate(pack_body({"prompt": "x", "json_schema": given_as}))
        assert request.json_schema == text
        assert request.constraint == ("json_schema", text)
        assert GenerateRequest(prompt="x", json_schema=request.json_schema) == request


def test_what_gives_an_answer_its_shape() -> None:
    assert GenerateRequest(prompt="x").constraint is None
    assert GenerateRequest(prompt="x", regex="a|b").constraint == ("regex", "a|b")
    flexible = GenerateRequest(prompt="x", json_schema='{"const":"ü"}', whitespace_flexible=True)
    assert flexible.constraint == ("json_schema", '{"const":"ü","x-guidance":{"whitespace_flexible":true}}')
    assert GenerateRequest(prompt="x", choice=("yes", "né")).constraint == ("choice", '["yes", "n\\u00e9"]')


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        (SECRET, "a string of 24 characters: must be a JSON schema: this is not JSON"),
        ("[1]", "a string of 3 characters: must be a JSON schema, which is a map"),
        ("true", "a string of 4 characters: must be a JSON schema, which is a map"),
        (5, "5: must be a JSON schema, as a map or as JSON text"),
        ([{}], "an array of 1 element: must be a JSON schema, as a map or as JSON text"),
        ({"const": NAN}, "a map: must be a JSON schema: this is not JSON"),
        ({"const": b"x"}, "a map: must be a JSON schema: this is not JSON"),
        ('{"maximum": 1e999}', "a string of 18 characters: must be a JSON schema: this is not JSON"),
        ('{"const": %s}' % ("9" * 5000), "a string of 5011 characters: must be a JSON schema: this is not JSON"),
        ('{"const": "\\ud800"}', "a string of 19 characters: must be a JSON schema: this is not JSON"),
        ('{"not":' * 9000, "a string of 63000 characters: must be a JSON schema: this is not JSON"),
        ({"const": "x" * (1 << 18)}, "a map: must be at most 262144 characters long, written without spaces"),
        (" " * (1 << 20), "a string of 1048576 characters: must be at most 262144 characters long"),
    ],
)
def test_what_is_no_schema(schema: Any, rule: str) -> None:
    error = refusal({"prompt": SECRET, "json_schema": schema})
    assert error.message.startswith(f"json_schema is {rule}")
    assert error.field == "json_schema"


def test_a_schema_nested_without_end() -> None:
    with pytest.raises(Unfit, match="this is not JSON"):
        GenerateRequest(prompt="x", json_schema=nested(100_000))  # type: ignore[arg-type]


def test_top_k_of_minus_one_is_off() -> None:
    assert parse_generate(pack_body({"prompt": "x", "top_k": -1})).top_k == 0
    assert refusal({"prompt": "x", "top_k": -2}).message == "top_k is -2: must be at least 0"
    assert refusal({"prompt": "x", "top_k": -1.0}).field == "top_k"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 5}, "top_logprobs is 5: needs logprobs to be true"),
        ({"prompt_logprobs_from": 5}, "prompt_logprobs_from is 5: needs prompt_logprobs"),
        ({"prompt_logprobs": 0, "token_healing": True}, "prompt_logprobs cannot be given together with token_healing"),
        ({"prompt_logprobs": 1, "cfg_scale": 2}, "prompt_logprobs cannot be given together with cfg_scale"),
        ({"negative_prompt": SECRET}, "negative_prompt does nothing while cfg_scale is 1: give another cfg_scale"),
        ({"stop_on_loop": 11}, "stop_on_loop is 11: must be 0, which is off, or at least 12"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: must be at most max_tokens, which is 8"),
        ({"min_length": 9, "max_length": 8}, "min_length is 9: must be at most max_tokens, which is 8"),
        ({"min_temp": 1.5}, "min_temp is 1.5: must be less than max_temp, which is 1"),
        ({"min_temp": 0.5, "max_temp": 0.5}, "min_temp is 0.5: must be less than max_temp, which is 0.5"),
        ({"dynatemp_high": 0.5}, "min_temp is 1: must be less than max_temp, which is 0.5"),
        ({"allowed_tokens": [5, 6], "banned_tokens": [6]}, "banned_tokens holds 6, which allowed_tokens holds too"),
        ({"dry_range": 20}, "dry_range is 20: must be 0 or more than 20"),
        ({"json_schema": {}, "regex": "a"}, "regex cannot be given together with json_schema"),
        ({"regex": "a", "choice": ["a"]}, "choice cannot be given together with regex"),
        ({"regex": "a", "whitespace_flexible": True}, "whitespace_flexible is true: needs json_schema"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    error = refusal({"prompt": SECRET, **fields})
    assert error.message.startswith(message)
    assert error.field == message.split()[0]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"5": 100.5}, "logit_bias is a map: must have values from -100 to 100 (that of 5 is 100.5)"),
        ({"5": NAN}, "logit_bias is a map: must have values from -100 to 100 (that of 5 is nan)"),
        ({"5": True}, "logit_bias is a map: must have numbers as values (that of 5 is none)"),
        ({"5": SECRET}, "logit_bias is a map: must have numbers as values (that of 5 is none)"),
        ({SECRET: 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({"-5": 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({"\u0665": 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({"9" * 1000: 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({"9" * 1024: 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({b"5": 1}, "logit_bias is a map: must have token ids (0 to 2147483647) as keys"),
        ({"5": 1, "05": 2}, "logit_bias is a map: must not hold an id twice (5)"),
        ({str(i): 1 for i in range(1025)}, "logit_bias is a map: must hold at most 1024 token ids, not 1025"),
        ([[5, 1]], "logit_bias is an array of 1 element: must be a map of token ids and numbers"),
    ],
)
def test_bad_biases_are_told_which(bias: Any, message: str) -> None:
    error = refusal({"prompt": SECRET, "logit_bias": bias})
    assert error.message == message
    assert error.field == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", 5, "logprobs is 5: must be true or false"),
        ("ignore_eos", SECRET, "ignore_eos is a string of 24 characters: must be true or false"),
        ("top_logprobs", 21, "top_logprobs is 21: must be at most 20"),
        ("mirostat_mode", 1, "mirostat_mode is 1: must be 0 or 2"),
        ("banned_tokens", [-1], "banned_tokens.0 is -1: must be at least 0"),
        ("banned_tokens", 5, "banned_tokens is 5: must be an array of token ids"),
        ("allowed_tokens", [SECRET], "allowed_tokens.0 is a string of 24 characters: must be a whole number from 0 to"),
        ("stop_token_ids", [1] * 65, "stop_token_ids is an array of 65 elements: must be at most 64 long"),
        ("banned_strings", [""], "banned_strings.0 is a string of 0 characters: must be at least 1 character long"),
        ("banned_strings", [SECRET] * 65, "banned_strings is an array of 65 elements: must be at most 64 long"),
        ("banned_strings", SECRET, "banned_strings is a string of 24 characters: must be an array of strings"),
        ("dry_sequence_breakers", [5], "dry_sequence_breakers.0 is 5: must be a string"),
        ("negative_prompt", 5, "negative_prompt is 5: must be a string"),
        ("cfg_scale", INF, "cfg_scale is inf: must be a finite number from 0 to 20"),
        ("top_p", 0, "top_p is 0: must be more than 0"),
        ("min_tokens", 1.5, "min_tokens is 1.5: must be a whole number from 0 to 2147483648"),
        ("max_tokens", -1, "max_tokens is -1: must be at least 0"),
        ("max_tokens", 1.5, "max_tokens is 1.5: must be a whole number from 0 to 2147483648"),
        ("max_tokens", True, "max_tokens is true: must be a whole number from 0 to 2147483648"),
        ("max_tokens", SECRET, "max_tokens is a string of 24 characters: must be a whole number from 0 to 2147483648"),
        ("prompt_logprobs", -1, "prompt_logprobs is -1: must be at least 0"),
        ("prompt_logprobs", True, "prompt_logprobs is true: must be a whole number from 0 to 20"),
        ("prompt_logprobs_from", 0, "prompt_logprobs_from is 0: must be at least 1"),
        ("max_tokens", 1 << 40, "max_tokens is 1099511627776: must be at most 2147483648"),
        ("temperature", NAN, "temperature is nan: must be a finite number from 0 to 10"),
        ("temperature", INF, "temperature is inf: must be a finite number from 0 to 10"),
        ("temperature", -1, "temperature is -1: must be at least 0"),
        ("temperature", 10.5, "temperature is 10.5: must be at most 10"),
        ("temperature", None, "temperature is null: must be a finite number from 0 to 10"),
        ("temperature", [SECRET], "temperature is an array of 1 element: must be a finite number from 0 to 10"),
        ("top_p", NAN, "top_p is nan: must be a finite number, more than 0 and at most 1"),
        ("top_k", 1.0, "top_k is 1.0: must be a whole number from 0 to 1000000"),
        ("seed", 1 << 63, "seed is 9223372036854775808: must be less than 9223372036854775808"),
        ("seed", "x", "must be a whole number, at least 0 and less than 9223372036854775808"),
        ("frequency_penalty", -3, "frequency_penalty is -3: must be at least -2"),
        ("stop", "", "stop.0 is a string of 0 characters: must be at least 1 character long"),
        ("stop", True, "stop is true: must be a string, or an array of strings"),
        ("stop", [5], "stop.0 is 5: must be a string"),
        ("stop", [""], "stop.0 is a string of 0 characters: must be at least 1 character long"),
        ("stop", ["ok", "x" * 65_535], "stop is an array of 2 elements: must have at most 65536 bytes of text in all"),
        ("stop", ["é"] * 40_000, "stop is an array of 40000 elements: must have at most 65536 bytes of text in all"),
        ("stop", None, "stop is null: must be a string, or an array of strings"),
        ("regex", "", "regex is a string of 0 characters: must be at least 1 character long"),
        ("regex", "x" * 8193, "regex is a string of 8193 characters: must be at most 8192 characters long"),
        ("choice", [], "choice is an array of 0 elements: must be at least 1 long"),
        ("choice", ["x"] * 257, "choice is an array of 257 elements: must be at most 256 long"),
        ("choice", ["x", ""], "choice.1 is a string of 0 characters: must be at least 1 character long"),
        ("choice", SECRET, "choice is a string of 24 characters: must be an array of strings"),
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
        ({"messages": SECRET}, "messages is a string of 24 characters: must be an array of messages", "messages"),
        ({"messages": []}, "messages is an array of 0 elements: must be at least 1 long", "messages"),
        ({"messages": [SECRET]}, "messages.0 is a string of 24 characters: must be a map of role and", "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0: content must be a string", "messages.0"),
        (
            {"messages": [{"role": SECRET, "content": SECRET}]},
            "messages.0.role is a string of 24 characters: must be system, user, assistant or tool",
            "messages.0.role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]},
            "messages.0.content is an array of 1 element: must be a string",
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": SECRET, "contents": 1}]},
            "unknown field 'messages.0.contents': did you mean 'content'?",
            "messages.0.contents",
        ),
        ({"token_ids": b"abc"}, "token_ids is a bin of 3 bytes: must be at least one id of 4 bytes", "token_ids"),
        ({"token_ids": [1, 2]}, "token_ids is an array of 2 elements: must be a bin of token ids (u32", "token_ids"),
        ({"prompt": SECRET, "temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?", "temprature"),
        ({"prompt": SECRET, "zzz": SECRET}, "unknown field 'zzz': none has a similar name", "zzz"),
        ({"prompt": SECRET, "rep_penn": 1}, "unknown field 'rep_penn': did you mean 'rep_pen'?", "rep_penn"),
        ({"prompt": SECRET, "x" * 1024: 1}, "unknown field 'xxxx", "x" * 64 + "..."),
        ({"prompt": SECRET, b"stop": 1}, "the name 'stop' is a bin: send names as strings", "stop"),
        ({"prompt": SECRET, "deadline_ms": 5}, "it is a key of GENERATE's route, which stands before", "deadline_ms"),
    ],
)
def test_a_bad_shape_is_named(fields: dict[Any, Any], message: str, field: str | None) -> None:
    error = refusal(fields)
    assert message in error.message
    assert error.field == field


@pytest.mark.parametrize("name", ROUTE_KEYS)
def test_a_key_of_the_route_is_not_sought_among_the_fields(name: str) -> None:
    assert "route" in refusal({"prompt": SECRET, name: 1}).message


def test_one_stop_string_stands_for_an_array_of_one() -> None:
    for name in ("stop", "stop_sequence"):
        assert parse_generate(pack_body({"prompt": "x", name: "END"})).stop == ("END",)


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
@given(st.dictionaries(st.sampled_from([*hints_of(GenerateRequest), *ALIASES, "tempurature"]), VALUES, max_size=4))
def test_any_fields_make_a_request_or_a_request_error(fields: dict[str, Any]) -> None:
    try:
        parse_generate(pack_body(fields))
        message = ""
    except RequestError as e:
        message = e.message
    for never in (SECRET, "validation", "Input should", "tuple"):
        assert never not in message


def test_the_clients_know_the_names_of_all_options() -> None:
    """``RequestOptions`` names all options for editors. ``prompt`` is a separate parameter, ``progress`` is none."""
    wire = {*hints_of(GenerateRequest), *ALIASES, *ROUTE_KEYS} - {"prompt", "progress"}
    assert {*RequestOptions.__annotations__} == wire
