"""A model's defaults and limits apply in the right order, and models.yaml accepts only valid ones."""

from typing import Any

import pytest

from protocol.codec import pack_body
from protocol.errors import RequestError
from protocol.presets import PRESETS, changed_option, fill, force
from protocol.request import GenerateRequest, parse_generate
from protocol.sampling_defaults import DEFAULTS, LIMITS, DefaultsProblem, check_forced, check_limits, check_sampling
from protocol.values import hints_of


def parse(fields: dict[str, Any], defaults: dict[str, Any] | None = None, **limits: Any) -> GenerateRequest:
    check_sampling(defaults or {})
    check_limits(limits, defaults or {})
    return parse_generate(pack_body({"prompt": "x", **fields}), defaults or {}, limits)


def refusal(fields: dict[str, Any], defaults: dict[str, Any] | None = None, **limits: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        parse(fields, defaults, **limits)
    return refused.value


def penalties(request: GenerateRequest) -> tuple[float, float]:
    return request.repetition_penalty, request.frequency_penalty


STEADY = (1.11, 0.03)
OFF = (1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "defaults", "expected"),
    [
        ({}, {}, OFF),
        ({"preset": "steady"}, {}, STEADY),
        ({}, {"preset": "steady"}, STEADY),
        ({"preset": "none"}, {"preset": "steady"}, OFF),
        ({"preset": None}, {"preset": "steady"}, STEADY),
        ({"rep_pen": 1.5}, {"preset": "steady"}, (1.5, 0.03)),
        ({"repetition_penalty": 1}, {"preset": "steady"}, (1.0, 0.03)),
        ({}, {"preset": "steady", "frequency_penalty": 0.5}, (1.11, 0.5)),
        ({"preset": "none"}, {"preset": "steady", "frequency_penalty": 0.5}, (1.0, 0.5)),
        ({"preset": "steady"}, {"frequency_penalty": 0.5}, STEADY),
        ({"preset": "steady", "frequency_penalty": 0.1}, {"frequency_penalty": 0.5}, (1.11, 0.1)),
    ],
)
def test_who_has_the_last_word(fields: dict[str, Any], defaults: dict[str, Any], expected: tuple[float, float]) -> None:
    assert penalties(parse(fields, defaults)) == expected


def test_defaults_fill_what_is_left_out_and_are_named() -> None:
    fields: dict[str, Any] = {"prompt": "x", "temperature": 0.2}
    assert fill(fields, {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5}) == {"top_p"}
    assert fields == {"prompt": "x", "temperature": 0.2, "top_p": 0.9}, "max_tokens depends on the prompt"
    assert parse({}, {"stop": ["\n"], "logit_bias": {5: 1}}).stop == ("\n",)
    assert PRESETS["steady"] == {"repetition_penalty": 1.11, "frequency_penalty": 0.03}


@pytest.mark.parametrize(
    ("fields", "defaults", "message"),
    [
        ({"max_tokens": 5}, {"min_tokens": 9}, "min_tokens is 9: must be at most max_tokens, which is 5"),
        ({"max_temp": 0.4}, {"min_temp": 0.5, "max_temp": 1.5}, "min_temp is 0.5: must be less than max_temp"),
        ({"allowed_tokens": [7]}, {"banned_tokens": [7]}, "banned_tokens holds 7"),
    ],
)
def test_a_default_that_disagrees_with_a_field_is_told_as_one(
    fields: dict[str, Any], defaults: dict[str, Any], message: str
) -> None:
    error = refusal(fields, defaults)
    assert error.message.startswith(message)
    assert error.message.endswith(f"({error.field} by this model's defaults)")
    assert "defaults" not in refusal({"temperature": 11}, {"top_p": 0.5}).message


@pytest.mark.parametrize(
    ("fields", "forced", "expected", "replaced"),
    [
        ({}, {"temperature": 0.7}, {"temperature": 0.7}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 0.7}, {}),
        ({"temperature": 1.5}, {"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": "hot"}, {"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"rep_pen": 1.5}, {"repetition_penalty": 1}, {"repetition_penalty": 1}, {"repetition_penalty": 1}),
        (
            {"preset": "steady"},
            {"repetition_penalty": 1},
            {"repetition_penalty": 1, "frequency_penalty": 0.03},
            {"repetition_penalty": 1},
        ),
        ({"max_tokens": 9}, {"max_tokens": 5}, {"max_tokens": None}, {"max_tokens": 5}),
        ({"stop": "\n"}, {"stop": ["\n"]}, {"stop": ("\n",)}, {}),
        ({"stop": ["x", "y"]}, {"stop": ["secret"]}, {"stop": ("secret",)}, {"stop": None}),
        (
            {"temperature_last": False},
            {"temperature_last": True},
            {"temperature_last": True},
            {"temperature_last": True},
        ),
    ],
)
def test_a_forced_value_counts_for_every_request_and_says_what_it_replaced(
    fields: dict[str, Any], forced: dict[str, Any], expected: dict[str, Any], replaced: dict[str, Any]
) -> None:
    check_forced(forced, {})
    defaults = {"temperature": 1.1, "frequency_penalty": 0.0}
    request = parse_generate(pack_body({"prompt": "x", **fields}), defaults, {}, {}, forced)
    assert {name: getattr(request, name) for name in expected} == expected
    assert request.replaced == replaced


def test_a_request_that_disagrees_with_a_forced_value_is_refused_and_told_so() -> None:
    with pytest.raises(RequestError, match=r"min_temp is 0.5.*\(max_temp by this model's forced values\)"):
        parse_generate(pack_body({"prompt": "x", "min_temp": 0.5}), forced={"max_temp": 0.4})
    with pytest.raises(DefaultsProblem, match="preset: unknown key"):
        check_forced({"preset": "steady"}, {})


def test_a_forced_value_may_need_a_default_beside_it() -> None:
    with pytest.raises(DefaultsProblem, match="min_temp is 1: must be less than max_temp"):
        check_forced({"max_temp": 0.4}, {})
    check_forced({"max_temp": 0.4}, {"min_temp": 0.1})


def test_notes_name_numbers_and_switches_only() -> None:
    fields: dict[str, Any] = {"stop": ["a"], "logit_bias": {1: 2.0}, "top_p": 1}
    replaced = force(fields, {"stop": ["secret"], "logit_bias": {7: 1.0}, "top_p": 0.5, "temperature_last": True})
    assert [changed_option(name, value) for name, value in replaced.items()] == ["stop", "logit_bias", "top_p=0.5"]
    assert changed_option("temperature_last", True) == "temperature_last=true"


@pytest.mark.parametrize(
    ("fields", "limits", "field", "message"),
    [
        ({"max_tokens": 65}, {"max_tokens": 64}, "max_tokens", "max_tokens is 65: this model allows at most 64"),
        ({"max_length": 65}, {"max_tokens": 64}, "max_length", "max_length is 65: this model allows at most 64"),
        ({"min_tokens": 65}, {"max_tokens": 64}, "min_tokens", "min_tokens is 65: this model allows at most 64 tokens"),
        (
            {"temperature": 1.6},
            {"temperature": 1.5},
            "temperature",
            "temperature is 1.6: this model allows",
        ),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 2}, "top_logprobs", "top_logprobs is 3"),
    ],
)
def test_beyond_a_limit_is_refused_by_name(
    fields: dict[str, Any], limits: dict[str, Any], field: str, message: str
) -> None:
    error = refusal(fields, **limits)
    assert (error.field, error.message.startswith(message)) == (field, True)


def test_at_the_limit_is_allowed_and_nothing_is_clamped() -> None:
    request = parse({"max_tokens": 64, "temperature": 1.5}, max_tokens=64, temperature=1.5)
    assert (request.max_tokens, request.temperature) == (64, 1.5)


@pytest.mark.parametrize(
    ("sampling", "key", "problem"),
    [
        (5, None, "must be a map"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"seed": 1}, "seed", "unknown key"),
        ({"prompt": "x"}, "prompt", "unknown key"),
        ({"preset": "bold"}, "preset", "must be one of none, steady"),
        ({"preset": ["none"]}, "preset", "must be one of none, steady"),
        ({"temperature": 11}, "temperature", "temperature is 11: must be at most 10"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "must be at most max_tokens"),
    ],
)
def test_defaults_that_cannot_be_meant(sampling: Any, key: str | None, problem: str) -> None:
    with pytest.raises(DefaultsProblem) as raised:
        check_sampling(sampling)
    assert raised.value.key == key
    assert problem in raised.value.problem


@pytest.mark.parametrize(
    ("limits", "sampling", "key", "problem"),
    [
        (5, {}, None, "must be a map"),
        ({"max_token": 5}, {}, "max_token", "did you mean 'max_tokens'?"),
        ({"max_tokens": 0}, {}, "max_tokens", "must be a whole number, at least 1"),
        ({"max_tokens": 5.5}, {}, "max_tokens", "must be a whole number"),
        ({"max_tokens": True}, {}, "max_tokens", "must be a whole number"),
        ({"temperature": float("nan")}, {}, "temperature", "must be a number"),
        ({"temperature": 0.5}, {}, "temperature", "is 1: this model allows at most 0.5: a request that leaves it out"),
        ({"max_tokens": 5}, {"max_tokens": 6}, "max_tokens", "max_tokens is 6: this model allows at most 5"),
    ],
)
def test_limits_that_cannot_be_meant(limits: Any, sampling: dict[str, Any], key: str | None, problem: str) -> None:
    with pytest.raises(DefaultsProblem) as raised:
        check_limits(limits, sampling)
    assert raised.value.key == key
    assert problem in raised.value.problem


def test_a_model_may_end_answers_that_repeat_themselves() -> None:
    check_sampling({"stop_on_loop": 200})
    body = pack_body({"prompt": "x"})
    assert parse_generate(body, {"stop_on_loop": 200}).stop_on_loop == 200
    assert parse_generate(pack_body({"prompt": "x", "stop_on_loop": 0}), {"stop_on_loop": 200}).stop_on_loop == 0
    with pytest.raises(DefaultsProblem, match="must be 0, which is off, or at least 12"):
        check_sampling({"stop_on_loop": 5})


def test_keys_are_fields_of_requests() -> None:
    assert set(hints_of(GenerateRequest)) >= DEFAULTS
    assert set(hints_of(GenerateRequest)) | {"prompt_tokens"} >= LIMITS.keys()
    check_limits({"temperature": 0.5}, {"temperature": 0.5})
    check_limits(dict.fromkeys(LIMITS, 1), {})
