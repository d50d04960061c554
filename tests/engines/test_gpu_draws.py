"""Draws by the project's rule: the reference against exact distributions and the package's sampler, the kernels against
the reference."""

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.engines.exllamav2.gpu_draws.rule import (
    POINT_BITS,
    candidates_of,
    draw,
    draws_by_rule,
    exp2_of,
    log2_of,
    penalised,
    rule_of,
    weights_of,
)
from model_worker.engines.exllamav2.sampling import kept, leave_typical
from protocol.request import SamplingParams
from tests.engines.draw_cases import SETTINGS, compare, draw_not_numbers, parameters, rows_of

VOCAB = 512
DRAWS = 10_000_000
LAUNCHES = int(os.environ.get("DRAW_LAUNCHES", "7813"))
"""Launches of 128 rows for each setting: a million draws. Settings with penalties have a tenth: their draws change what
is drawn next, so the reference computes each of them anew."""
SEED = int(os.environ.get("DRAW_SEED", random.randrange(1 << 32)))


@pytest.fixture(scope="module", autouse=True)
def seed() -> int:
    """Print the seed, and return it."""
    print(f"DRAW_SEED={SEED}")
    return SEED


def candidates(row: Any, setting: str) -> tuple[Any, Any]:
    rule = rule_of(parameters(setting), len(row))
    return candidates_of(weights_of(penalised(row, rule, 0, None, None, None), rule), rule)


WEIGHED = [
    name for name in SETTINGS if not any(word in name for word in ("greedy", "repetition", "penalties", "masks"))
]


# the reference


def test_powers_of_two_are_right_and_never_fall() -> None:
    y = -np.linspace(0, 59, 2_000_003, dtype=np.float32)
    powers = exp2_of(y)
    exact = np.exp2(y.astype(np.float64))
    assert np.abs(powers / exact - 1).max() < 3e-6
    assert exp2_of(np.float32([0.0]))[0] == 1.0
    assert exp2_of(np.float32([-61.0, -np.inf])).tolist() == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.parametrize("setting", WEIGHED)
def test_ten_million_draws_have_the_exact_distribution(setting: str) -> None:
    rng = np.random.default_rng(SEED)
    row = (rng.normal(size=VOCAB) * 3).astype(np.float16)
    ids, sums = candidates(row, setting)
    aims = [int(sums[-1]) * int(point) >> POINT_BITS for point in rng.integers(0, 1 << 53, 2000)]
    assert all(int(sums[-1]) > aim for aim in aims)
    # The product of 53 and 57 bits by halves, as numpy has no wider integers.
    points = rng.integers(0, 1 << 53, DRAWS, dtype=np.int64)
    high, low = divmod(int(sums[-1]), 1 << 29)
    top = points >> 26
    bottom = points & ((1 << 26) - 1)
    aim = (top * high >> 0).astype(np.float64) * 2.0**2 + (top * low).astype(np.float64) * 2.0**-27
    aim += (bottom * high).astype(np.float64) * 2.0**-24 + (bottom * low).astype(np.float64) * 2.0**-53
    drawn = np.searchsorted(sums.astype(np.float64), aim, side="right")
    observed = np.bincount(np.minimum(drawn, len(ids) - 1), minlength=len(ids))
    rule = rule_of(parameters(setting), VOCAB)
    x = row[ids].astype(np.float64)
    top_x = float(row.max())
    z = -((x - top_x) ** 2) if rule.smoothed else x - top_x
    expected = np.exp2(z * float(rule.scale))
    expected *= DRAWS / expected.sum()
    large = expected >= 20
    rest = observed[~large].sum(), expected[~large].sum()
    chi = float(((observed[large] - expected[large]) ** 2 / expected[large]).sum())
    if rest[1] >= 20:
        chi += float((rest[0] - rest[1]) ** 2 / rest[1])
    freedom = max(int(large.sum()) + (rest[1] >= 20) - 1, 1)
    # Wilson and Hilferty's normal approximation: beyond 6 standard deviations in one of a billion runs.
    deviations = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert deviations < 6, (chi, freedom)


TYPICAL = [name for name in WEIGHED if "typical" in name]


def test_logarithms_are_right_and_never_fall() -> None:
    mantissas = log2_of(np.arange(1 << 23, 1 << 24, dtype=np.int64))
    exact = (np.log2(np.arange(1 << 23, 1 << 24)) - 23) * 65536
    assert (np.diff(mantissas) >= 0).all()
    assert np.abs(mantissas - (23 << 16) + 0.5 - exact).max() < 0.6
    assert log2_of(np.int64([0, 1, 2, 1 << 40])).tolist() == [0, 0, 1 << 16, 40 << 16]


@pytest.mark.parametrize("setting", TYPICAL)
def test_typical_p_keeps_what_transformers_keeps_and_the_host(setting: str) -> None:
    transformers = pytest.importorskip("transformers")
    rng, sampling = np.random.default_rng(SEED), parameters(setting)
    others = rule_of(sampling.but(typical_p=1.0), 1000)
    warper = transformers.TypicalLogitsWarper(sampling.typical_p)
    for number, row in enumerate(rows_of(rng, 64, 1000)):
        if number % 8 == 3:
            continue  # many equal weights: transformers keeps some of those at the limit
        ids = candidates(row, setting)[0]
        cut = candidates_of(weights_of(penalised(row, others, 0, None, None, None), others), others)[0]
        scores = np.full(1000, -np.inf)
        scores[cut] = row[cut].astype(np.float64) * float(others.scale) * np.log(2)
        warped = warper(None, torch.from_numpy(scores[None]))[0].numpy()
        for theirs in (np.flatnonzero(warped > -np.inf), host_keeps(row, sampling)):
            probabilities = np.exp(scores - np.max(scores))
            probabilities /= probabilities.sum()
            differ = np.setxor1d(ids[probabilities[ids] > 1e-9], theirs[probabilities[theirs] > 1e-9])
            # at the limit, rounding decides between weights that are as good as equal
            equal = len(differ) <= 1 or np.ptp(np.log(probabilities[differ])) < 1e-4
            assert equal or probabilities[differ].sum() < 1e-5, (setting, number, differ)


def host_keeps(row: Any, sampling: SamplingParams) -> Any:
    """Return the ids that a draw by the host may give."""
    logits = row.astype(np.float32)
    count = leave_typical(logits, kept(logits, sampling), sampling)
    ids = np.lexsort((-np.arange(len(logits)), -logits))
    return ids[:count]


CUT = [name for name in WEIGHED if name not in ("plain", "cold", "hot", "smoothed", *TYPICAL)]


@pytest.mark.parametrize("setting", CUT)
def test_cuts_keep_as_many_as_those_of_the_host(setting: str) -> None:
    rng = np.random.default_rng(SEED)
    sampling = parameters(setting)
    for row in rows_of(rng, 64, 1000):
        if np.isneginf(row).any():
            continue
        ids, sums = candidates(row, setting)
        count = kept(row.astype(np.float32), sampling)
        if setting == "top_k" or setting == "top_k 1 to 3":
            count = sampling.top_k
        weight = np.diff(sums, prepend=0)
        if len(ids) != count:  # a sum or a weight met a threshold within rounding
            share = sums / sums[-1]
            assert abs(len(ids) - count) <= max(2, int((np.abs(share - share[min(count, len(ids)) - 1]) < 1e-5).sum()))
        assert (np.diff(weight) <= 0).all()


def test_ties_are_drawn_by_descending_id_where_a_cut_sorts_and_by_id_elsewhere() -> None:
    row = np.full(10, 1.0, np.float16)
    ids, _ = candidates(row, "top_k 1 to 3")
    assert ids.tolist() == [9, 8, 7]
    assert candidates(row, "plain")[0].tolist() == list(range(10))
    rule = rule_of(SamplingParams(temperature=0), 10)
    assert draw(row.astype(np.float32), rule, 0) == 0, "greedy takes the lowest id"


def test_points_at_the_ends_and_rows_with_one_token() -> None:
    for setting in WEIGHED:
        rule = rule_of(parameters(setting), 8)
        one = np.full(8, -np.inf, np.float32)
        one[5] = -2.0
        for point in (0, 1, (1 << 53) - 1):
            assert draw(one, rule, point) == 5
        with pytest.raises(ValueError, match="not numbers"):
            draw(np.full(8, -np.inf, np.float32), rule, 0)
        with pytest.raises(ValueError, match="not numbers"):
            draw(np.float32([0, np.nan, 1, 2, 3, 4, 5, 6]), rule, 0)


def test_a_penalty_counts_from_where_a_token_stands_last() -> None:
    sampling = SamplingParams(temperature=1, repetition_penalty=2.0, penalty_range=2, repetition_decay=4)
    rule = rule_of(sampling, 8)
    seen = np.int32([0, 10, 9, 8, 7, 6, 5, 4])  # distances 0, 1, ... of ids 1, 2, ...
    x = penalised(np.full(8, 4.0, np.float16), rule, 10, seen, None, None)
    assert (4.0 / x).tolist() == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0])
    x = penalised(np.full(8, -4.0, np.float16), rule, 10, seen, None, None)
    assert (x / -4.0).tolist() == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0])


def test_what_the_rule_covers() -> None:
    assert draws_by_rule(SamplingParams(temperature=0.7, top_p=0.9, typical_p=0.9, repetition_penalty=1.1))
    assert draws_by_rule(SamplingParams(temperature=0, mirostat_mode=2)), "a greedy draw is one"
    for options in (
        {"mirostat_mode": 2}, {"dry_multiplier": 0.8}, {"xtc_probability": 0.5}, {"cfg_scale": 1.5}, {"tfs": 0.9},
        {"skew": 0.2}, {"temperature_last": True}, {"min_temp": 0.5, "max_temp": 2.0},
    ):  # fmt: skip
        assert not draws_by_rule(SamplingParams.made(temperature=1.0, **options)), options


# the kernels


@pytest.mark.long
def test_the_kernels_draw_what_the_reference_draws_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is visible: the kernels themselves are tested")
    command = [sys.executable, "-m", "tests.engines.draw_cases", str(SEED)]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "draws are equal" in ran.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_kernels_draw_what_the_reference_draws(setting: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    most = LAUNCHES // 10 if rule_of(parameters(setting), VOCAB).needs_history else LAUNCHES
    for rows, small, large in ((1, 1000, 100), (8, 500, 25), (32, 200, 8), (128, most, 5)):
        compare("cuda", setting, rows, VOCAB, small, SEED)
        compare("cuda", setting, rows, 128_256, large, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [name for name in SETTINGS if rule_of(parameters(name), VOCAB).cuts])
def test_the_kernels_draw_what_the_reference_draws_from_rows_that_keep_many_tokens(setting: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    for rows, small in ((1, 500), (8, 200), (32, 100), (128, 50)):
        compare("cuda", setting, rows, VOCAB, small, SEED, most=4)
        compare("cuda", setting, rows, 128_256, 3, SEED, most=16)
    draw_not_numbers("cuda")
