"""Draw tokens by the rule, slowly, on the CPU. The kernels for the GPU give the same tokens, bit for bit.

All functions take many rows at once. Each operation on float32 arrays is rounded to float32, in the order written here.
"""

from typing import Any

import numpy as np

from model_worker.engines.draw_rule.rule import ID_BITS, ONE, Rule

Array = np.ndarray[Any, Any]
NEVER = np.float32(-np.inf)

OK, NOT_NUMBERS, NOTHING_LEFT = 0, 1, 2
"""What becomes of a row: a token; a logit is not a number; every token is excluded. The last two give the id 0."""

_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # a product of _LN2_HIGH with n is exact
_POLYNOMIAL = [
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
]
_LOWEST = np.float32(-64)
"""Exponents below this give the weight 0."""


def penalized(x: Array, rule: Rule, last_seen: Array, length: int) -> Array:
    """Return float32 logits [vocabulary] with the repetition penalty.

    last_seen  [vocabulary]: the place of a token's last occurrence, counted from 1; 0 for a token that does not occur
    length     tokens of prompt and answer
    """
    back = length - last_seen.astype(np.int64)
    beyond = np.maximum(back - rule.reach_full, 0).astype(np.float32)
    penalty = np.float32(rule.repetition) + beyond * np.float32(rule.fade)
    hit = (last_seen > 0) & (back < rule.reach)
    with np.errstate(all="ignore"):
        return np.where(hit, np.where(x > 0, x / penalty, x * penalty), x)


def biased(x: Array, rule: Rule, bias: Array | None = None, count: Array | None = None) -> Array:
    """Return float32 logits with a bias, less frequency and presence penalty.

    bias   float32 [vocabulary], -inf for excluded tokens
    count  [vocabulary]: how often the answer holds each token
    """
    total = np.zeros_like(x) if bias is None else bias
    if count is not None:
        times = count.astype(np.float32)
        presence = np.where(count > 0, np.float32(rule.presence), np.float32(0))
        total = total - (times * np.float32(rule.frequency) + presence)
    return np.where((total == NEVER) & (x == x), NEVER, x + total)


def limited(x: Array, excluded: Array) -> Array:
    """Return logits with -inf where ``excluded`` is true. A NaN stays."""
    return np.where(excluded & (x == x), NEVER, x)


def weights(x: Array, rule: Rule) -> Array:
    """Return the weights, int64 [rows, vocabulary], of logits whose maximum is finite: 0 to 2**40."""
    with np.errstate(all="ignore"):
        t = x - x.max(-1, keepdims=True)
        if rule.smooth:
            t = t * -t
        s = np.maximum(t * np.float32(rule.slope), _LOWEST)
        n = np.floor(s * _LOG2E + np.float32(0.5))
        r = (s - n * _LN2_HIGH) - n * _LN2_LOW
        y = np.full_like(r, _POLYNOMIAL[0])
        for c in _POLYNOMIAL[1:]:
            y = y * r + c
        y = (y * (r * r) + r) + np.float32(1)  # exp(r), from 0.7 to 1.42
    mantissa = (y * np.float32(1 << 24)).astype(np.int64)  # exact
    shift = np.minimum((-n).astype(np.int64), 63)
    return np.asarray(np.minimum((mantissa << 16) >> shift, ONE))


def share_of(share: Array | int, total: Array) -> Array:
    """Return share * total >> 53, exactly, for a share below 2**53 and totals below 2**57."""
    a, b = np.asarray(share, np.uint64) << np.uint64(11), np.asarray(total, np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    return np.asarray((a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)).astype(np.int64))


class Candidates:
    """The tokens of each row that can be drawn, in the order of the rule.

    ids     int64 [rows, vocabulary]
    sums    int64 [rows, vocabulary]: the weights' sums, up to and including each candidate
    count   int64 [rows]: the candidates that remain after top_k, top_p, top_a and min_p
    total   int64 [rows]: the sum of their weights
    """

    def __init__(self, x: Array, rule: Rule) -> None:
        rows, size = x.shape
        w = weights(x, rule)
        if not rule.cuts:
            self.ids = np.broadcast_to(np.arange(size), w.shape)
            self.sums = w.cumsum(-1)
            self.count, self.total = np.full(rows, size), self.sums[:, -1]
            return
        keys = np.sort(w << ID_BITS | np.arange(size), -1)[:, ::-1]
        w = keys >> ID_BITS
        self.ids, self.sums = keys & ((1 << ID_BITS) - 1), w.cumsum(-1)
        self._rows = np.arange(rows)
        self._keep(np.full(rows, rule.top_k or size))
        if rule.top_p:
            target = np.maximum(share_of(rule.top_p, self.total), 1)
            self._keep((self.sums < target[:, None]).sum(-1) + 1)
        if rule.top_a:
            # w * total >> 40 >= top_a: the probability is at least top_a times the square of the highest probability.
            self._keep((_scaled(w, self.total[:, None]) >= rule.top_a).sum(-1))
        if rule.min_p:
            self._keep((w >= rule.min_p).sum(-1))

    def _keep(self, count: Array) -> None:
        self.count = np.minimum(count, getattr(self, "count", count))
        self.total = self.sums[self._rows, self.count - 1]

    def at(self, points: Array) -> Array:
        """Return the ids at ``points`` (int64 [rows] or [rows, n], below 2**53)."""
        return self.located(share_of(points, self.total.reshape(-1, *[1] * (points.ndim - 1))))

    def located(self, marks: Array) -> Array:
        """Return the first ids whose sum exceeds ``marks``."""
        rows = range(len(self.ids))
        found = [self.ids[row][self.sums[row].searchsorted(marks[row], side="right")] for row in rows]
        return np.array(found)


def _scaled(w: Array, total: Array) -> Array:
    """Return w * total >> 40, exactly."""
    return share_of(w << 6, total << 7)


def draw(x: Array, rule: Rule, points: Array) -> tuple[Array, Array]:
    """Return (ids, states) of rows of logits after all penalties, biases and limits.

    x       float32 [rows, drawable ids]
    points  int64 [rows]
    """
    ids = np.zeros(len(x), np.int64)
    states = np.where(np.isnan(x).any(-1), NOT_NUMBERS, OK)
    top = np.where(states == OK, x.max(-1), 0)
    states = np.where(top == NEVER, NOTHING_LEFT, states)
    simple = (states == OK) & (rule.greedy | np.isposinf(top))
    ids[simple] = x[simple].argmax(-1)
    rest = (states == OK) & ~simple
    if rest.any():
        ids[rest] = Candidates(x[rest], rule).at(points[rest])
    return ids, states
