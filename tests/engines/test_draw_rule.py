"""The reference of the rule for draws: against definitions, exact distributions and the package's own sampler."""

import os
import random
from typing import Any

import numpy as np
import pytest

from model_worker.engines.draw_rule import reference
from model_worker.engines.draw_rule.rule import ONE, Rule, point_of, why_on_host
from model_worker.engines.draws import Draws
from model_worker.engines.exllamav2.cut import kept
from model_worker.engines.exllamav2.sampling import TokenBias
from protocol.request import SamplingParams
from tests.engines.test_exllamav2_kernels import Kernels, kernels, some_logits

__all__ = ["kernels"]

LAST = (1 << 53) - 1
CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"smoothing_factor": 0.4},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.7, "top_k": 100, "top_p": 0.95, "top_a": 0.01, "min_p": 0.002},
]


def draw(x: np.ndarray[Any, Any], point: int, **fields: Any) -> tuple[int, int]:
    ids, states = reference.draw(x[None], Rule.of(SamplingParams(**fields), len(x)), np.array([point]))
    return int(ids[0]), int(states[0])


def row(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def test_shares_are_exact() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        share, total = rng.getrandbits(53), rng.getrandbits(57)
        assert int(reference.share_of(share, np.array(total))) == share * total >> 53


def test_weights_are_the_exponentials() -> None:
    x = np.linspace(-40, 3, 100_001, dtype=np.float32)[None]
    exact = np.exp(x.astype(np.float64) - 3) * ONE
    got = reference.weights(x, Rule(False))
    assert (np.abs(got - exact) <= 3e-6 * exact + 1).all()
    assert got[0, -1] == ONE


def test_ties_boundaries_and_odd_rows() -> None:
    flat = row(1, 1, 1, 1)
    assert [draw(flat, point)[0] for point in (0, (1 << 51) - 1, 1 << 51, LAST)] == [0, 0, 1, 3]
    # Of equals a cut keeps the highest ids, and the highest is first.
    assert [draw(flat, point, top_k=2)[0] for point in (0, (1 << 52) - 1, 1 << 52, LAST)] == [3, 3, 2, 2]
    assert [draw(flat, point, top_p=0.5)[0] for point in (0, LAST)] == [3, 2]
    assert draw(row(0, 5, 5, 1), 0, temperature=0.0) == (1, reference.OK)
    one = row(-np.inf, 2, -np.inf)
    for fields in ({}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}):
        assert [draw(one, point, **fields) for point in (0, LAST)] == [(1, reference.OK)] * 2
        assert draw(row(1, np.nan), 0, **fields) == (0, reference.NOT_NUMBERS)
        assert draw(row(-np.inf, -np.inf), 0, **fields) == (0, reference.NOTHING_LEFT)
        assert draw(row(1, np.inf, np.inf), LAST, **fields) == (1, reference.OK)


def test_what_remains_is_what_cut_keeps() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        sampling = SamplingParams.model_construct(
            temperature=rng.choice([1.0, 0.5, 3.0]), top_k=rng.choice([0, 0, 3, 50]),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.3]), top_a=rng.choice([0.0, 0.2]), min_p=rng.choice([0.0, 0.05, 0.9]),
            smoothing_factor=rng.choice([0.0, 0.3]),
        )  # fmt: skip
        logits = some_logits(seed, rng.choice([7, 64, 2000]))
        rule = Rule.of(sampling, len(logits))
        if rule.cuts:
            count = int(reference.Candidates(logits[None], rule).count[0])
            assert abs(count - kept(logits, sampling)) <= 1, f"seed {seed}"  # rounding, at the edge


def test_penalties_are_those_of_the_package_and_of_the_engine(kernels: Kernels) -> None:
    for seed in range(200):
        rng, logits = random.Random(seed), some_logits(seed, 96)
        ids = [rng.randrange(96) for _ in range(rng.randrange(1, 200))]
        sampling = SamplingParams.model_construct(
            repetition_penalty=rng.choice([1.1, 2.0, 0.8]), penalty_range=rng.choice([-1, 0, 10, 100]),
            repetition_decay=rng.choice([0, 20]), frequency_penalty=0.3, presence_penalty=-0.2, logit_bias={5: 1.5},
            banned_tokens=(7,),
        )  # fmt: skip
        rule, last = Rule.of(sampling, 96), np.zeros(96, np.int32)
        last[ids] = np.arange(len(ids)) + 1
        for place, token in enumerate(ids):
            last[token] = place + 1
        ours = reference.penalized(logits, rule, last, len(ids))
        kernels.penalize(logits, ids, rule.repetition, sampling.penalty_range, sampling.repetition_decay)
        assert np.allclose(ours, logits, rtol=1e-5, atol=1e-5)
        bias = TokenBias(sampling, 96, ())
        plain = bias.tensor.numpy().copy()
        for token in ids:
            bias.count(token)
        ours = reference.biased(ours, rule, plain, np.bincount(ids, minlength=96))
        assert np.allclose(ours, logits + bias.tensor.numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_draws_are_within_a_ten_thousandth_of_the_packages(kernels: Kernels, fields: dict[str, Any]) -> None:
    """The package multiplies its random number by 0.9998. Here its point comes without that factor."""
    sampling = SamplingParams(**fields)
    for seed in range(300):
        rng = random.Random(seed)
        logits = some_logits(seed, 512)
        count = kept(logits, sampling)
        package, probs, _ = kernels.draw(
            logits, temperature=sampling.temperature, smoothing_factor=sampling.smoothing_factor,
            top_k=count if count < 512 else 0, random=(number := rng.random() * 0.9998) / 0.9998,
        )  # fmt: skip
        candidates = reference.Candidates(logits[None], Rule.of(sampling, 512))
        ours = int(candidates.at(np.array([point_of(number)]))[0])
        # The package has the same order, except where a cut keeps every id: it does not sort then.
        ids = candidates.ids[0][: candidates.count[0]]
        above = probs[ids].astype(np.float64).cumsum()
        place = int(np.flatnonzero(ids == ours)[0])
        before = above[place] - probs[ours]
        assert before - 1e-4 <= number <= above[place] + 1e-4, f"seed {seed}: {ours}, the package {package}"


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_ten_million_draws_follow_the_exact_distribution(fields: dict[str, Any]) -> None:
    seed = int(os.environ.get("TEST_SEED") or random.randrange(1 << 32))
    print(f"TEST_SEED={seed}")
    rng = np.random.default_rng(seed)
    x = np.float16(rng.normal(0, 2, 512)).astype(np.float32)
    candidates = reference.Candidates(x[None], Rule.of(SamplingParams(**fields), 512))
    count, draws = int(candidates.count[0]), 10_000_000
    found = np.bincount(candidates.at(rng.integers(0, 1 << 53, (1, draws)))[0], minlength=512)
    sampling, ids = SamplingParams(**fields), candidates.ids[0][:count]
    exact = x[ids].astype(np.float64) - float(x.max())
    exact = -(exact**2) * sampling.smoothing_factor if sampling.smoothing_factor else exact
    exact = np.exp(exact / sampling.temperature)
    expected = exact / exact.sum() * draws
    common = expected >= 20
    observed = np.append(found[ids][common], found[ids][~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 20:
        observed, wanted = observed[:-1], wanted[:-1]
    assert found.sum() == found[ids].sum() == draws
    square, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    # Wilson and Hilferty: the cube root is nearly normal. Five deviations: once in 3 million runs.
    deviations = ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert deviations < 5, f"chi-square {square:.1f} with {freedom} degrees of freedom"


def test_a_number_of_a_seed_is_a_point() -> None:
    number = Draws(7).at(3)
    assert point_of(number) * 2.0**-53 == number


def test_a_request_that_the_rule_lacks_an_option_for_is_named() -> None:
    for fields in (
        {"typical_p": 0.9}, {"tfs": 0.9}, {"skew": 1.0}, {"mirostat_mode": 2}, {"xtc_probability": 0.5},
        {"dry_multiplier": 0.8}, {"cfg_scale": 2.0}, {"max_temp": 2.0},
        {"temperature": 0.5, "temperature_last": True},
    ):  # fmt: skip
        sampling = SamplingParams(**fields)
        name = why_on_host(sampling)
        assert name in fields
        with pytest.raises(ValueError, match=str(name)):
            Rule.of(sampling, 96)
    assert why_on_host(SamplingParams(temperature=0.0, typical_p=0.9)) is None
    assert why_on_host(SamplingParams(top_p=0.9, repetition_penalty=1.2, logit_bias={1: 1.0})) is None
