"""top_k, top_p, top_a, min_p, tfs and typical_p of draws by the host. Replaces kernels of ExLlamaV2 0.3.2.

The package's top_p drops a token that crosses the limit and goes on with less likely ones. Of the probabilities 0.55,
0.25, 0.1, 0.05, ... and a top_p of 0.7 it draws from the first, third and fourth (cpp/sampling.cpp, top_p_cpu). Its
top_a and min_p keep one token too many if all pass, and then write behind their buffers (keep_threshold). Each of the
four filters keeps the likeliest tokens, and so does tfs. So the result is a number of tokens. The kernel gets that
number as top_k, which it computes correctly.

It computes a top_k above MOST_SORTED by sorting. Filters behind it sort what is sorted already, and the package's
quicksort takes the square of the number of tokens for that: 12 s for a token after a top_k of 60,000. So more tokens
are not left to top_k: the logits of all others become -inf. Two filters of the package that sort are never used
together.

The package's typical_p adds each probability to its own logarithm, and drops the token that crosses the limit
(typical_cpu). The one here is that of the paper (arXiv:2202.00666), and of ``gpu_draws.rule``. It may leave out the
likeliest tokens: their logits become -inf.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from model_worker.engines.admission import is_greedy
from model_worker.engines.exllamav2.dry import penalize
from protocol.request import SamplingParams

Array = np.ndarray[Any, Any]

MOST_SORTED = 500
"""The most tokens that the package's top_k finds without sorting (sampling.cpp, top_k_heap_threshold)."""
_LIKELY = 1e-4
"""Share of the likeliest token's weight. Smaller weights are sorted only if the others do not add up to top_p."""


def is_cut(sampling: SamplingParams) -> bool:
    """Return whether a filter of this module is on. A small top_k alone is computed by the package's kernel."""
    shares = sampling.top_p, sampling.tfs, sampling.typical_p
    return not is_greedy(sampling) and (
        min(shares) < 1 or sampling.top_a > 0 or sampling.min_p > 0 or sampling.top_k > MOST_SORTED
    )


class BeforeDraw:
    """The filters of one job: DRY, top_k, top_p, top_a, min_p, tfs, typical_p. Each works on the tokens left by the one
    before.

    The package's sampler uses this object as a filter: it calls ``mask_logits`` with the logits after penalties and
    biases. ``settings`` is the package's object. This class sets its top_k again at each draw.

    breakers  see exllamav2.dry; None without DRY
    ids       returns prompt and answer so far
    vocab     ids below this can be drawn
    """

    def __init__(
        self, sampling: SamplingParams, settings: Any, vocab: int, breakers: Array | None, ids: Callable[[], Array]
    ) -> None:
        self._sampling, self._settings, self._vocab = sampling, settings, vocab
        self._breakers, self._ids, self._cuts = breakers, ids, is_cut(sampling)

    def can_mask_logits(self) -> bool:
        return True

    def get_next(self, mask: bool = False) -> bool:
        return mask

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Change float32 logits [padded vocabulary] in place, and return them."""
        row = logits.numpy()[: self._vocab]
        if self._breakers is not None:
            penalize(row, self._ids(), self._sampling, self._breakers)
        if self._cuts:
            self._settings.top_k = cut(row, self._sampling)
        return logits


def cut(logits: Array, sampling: SamplingParams) -> int:
    """Apply the filters to float32 logits [vocabulary], in place. Return the top_k that completes them, 0 for none.

    Raises RuntimeError for a NaN.
    """
    count = kept(logits, sampling)
    if count == 1:  # also where the largest logit is infinite, of which no mean can be taken
        return 1
    if sampling.tfs < 1:
        count = _tail_free(logits, count, sampling)
    if sampling.typical_p < 1:
        count = leave_typical(logits, count, sampling)
    if count <= MOST_SORTED:
        return count
    if count < len(logits):
        _leave_likeliest(logits, count)
    return 0


def _leave_likeliest(logits: Array, count: int) -> None:
    """Set the logits of all but the ``count`` likeliest tokens to -inf. Of equal ones those with the highest ids
    stay."""
    least = np.partition(logits, -count)[-count]
    equal = np.flatnonzero(logits == least)
    logits[equal[: int((logits >= least).sum()) - count]] = -np.inf
    logits[logits < least] = -np.inf


def _tail_free(logits: Array, count: int, sampling: SamplingParams) -> int:
    """Return how many of the ``count`` likeliest tokens tfs leaves (tfs_cpu of the package): the bends of the curve of
    probabilities up to the last one sum to the share."""
    if count < 3:
        return count
    weights = np.exp(np.sort(_scaled(logits, sampling))[::-1][:count].astype(np.float64))
    bends = np.cumsum(np.abs(np.diff(weights, 2)))
    return int(np.searchsorted(bends, sampling.tfs * bends[-1], side="right")) + 1


def leave_typical(logits: Array, count: int, sampling: SamplingParams) -> int:
    """Set the logits of tokens that are too likely for typical_p to -inf. Return how many of the likeliest remain, at
    least 1.

    logits  float32 [vocabulary], of which one is finite
    count   how many of the likeliest tokens the other cuts leave
    """
    ids = np.argsort(-logits, kind="stable")[:count]
    logs = _scaled(logits, sampling)[ids].astype(np.float64)
    weights = np.exp(logs)
    drawable = int(np.count_nonzero(weights))
    ids, logs, weights = ids[:drawable], logs[:drawable], weights[:drawable]
    deviations = np.abs(logs - (weights * logs).sum() / weights.sum())
    order = np.argsort(deviations, kind="stable")
    sums = np.cumsum(weights[order])
    enough = min(int(np.searchsorted(sums, sampling.typical_p * sums[-1])), drawable - 1)
    left = deviations <= deviations[order[enough]]
    logits[ids[: int(left.argmax())]] = -np.inf
    return int(left.sum())


def kept(logits: Array, sampling: SamplingParams) -> int:
    """Return how many of the likeliest tokens remain, at least 1 and at most len(logits). Raises RuntimeError for a
    NaN.

    logits  float32 [vocabulary]
    """
    top = float(logits.max())
    if math.isnan(top):
        raise RuntimeError("the model's logits are not numbers")
    if math.isinf(top):
        return 1
    weights = _scaled(logits, sampling)
    with np.errstate(under="ignore"):
        np.exp(weights, out=weights)  # the weight of the likeliest token is 1
    count, total = len(weights), float(weights.sum(dtype=np.float64))
    if 0 < sampling.top_k < count:
        count = sampling.top_k
        weights = np.partition(weights, len(weights) - count)[-count:]
        total = float(weights.sum(dtype=np.float64))
    if sampling.top_p < 1:
        count, total = _nucleus(weights, sampling.top_p * total)
    if sampling.top_a > 0:
        weights = weights[weights >= sampling.top_a / total]
        count = min(count, len(weights))
    if sampling.min_p > 0:
        count = min(count, int((weights >= sampling.min_p).sum()))
    return max(count, 1)


def _scaled(logits: Array, sampling: SamplingParams) -> Array:
    """Return the logarithms of the tokens' weights, float32; that of the likeliest is 0."""
    temperature = 1.0 if sampling.temperature_last else sampling.temperature
    scaled: Array = logits - logits.max()
    with np.errstate(over="ignore"):
        if sampling.smoothing_factor > 0:
            scaled *= -scaled
            temperature /= sampling.smoothing_factor
        scaled /= np.float32(temperature)
    return scaled


def _nucleus(weights: Array, share: float) -> tuple[int, float]:
    """Return (size, sum) of the smallest set of weights that sums to ``share``."""
    for candidates in (weights[weights >= _LIKELY], weights):
        sums = np.cumsum(np.sort(candidates)[::-1], dtype=np.float64)
        if len(sums) and sums[-1] >= share:
            break
    size = min(int(np.searchsorted(sums, share)) + 1, len(sums))
    return size, float(sums[size - 1])
