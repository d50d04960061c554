"""Random numbers depend on the seed and the place only, and the engines use them correctly."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from model_worker.engine import Engine, Job
from model_worker.engines.admission import Draws
from model_worker.engines.embedded.sampling import Sampler
from protocol.request import SamplingParams
from tests.engines.driver import GREEDY, answer
from tests.engines.exllamav2_cpu.harness import Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits

pytestmark = pytest.mark.usefixtures("decoding")

PROMPT = list(range(40, 60))
HOT = SamplingParams(temperature=1.5, seed=7)


def test_a_number_follows_from_what_it_is_drawn_for() -> None:
    everything = [
        (seed, place, which, returns)
        for seed in (0, 1, 2, (1 << 63) - 1)
        for place in range(-1, 200)
        for which in (0, 1)
        for returns in range(3)
    ]
    numbers = [Draws(s).at(p, which=w, returns=r) for s, p, w, r in everything]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [Draws(s).at(p, which=w, returns=r) for s, p, w, r in everything]
    assert Draws(None).at(0) != Draws(None).at(0)


@pytest.mark.parametrize("along", ["seed", "place", "returns"])
def test_numbers_are_uniform_and_neighbours_are_strangers(along: str) -> None:
    size = 20_000
    if along == "seed":
        numbers = torch.tensor([Draws(seed).at(3) for seed in range(size)], dtype=torch.float64)
    elif along == "place":
        numbers = torch.tensor([Draws(3).at(place) for place in range(size)], dtype=torch.float64)
    else:
        numbers = torch.tensor([Draws(3).at(3, returns=returns) for returns in range(size)], dtype=torch.float64)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert float(((counts - size / 20) ** 2 / (size / 20)).sum()) < 50  # chi square of 19: 50 is once in 10,000
    for lag in (1, 2, 7):
        correlation = float(torch.corrcoef(torch.stack([numbers[:-lag], numbers[lag:]]))[0, 1])
        assert abs(correlation) < 0.03


def test_a_number_is_cheap() -> None:
    draws, best = Draws(1), 1.0
    for _ in range(50):
        begun = time.thread_time()
        for place in range(1000):
            draws.at(place)
        best = min(best, (time.thread_time() - begun) / 1000)
    assert best < 10e-6, f"{best * 1e6:.2f} us: ten times what it is"


def test_no_token_of_probability_zero_is_drawn() -> None:
    sampler = Sampler(Job(1, (0,), 10, SamplingParams()), 5)
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    for point in (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53):
        with mock.patch.object(Draws, "at", return_value=point):
            assert sampler.draw(logits, 1) == (1 if point < 0.5 else 3)
    with pytest.raises(RuntimeError, match="not numbers"):
        sampler.draw(torch.full((5,), torch.nan), 1)


def test_a_token_drawn_anew_is_none_in_particular() -> None:
    """After a return the random number is a new one. The old number would favour tokens next to the excluded one."""
    logits = torch.zeros(4)
    counts = torch.zeros(4)
    for seed in range(2000):
        sampler = Sampler(Job(1, (0,), 10, SamplingParams(seed=seed)), 4)
        if sampler.draw(logits, 1) == 1:
            counts[sampler.draw(logits, 1, excluded=[1], returns=1) or 0] += 1
    assert counts[1] == 0
    shares = counts / counts.sum()
    assert shares[[0, 2, 3]].tolist() == pytest.approx([1 / 3] * 3, abs=0.08)


def test_engines_draw_anew_by_another_number(load: Callable[[str, str], Engine]) -> None:
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.02}
    for engine, options in ((load("transformers", "letters"), {}), (Harness().engine, {}), (Harness().engine, xtc)):
        asked: list[tuple[int, int, int]] = []
        at = Draws.at

        def noted(self: Draws, place: int, asked: Any = asked, at: Any = at, **fields: int) -> float:
            asked.append((place, fields.get("which", 0), fields.get("returns", 0)))
            number: float = at(self, place, **fields)
            return number

        with mock.patch.object(Draws, "at", noted):
            hot = SamplingParams(temperature=3.0, seed=2, ignore_eos=True, **options)  # type: ignore[arg-type]
            outcome = answer(engine, PROMPT, 40, hot, banned_strings=("e", "1"))
        places = [place for place, which, _ in asked if not which]
        assert [place for place, which, _ in asked if which] == (places if options else [])
        assert len(places) > len(set(places)), "it went back"
        assert len(set(asked)) == len(asked), "two draws by one number"
        assert set(range(len(outcome.ids))) <= set(places)


def test_greedy_answers_draw_no_numbers(load: Callable[[str, str], Engine]) -> None:
    with mock.patch.object(Draws, "at", side_effect=AssertionError("a number was drawn")):
        for engine in (load("transformers", "letters"), Harness().engine):
            for options in ({}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}, {"logit_bias": {50: 1.0}}):
                answer(engine, PROMPT, 8, SamplingParams(temperature=0, **options))
            answer(engine, PROMPT, 8, GREEDY, top_logprobs=2)


@pytest.mark.long
@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_a_seeded_answer_is_the_same_with_speculation(speculate: str) -> None:
    """The number of draws in a step, and which of them are discarded, do not change the answer."""
    plain, h = Harness(), Harness(speculate=speculate, draft=OracleLogits(448, habit=0.8))
    for options in ({}, {"xtc_probability": 0.5, "xtc_threshold": 0.02}, {"repetition_penalty": 1.2}):
        sampling = HOT.but(**options)
        expected = plain.answer(PROMPT, 60, sampling)
        assert h.answer(PROMPT, 60, sampling).ids == expected.ids
        banned = h.answer(PROMPT, 60, sampling, banned_strings=("e", "a"))
        assert banned.ids == plain.answer(PROMPT, 60, sampling, banned_strings=("e", "a")).ids


def test_a_healed_first_token_takes_a_number_of_its_own() -> None:
    h = Harness()
    ids = h.engine.encode("count: 7 8 9")
    outcomes = [h.answer(ids, 20, HOT.but(seed=seed, temperature=3.0), token_healing=True) for seed in (1, 1, 2)]
    assert outcomes[0].ids == outcomes[1].ids != outcomes[2].ids
