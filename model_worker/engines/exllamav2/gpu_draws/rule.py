"""The rule by which a token is drawn, in numpy: slow, and the reference for the kernels. They agree bit for bit.

ExLlamaV2's own sampler cannot be that reference: it is compiled with -Ofast, so that two builds need not agree on a
token, and a sum of a row on a GPU has another order. Here every sum is one of integers, which has no order.

1. The logits are fp16 numbers, computed with as float32. All operations on float32 are rounded one by one.
2. Repetition penalty ``p``: x becomes x / p if x > 0, else x * p. A token's distance is the number of tokens since it
   was seen last, 0 for the newest. Up to the range p is the whole penalty. Each token beyond adds (1 - p) / decay.
3. Frequency and presence: for a token that stands ``n`` times in the answer, frequency * n + presence is subtracted.
4. The bias of the token is added. It is -inf for a token that must not be drawn.
5. Greedy (temperature 0, or below 0.01, or top_k 1): the lowest id of the largest values.
6. Otherwise the weight of a token is floor(2**40 * 2**y). y is (x - largest) * scale, or with a ``smoothing_factor``
   -(x - largest)**2 * scale, where scale is log2(e) / temperature, times that factor. ``exp2_of`` computes the power.
7. Candidates stand in the order of their weights, the largest first, equal ones by descending id. Each cut keeps the
   first of them. top_k keeps that many, and top_p the fewest whose weights sum to more than that share. top_a keeps
   weights of top_a * (largest weight)**2 / sum or more, and min_p weights of min_p * (largest weight) or more. At least
   one is kept. Without a cut, candidates stand in the order of their ids.
8. typical_p looks at what those cuts have left (Meister et al. 2022, arXiv:2202.00666). The deviation of a weight is
   the distance of its logarithm from the mean of all logarithms, each counted with its weight: the distance of a
   token's information from the expected one. The fewest deviations are kept, the smallest first, whose weights sum to
   more than the share. Equal ones are kept together. The order stays as it is. ``log2_of`` computes logarithms.
9. A point is a number of 53 bits, ``point / 2**53`` of the sum of the weights that are left. The drawn candidate is the
   first up to which the weights sum to more than that.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_worker.engines.admission import is_greedy
from protocol.request import SamplingParams

Array = np.ndarray[Any, Any]

WEIGHT_BITS = 40
POINT_BITS = 53
HUGE = np.float32(3e38)
"""Bounds of penalised logits and of the scale. The difference of two infinities is no number."""
COLDEST = 0.01
"""Below this temperature a draw is greedy, as in the package (ext_sampling.cpp, sample_basic)."""
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
LOG2_E = 1.4426950408889634
LOG2_BITS = 16
LOG2 = tuple(np.float32(2 * LOG2_E / n) for n in (1, 3, 5, 7, 9, 11))
"""Coefficients of log2(m) for 1 <= m < 2, by odd powers of (m - 1) / (m + 1). The error is below 4e-7."""
_MANTISSA = (1 << 23) - 1
LOWEST_POWER = -60.0
"""Powers of 2 below this are 0: their weight would be."""
EXP2 = tuple(
    np.float32(c)
    for c in (1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477,
              0.0013333558146428443, 0.00015403530393381608, 1.5252733804059840e-05)
)  # fmt: skip
"""Coefficients of 2**f for 0 <= f < 1: the Taylor series, ln(2)**n / n!. The error is below 2e-6 of the value."""


@dataclass(frozen=True)
class DrawRule:
    """The parameters of one row's draws, as the kernels read them.

    greedy          whether the likeliest token is drawn; nothing of what follows is used then, except penalties
    scale           log2(e) / temperature, times the smoothing factor if there is one
    smoothed        whether z is -(x - largest)**2 * scale
    top_k           0: off
    top_p           of 2**64; 0: off
    top_a           0: off
    min_p           least weight; 0: off
    typical_p       of 2**64; 0: off
    penalty         repetition penalty; 1: off
    fade            by which the penalty changes for each token of distance beyond ``penalty_range``
    penalty_range   tokens; -1: all
    penalty_end     distance from which on there is no penalty
    """

    greedy: bool
    scale: np.float32
    smoothed: bool = False
    top_k: int = 0
    top_p: int = 0
    top_a: float = 0.0
    min_p: int = 0
    typical_p: int = 0
    penalty: np.float32 = _ONE
    fade: np.float32 = _ZERO
    penalty_range: int = -1
    penalty_end: int = 1 << 30
    frequency: np.float32 = _ZERO
    presence: np.float32 = _ZERO

    @property
    def needs_history(self) -> bool:
        return bool(self.penalty != 1 or self.frequency or self.presence)

    @property
    def cuts(self) -> bool:
        return bool(self.top_k or self.top_p or self.top_a or self.min_p or self.typical_p)


def draws_by_rule(sampling: SamplingParams) -> bool:
    """Return whether the rule covers the parameters. Other draws are the host's, with the package's sampler."""
    if is_greedy(sampling):
        return not sampling.dry_multiplier and sampling.cfg_scale == 1.0
    return (
        sampling.mirostat_mode == 0
        and not sampling.dry_multiplier
        and not sampling.xtc_probability
        and sampling.cfg_scale == 1.0
        and sampling.tfs in (0.0, 1.0)
        and not sampling.skew
        and not sampling.temperature_last
        and not sampling.max_temp > sampling.min_temp
    )


def rule_of(sampling: SamplingParams, vocab: int) -> DrawRule:
    """Return the rule's parameters for a request that ``draws_by_rule``. Ids below ``vocab`` can be drawn."""
    greedy = is_greedy(sampling) or sampling.temperature < COLDEST
    smoothed = not greedy and sampling.smoothing_factor > 0
    scale = 1.0 if greedy else (sampling.smoothing_factor if smoothed else 1.0) / sampling.temperature
    decay, penalised = sampling.repetition_decay, sampling.repetition_penalty != 1.0
    return DrawRule(
        greedy=greedy,
        scale=np.float32(min(scale * LOG2_E, float(HUGE))),
        smoothed=smoothed,
        top_k=sampling.top_k if 0 < sampling.top_k < vocab else 0,
        top_p=_share(sampling.top_p),
        top_a=sampling.top_a,
        min_p=int(np.ceil(sampling.min_p * 2.0**WEIGHT_BITS)),
        typical_p=_share(sampling.typical_p),
        penalty=np.float32(sampling.repetition_penalty),
        fade=np.float32((1.0 - sampling.repetition_penalty) / decay) if decay else np.float32(0.0),
        penalty_range=sampling.penalty_range,
        penalty_end=1 << 30 if sampling.penalty_range < 0 or not penalised else sampling.penalty_range + decay,
        frequency=np.float32(sampling.frequency_penalty),
        presence=np.float32(sampling.presence_penalty),
    )


def _share(value: float) -> int:
    """Return a share of 2**64; 0 for one that cuts nothing."""
    return int(value * 2.0**64) if 0 < value < 1 else 0


def penalised(
    logits: Array, rule: DrawRule, position: int, last_seen: Array | None, counts: Array | None, bias: Array | None
) -> Array:
    """Return float32 [vocabulary]: the logits after penalties and bias.

    position   tokens of the sequence so far
    last_seen  for each token, one more than the position where it stands last; 0: nowhere. None: no repetition penalty
    counts     how often each token stands in the answer
    """
    x = logits.astype(np.float32)
    if last_seen is not None and rule.penalty != 1:
        distance = position - last_seen.astype(np.int64)
        beyond = distance - rule.penalty_range if rule.penalty_range >= 0 else np.zeros_like(distance)
        p = rule.penalty + rule.fade * np.maximum(beyond, 0).astype(np.float32)
        p = np.where((last_seen > 0) & (distance < rule.penalty_end), p, np.float32(1.0))
        with np.errstate(all="ignore"):
            x = np.clip(np.where(x > 0, x / p, x * p), -HUGE, HUGE)
    if counts is not None:
        n = counts.astype(np.float32)
        x = x - np.where(counts > 0, rule.frequency * n + rule.presence, np.float32(0.0))
    return x if bias is None else x + bias


def exp2_of(y: Array) -> Array:
    """Return 2**y for float32 y <= 0. Each operation is rounded by itself; 0 below LOWEST_POWER."""
    none = y < np.float32(LOWEST_POWER)
    y = np.where(none, _ZERO, y)
    whole = np.floor(y)
    part = y - whole
    value = np.full_like(y, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        value = value * part + coefficient
    return np.where(none, _ZERO, np.ldexp(value, whole.astype(np.int32)))


def weights_of(x: Array, rule: DrawRule) -> Array:
    """Return int64 [vocabulary]: the weights of the tokens, from what ``penalised`` returned."""
    with np.errstate(all="ignore"):
        below = np.where(x == x.max(), _ZERO, x - x.max())
        z = -(below * below) if rule.smoothed else below
        y = np.where(np.isneginf(x), np.float32(-np.inf), z * rule.scale)
        return np.floor(exp2_of(y.astype(np.float32)) * np.float32(2.0**WEIGHT_BITS)).astype(np.int64)


def candidates_of(weights: Array, rule: DrawRule) -> tuple[Array, Array]:
    """Return (ids, cumulated weights) of the candidates that are left, in the rule's order."""
    if not rule.cuts:
        return np.arange(len(weights)), np.cumsum(weights)
    total = int(weights.sum())
    ids = np.flatnonzero(weights >= _threshold(weights, total, rule))
    ids = ids[np.lexsort((-ids, -weights[ids]))]
    ordered = weights[ids]
    sums = np.cumsum(ordered)
    count = len(ids)
    if rule.top_k:
        count, total = rule.top_k, int(sums[rule.top_k - 1])
    if rule.top_p:
        target = (total * rule.top_p >> 64) + 1
        count = min(count, int(np.searchsorted(sums, target)) + 1)
        total = int(sums[count - 1])
    if rule.top_a:
        least = np.ceil(np.float64(rule.top_a * 2.0 ** (2 * WEIGHT_BITS)) / np.float64(total))
        count = min(count, int((ordered >= least).sum()))
    if rule.min_p:
        count = min(count, int((ordered >= rule.min_p).sum()))
    count = max(count, 1)
    ids, sums = ids[:count], sums[:count]
    return _typical(ids, ordered[:count], sums, rule.typical_p) if rule.typical_p else (ids, sums)


def log2_of(weights: Array) -> Array:
    """Return int64: the logarithms of weights to the base 2, of 2**LOG2_BITS, rounded down. A weight of 0 counts as 1.

    They never fall where the weights rise, so the weights of the smallest deviations are neighbours.
    """
    bits = np.maximum(weights, 1).astype(np.float32).view(np.int32)
    exponent = (bits >> 23).astype(np.int64) - 127
    m = (bits & _MANTISSA | 127 << 23).view(np.float32)
    s = (m - _ONE) / (m + _ONE)
    value = np.full_like(s, LOG2[-1])
    for coefficient in reversed(LOG2[:-1]):
        value = value * (s * s) + coefficient
    return (exponent << LOG2_BITS) + np.floor(value * s * np.float32(1 << LOG2_BITS)).astype(np.int64)


def _typical(ids: Array, weights: Array, sums: Array, share: int) -> tuple[Array, Array]:
    """Return (ids, cumulated weights) of the candidates that typical_p leaves."""
    total, logs = int(sums[-1]), log2_of(weights)
    # By halves of 20 bits: the sum of all products needs more than 64 bits.
    high, low = int(((weights >> 20) * logs).sum()), int(((weights & (1 << 20) - 1) * logs).sum())
    mean = int(np.floor((np.float64(high) * 2.0**20 + np.float64(low)) / np.float64(total)))
    deviations = np.abs(logs - mean)
    order = np.argsort(deviations, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weights[order]), (total * share >> 64) + 1))
    left = deviations <= deviations[order[enough]]
    return ids[left], np.cumsum(weights[left])


def _threshold(weights: Array, total: int, rule: DrawRule) -> int:
    """Return a weight below which no candidate of the first cut lies, so that few have to be sorted."""
    target = (total * rule.top_p >> 64) + 1
    for bits in range(WEIGHT_BITS - 4, 0, -4):
        likely = weights >= 1 << bits
        if rule.top_k:
            suffices = int(likely.sum()) >= rule.top_k
        elif rule.top_p:
            suffices = int(weights[likely].sum()) >= target
        else:
            least = max(rule.min_p, math.ceil(rule.top_a * 2.0 ** (2 * WEIGHT_BITS) / total))
            suffices = least >= 1 << bits
        if suffices:
            return 1 << bits
    return 0


def aim_of(point: int, sums: Array) -> int:
    """Return the cumulated weight that a point of 53 bits stands for."""
    return int(sums[-1]) * point >> POINT_BITS


def pick(point: int, ids: Array, sums: Array) -> int:
    """Return the candidate that a point of 53 bits selects."""
    return int(ids[np.searchsorted(sums, aim_of(point, sums), side="right")])


def draw(x: Array, rule: DrawRule, point: int) -> int:
    """Return the token drawn from what ``penalised`` returned. Raises ValueError if that holds a NaN, or only -inf."""
    if np.isnan(x).any() or np.isneginf(x).all():
        raise ValueError("the logits are not numbers")
    if rule.greedy:
        return int(x.argmax())
    return pick(point, *candidates_of(weights_of(x, rule), rule))
