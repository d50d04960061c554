"""The rule for draws against what ExLlamaV2 computes: its penalties, its order of candidates, its points."""

import random
from typing import Any

import numpy as np
import pytest

from model_worker.engines.exllamav2.gpu_draws.rule import (
    POINT_BITS,
    candidates_of,
    penalised,
    pick,
    rule_of,
    weights_of,
)
from model_worker.engines.exllamav2.sampling import TokenBias, kept
from protocol.request import SamplingParams
from tests.engines.test_exllamav2_kernels import Kernels, kernels, some_logits

__all__ = ["kernels"]

CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"smoothing_factor": 0.4},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.7, "top_k": 100, "top_p": 0.95, "top_a": 0.01, "min_p": 0.002},
]


@pytest.mark.long
def test_penalties_are_those_of_the_package_and_of_the_engine(kernels: Kernels) -> None:
    for seed in range(200):
        rng, logits = random.Random(seed), some_logits(seed, 96)
        ids = [rng.randrange(96) for _ in range(rng.randrange(1, 200))]
        sampling = SamplingParams.made(
            repetition_penalty=rng.choice([1.1, 2.0, 0.8]), penalty_range=rng.choice([-1, 0, 10, 100]),
            repetition_decay=rng.choice([0, 20]), frequency_penalty=0.3, presence_penalty=-0.2, logit_bias={5: 1.5},
            banned_tokens=(7,),
        )  # fmt: skip
        rule, seen = rule_of(sampling, 96), np.zeros(96, np.int32)
        for place, token in enumerate(ids):
            seen[token] = place + 1
        bias = TokenBias(sampling, 96, ())
        for token in ids:
            bias.count(token)
        counts = np.bincount(ids, minlength=96).astype(np.int32)
        ours = penalised(logits, rule, len(ids), seen, counts, bias.base.numpy())
        kernels.penalize(logits, ids, sampling.repetition_penalty, sampling.penalty_range, sampling.repetition_decay)
        assert np.allclose(ours, logits + bias.tensor.numpy(), rtol=1e-5, atol=1e-4), f"seed {seed}"


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
        rule = rule_of(sampling, 512)
        ids, sums = candidates_of(weights_of(logits, rule), rule)
        ours = pick(int(number * 2.0**POINT_BITS), ids, sums)
        # The package has the same order, except where a cut keeps every id: it does not sort then.
        above = probs[ids].astype(np.float64).cumsum()
        place = int(np.flatnonzero(ids == ours)[0])
        before = above[place] - probs[ours]
        assert before - 1e-4 <= number <= above[place] + 1e-4, f"seed {seed}: {ours}, the package {package}"
