"""Options of a request other than its prompt work in the same way in every engine that offers them.

A test is skipped, with the option's name, for an engine that does not offer the option.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from model_worker.engine import Engine, Job
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams
from protocol.values import hints_of
from tests.chat import chat_ids
from tests.engines.driver import GREEDY, Driver, answer
from tools.demo_models import directory
from tools.demo_models.corpus import (
    LETTERS_TEST_LONG_ANSWERS,
    LETTERS_TEST_PROMPTS,
    STORIES_TEST_REQUESTS,
)

PROMPT, ANSWER = LETTERS_TEST_PROMPTS[1]
assert (PROMPT, ANSWER) == ("count: 7 8 9 ->", " 10 11 12 13 14 15 16 17")
COUNT, COUNTED = LETTERS_TEST_LONG_ANSWERS[1]


def need(engine: Engine, *names: str) -> None:
    missing = set(names) - engine.capabilities.offered
    if missing:
        pytest.skip(f"not offered by this engine: {', '.join(sorted(missing))}")


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def story(engine: Engine, number: int = 0) -> tuple[list[int], str]:
    request, text = STORIES_TEST_REQUESTS[number]
    return chat_ids(engine, request), text


# where an answer ends


@pytest.mark.long
def test_min_tokens_are_exact(letters: Engine) -> None:
    need(letters, "min_tokens")
    plain = answer(letters, PROMPT)
    eos, size = plain.ids[-1], len(plain.ids)
    assert plain.reason == "stop"
    same = answer(letters, PROMPT, min_new_tokens=size - 1)
    assert (same.ids, same.reason) == (plain.ids, "stop"), "the end token may come right behind the least"
    longer = answer(letters, PROMPT, 200, min_new_tokens=size + 20)
    assert longer.ids[: size - 1] == plain.ids[:-1]
    assert eos not in longer.ids[: size + 20]
    assert longer.text.startswith(ANSWER)
    both = answer(letters, PROMPT, size + 7, min_new_tokens=size + 7)
    assert (len(both.ids), both.reason) == (size + 7, "length")


def test_stop_strings_are_looked_for_behind_min_tokens(letters: Engine) -> None:
    need(letters, "min_tokens")
    ids = answer(letters, PROMPT).ids
    early = next(n for n in range(len(ids)) if " 11" in letters.decode(ids[:n]))
    outcome = answer(letters, PROMPT, stop=[" 1"], min_new_tokens=early)
    assert (outcome.text, outcome.reason) == (" 10 11", "stop")
    assert len(outcome.ids) > early
    assert answer(letters, PROMPT, stop=[" 11"], min_new_tokens=early).text == ANSWER, "it was over by then"


@pytest.mark.long
def test_an_answer_that_repeats_itself_ends(letters: Engine) -> None:
    need(letters, "stop_on_loop", "allowed_tokens", "min_tokens", "banned_strings")
    (token,) = letters.encode(" 7")[-1:]
    only = greedy(allowed_tokens=(token,))
    outcome = answer(letters, PROMPT, 100, only, stop_on_loop=20)
    assert (outcome.ids, outcome.reason) == ([token] * 20, "loop")
    assert outcome.text == letters.decode(outcome.ids)
    assert answer(letters, PROMPT, 19, only, stop_on_loop=20).reason == "length"
    assert len(answer(letters, PROMPT, 100, only, stop_on_loop=20, min_new_tokens=33).ids) == 33
    held = answer(letters, PROMPT, 100, only, stop=["7x"], stop_on_loop=20)
    assert (held.text, held.reason) == (outcome.text, "loop"), "text that was held for a stop string is delivered"
    judged = answer(letters, PROMPT, 100, only, banned_strings=("never",), stop_on_loop=20)
    assert (judged.ids[:20], judged.reason) == (outcome.ids, "loop")
    plain = answer(letters, COUNT, 200)
    watched = answer(letters, COUNT, 200, stop_on_loop=12)
    assert (watched.ids, watched.reason) == (plain.ids, plain.reason), "counting is no loop"


def test_stop_token_ids_end_the_answer(letters: Engine) -> None:
    need(letters, "stop_token_ids", "min_tokens")
    ids = answer(letters, PROMPT).ids
    chosen = ids[5]
    outcome = answer(letters, PROMPT, stop_token_ids=(chosen, ids[7]))
    size = ids.index(chosen) + 1
    assert (outcome.ids, outcome.reason) == (ids[:size], "stop")
    assert outcome.text == letters.decode(ids[: size - 1]), "an end token's text is not delivered, its id is"
    later = answer(letters, PROMPT, stop_token_ids=(chosen,), min_new_tokens=12)
    assert chosen not in later.ids[:12]


def test_text_held_for_a_stop_string_comes_with_a_stop_token(letters: Engine) -> None:
    need(letters, "stop_token_ids")
    ids = answer(letters, PROMPT).ids
    outcome = answer(letters, PROMPT, stop=[" 10 1x"], stop_token_ids=(ids[3],))
    assert outcome.text == letters.decode(ids[:3])


def test_ignore_eos(letters: Engine) -> None:
    need(letters, "ignore_eos", "stop_token_ids")
    plain = answer(letters, PROMPT)
    outcome = answer(letters, PROMPT, 60, greedy(ignore_eos=True))
    assert (len(outcome.ids), outcome.reason) == (60, "length")
    assert plain.ids[-1] not in outcome.ids
    assert outcome.text.startswith(ANSWER)
    stopped = answer(letters, PROMPT, 60, greedy(ignore_eos=True), stop_token_ids=(plain.ids[2],))
    assert stopped.reason == "stop"


# log-probabilities


def test_logprobs_are_those_of_the_model(letters: Engine) -> None:
    need(letters, "logprobs", "top_logprobs")
    plain = answer(letters, PROMPT)
    outcome = answer(letters, PROMPT, top_logprobs=20)
    assert outcome.ids == plain.ids
    for reported in outcome.logprobs:
        assert reported.top[0] == (reported.token_id, reported.logprob), "a greedy token is the likeliest"
        assert len(reported.top) == 20
        assert len({token for token, _ in reported.top}) == 20
        values = [logprob for _, logprob in reported.top]
        assert values == sorted(values, reverse=True)
        assert math.exp(values[0]) > 0.7, "the demo models are sure of these prompts"
        assert sum(map(math.exp, values)) <= 1 + 1e-4
    chosen = answer(letters, PROMPT, top_logprobs=0)
    assert [reported.top for reported in chosen.logprobs] == [()] * len(plain.ids)
    expected = [reported.logprob for reported in outcome.logprobs]
    assert [reported.logprob for reported in chosen.logprobs] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 5.0, "seed": 4},
        {"temperature": 3.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 2.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {50: 100.0}},
    ],
)
def test_logprobs_equal_an_independent_computation(letters: Engine, engine_name: str, options: dict[str, Any]) -> None:
    """Log-probabilities are computed before penalties, bias and temperature are applied."""
    need(letters, "logprobs", *options)
    import torch
    from transformers import AutoModelForCausalLM

    outcome = answer(letters, PROMPT, 24, SamplingParams(**options), top_logprobs=3)
    model = AutoModelForCausalLM.from_pretrained(directory("letters"), dtype=torch.float32)
    ids = [*outcome.job.prompt_ids, *outcome.ids]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(outcome.job.prompt_ids) - 1 :]
    # logits of up to about 20 in half precision: an unlikely token is off by some tenths (0.3 of 9.4 on an H200)
    tolerance = {"abs": 1e-3} if engine_name == "transformers" else {"abs": 0.2, "rel": 0.06}
    for reported, row in zip(outcome.logprobs, expected, strict=False):
        assert reported.logprob == pytest.approx(float(row[reported.token_id]), **tolerance)
        for token, logprob in reported.top:
            assert logprob == pytest.approx(float(row[token]), **tolerance)
        assert reported.top[0][1] == pytest.approx(float(row.max()), **tolerance)


def test_asking_for_logprobs_changes_nothing(letters: Engine) -> None:
    need(letters, "logprobs")
    hot = SamplingParams(temperature=5.0, seed=11)
    assert answer(letters, PROMPT, 24, hot, top_logprobs=5).ids == answer(letters, PROMPT, 24, hot).ids


# which tokens may be drawn


def test_biases_force_and_forbid(letters: Engine) -> None:
    need(letters, "logit_bias", "banned_tokens", "allowed_tokens")
    ids = answer(letters, PROMPT).ids
    forced = answer(letters, PROMPT, 6, greedy(logit_bias={ids[2]: 100.0}))
    assert (forced.ids, forced.reason) == ([ids[2]] * 6, "length")
    for options in ({"logit_bias": {ids[0]: -100.0}}, {"banned_tokens": (ids[0],)}):
        for sampling in (greedy(**options), SamplingParams(temperature=5.0, seed=3, **options)):  # type: ignore[arg-type]
            assert ids[0] not in answer(letters, PROMPT, 40, sampling).ids
    allowed = answer(letters, PROMPT, 40, SamplingParams(temperature=10.0, allowed_tokens=tuple(ids[:4]), seed=1))
    assert set(allowed.ids) <= set(ids[:4])
    assert (len(allowed.ids), allowed.reason) == (40, "length"), "the end token is not among them"


# token healing


@pytest.mark.parametrize(
    ("prompt", "text"), [("count: 7 8 9 -> ", ANSWER[1:]), (PROMPT, ANSWER), ("sort: d b a c", "")]
)
def test_a_prompt_that_ends_inside_a_word_is_healed(letters: Engine, prompt: str, text: str) -> None:
    need(letters, "token_healing")
    outcome = answer(letters, prompt, 40, token_healing=True)
    whole = letters.encode(prompt.rstrip(" "))
    assert prompt + outcome.text == prompt.rstrip(" ") + answer(letters, whole, 40).text
    assert outcome.text.startswith(text)


@pytest.mark.long
def test_prompts_cut_inside_any_token_of_a_story(stories: Engine) -> None:
    """The prompt ends with a token that is the beginning of the right token."""
    need(stories, "token_healing")
    prompt, text = story(stories)
    ids = answer(stories, prompt, 400).ids
    by_bytes = {stories.token_bytes(token): token for token in range(256 + 384)}
    driver = Driver(stories)
    cut = []
    for place, token in enumerate(ids[:60]):
        data = stories.token_bytes(token)
        begins = [by_bytes[data[:size]] for size in range(1, len(data)) if data[:size] in by_bytes]
        if begins:
            shown = stories.decode(ids[:place])
            known = len(stories.token_bytes(begins[-1]).decode())
            outcome = driver.submit([*prompt, *ids[:place], begins[-1]], 400, token_healing=True)
            cut.append((outcome, text[len(shown) + known :], ids[place + 1 :]))
    assert len(cut) > 20
    driver.run()
    for outcome, rest, behind in cut:
        assert (outcome.text, outcome.ids) == (rest, behind)


def test_a_healed_token_counts_for_nothing(letters: Engine) -> None:
    need(letters, "token_healing", "min_tokens", "logprobs")
    full = answer(letters, PROMPT).ids
    for size in (1, 2, 5):
        outcome = answer(letters, PROMPT + " ", size, token_healing=True, top_logprobs=1)
        assert (outcome.ids, outcome.reason) == (full[1 : size + 1], "length")
        assert outcome.text == letters.decode(full[: size + 1])[1:]
    least = len(full) - 2  # without the first and the end token
    assert answer(letters, PROMPT + " ", token_healing=True, min_new_tokens=least).ids == full[1:]
    assert len(answer(letters, PROMPT + " ", token_healing=True, min_new_tokens=least + 1).ids) > least + 1


def test_prompts_that_are_not_healed(letters: Engine) -> None:
    need(letters, "token_healing")
    special = letters.encode("")
    for prompt in ([5], [*letters.encode("a"), *special] if special else [5]):
        assert answer(letters, prompt, 8, token_healing=True).ids == answer(letters, prompt, 8).ids


@pytest.mark.parametrize(
    ("stop", "text"),
    [("1", ""), ("0 1", "1"), (" 10", ANSWER[1:]), (" 10x", ANSWER[1:]), (" 11", "10"), ("16 17 18", ANSWER[1:])],
)
def test_stop_strings_are_looked_for_in_what_is_new(letters: Engine, stop: str, text: str) -> None:
    need(letters, "token_healing")
    outcome = answer(letters, PROMPT + " ", stop=[stop], token_healing=True)
    assert (outcome.text, outcome.reason) == (text, "stop")


def test_healing_that_no_token_is_left_for_is_refused(letters: Engine) -> None:
    need(letters, "token_healing", "allowed_tokens")
    ids = tuple(letters.encode(PROMPT))
    with pytest.raises(RequestError) as refused:
        letters.submit(Job(1, ids, 5, greedy(allowed_tokens=(ids[1],)), token_healing=True))
    assert refused.value.field == "token_healing"
    Driver(letters).assert_idle()


# guidance


def test_guidance_between_a_prompt_and_itself_changes_nothing(letters: Engine) -> None:
    need(letters, "cfg_scale")
    ids = tuple(letters.encode(PROMPT))
    for scale in (0.5, 2.0):
        assert answer(letters, PROMPT, sampling=greedy(cfg_scale=scale), negative_ids=ids).text == ANSWER


def test_guidance_of_zero_is_the_other_prompt(letters: Engine) -> None:
    need(letters, "cfg_scale")
    other, text = LETTERS_TEST_PROMPTS[4]
    outcome = answer(letters, PROMPT, sampling=greedy(cfg_scale=0.0), negative_ids=tuple(letters.encode(other)))
    assert outcome.text == text


# refusals

ASKED: dict[str, Any] = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "top_a": 0.2, "typical_p": 0.9, "tfs": 0.9, "skew": 1.0,
    "smoothing_factor": 0.2, "temperature_last": True, "min_temp": 0.5, "max_temp": 2.0, "temp_exponent": 2.0,
    "repetition_penalty": 1.2, "penalty_range": 64, "repetition_decay": 10, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_range": 64,
    "dry_sequence_breakers": ("\n",), "xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat_mode": 2,
    "mirostat_tau": 3.0, "mirostat_eta": 0.2, "logit_bias": {5: 1.0}, "banned_tokens": (5,), "allowed_tokens": (5, 6),
    "ignore_eos": True, "cfg_scale": 1.5, "seed": 5,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "min_tokens": {"min_new_tokens": 2}, "stop_token_ids": {"stop_token_ids": (5,)},
    "banned_strings": {"banned_strings": ("x",)}, "token_healing": {"token_healing": True},
    "logprobs": {"top_logprobs": 0}, "top_logprobs": {"top_logprobs": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", [*hints_of(SamplingParams), *OTHERS])
def test_every_field_is_honoured_or_refused_by_name(letters: Engine, name: str) -> None:
    sampling = SamplingParams(**{name: ASKED[name]}) if name in ASKED else GREEDY
    job = Job(10**6, tuple(letters.encode(PROMPT)), 5, sampling, **OTHERS.get(name, {}))
    if name == "cfg_scale":
        job = replace(job, negative_ids=(5, 6))
    if name in letters.capabilities.offered:
        letters.submit(job)
        while not any(event.job == job.id and hasattr(event, "finish_reason") for event in letters.step()):
            pass
    else:
        with pytest.raises(RequestError) as refused:
            letters.submit(job)
        assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, name)
    Driver(letters).assert_idle()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("logit_bias", {"logit_bias": {10**6: 1.0}}),
        ("banned_tokens", {"banned_tokens": (10**6,)}),
        ("allowed_tokens", {"allowed_tokens": (5, 10**6)}),
        ("stop_token_ids", {"stop_token_ids": (10**6,)}),
        ("banned_tokens", {"banned_tokens": tuple(range(448))}),
        ("allowed_tokens", {"allowed_tokens": (2,), "ignore_eos": True}),
        ("allowed_tokens", {"allowed_tokens": (2,), "min_new_tokens": 1}),
        ("min_tokens", {"min_new_tokens": 9}),
    ],
)
def test_ids_that_the_model_has_not_and_draws_of_nothing_are_refused(
    letters: Engine, field: str, fields: dict[str, Any]
) -> None:
    sampling = {name: value for name, value in fields.items() if name in hints_of(SamplingParams)}
    job = {name: value for name, value in fields.items() if name not in hints_of(SamplingParams)}
    need(letters, *sampling, field)
    with pytest.raises(RequestError) as refused:
        letters.submit(Job(1, tuple(letters.encode(PROMPT)), 8, greedy(**sampling), **job))
    assert refused.value.field == field
    Driver(letters).assert_idle()
