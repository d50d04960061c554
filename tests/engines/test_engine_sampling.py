"""Sampling options work on every engine."""

import pytest

from model_worker.engine import Engine
from protocol.request import SamplingParams
from tests.engines.driver import Driver, answer
from tests.engines.test_engine_suite import ANSWER, COUNT, COUNTED, PROMPT
from tools.demo_models.corpus import (
    LETTERS_TEST_PROMPTS,
)

HOT = SamplingParams(temperature=5.0, seed=11)


def test_seeds_reproduce(letters: Engine) -> None:
    first = answer(letters, PROMPT, 24, sampling=HOT)
    letters.reset()
    assert answer(letters, PROMPT, 24, sampling=HOT).ids == first.ids
    others = [answer(letters, PROMPT, 24, sampling=HOT.but(seed=s)).ids for s in range(3)]
    assert any(ids != first.ids for ids in others)
    unseeded = [answer(letters, PROMPT, 24, sampling=SamplingParams(temperature=5.0)).ids for _ in range(3)]
    assert len({tuple(ids) for ids in unseeded}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.5, "min_p": 0.5, "top_k": 7},
        {"temperature": 1e-300},
        {"min_p": 1.0},
        {"top_p": 1e-6},
    ],
)
def test_options_that_leave_one_token_are_greedy(letters: Engine, options: dict[str, float]) -> None:
    sampling = SamplingParams(**({"temperature": 5.0} | options))  # type: ignore[arg-type]
    prompt, text = LETTERS_TEST_PROMPTS[2]
    assert answer(letters, prompt, sampling=sampling).text == text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 8.0, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 8.0},
        {"temperature": 0.0, "frequency_penalty": 2.0},
    ],
)
def test_options_change_the_answer(letters: Engine, options: dict[str, float]) -> None:
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    assert answer(letters, COUNT, 120, sampling=sampling).text != COUNTED[:120]


def test_answer_penalties_do_not_count_the_prompt(letters: Engine) -> None:
    for prompt, _ in LETTERS_TEST_PROMPTS[2:6]:
        plain = answer(letters, prompt, 1)
        penalized = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
        assert answer(letters, prompt, 1, sampling=penalized).ids == plain.ids


def test_extreme_options_do_not_break_the_batch(letters: Engine) -> None:
    driver = Driver(letters)
    kept = driver.submit(PROMPT)
    for options in (
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 10.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 10.0, "top_k": 1_000_000, "top_p": 1e-300, "min_p": 1e-300},
        {"temperature": 0.01, "min_p": 1.0, "seed": (1 << 63) - 1},
    ):
        driver.submit(PROMPT, 20, SamplingParams(**options))  # type: ignore[arg-type]
    driver.run()
    assert kept.text == ANSWER
