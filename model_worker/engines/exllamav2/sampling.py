"""Translate a request's sampling parameters to settings of ExLlamaV2's sampler. Does not import exllamav2.

The package's defaults are not neutral (temperature 0.8, top_k 50, top_p 0.8, repetition penalty 1.025), so every
setting is written here. The package's settings object keeps state (mirostat, DRY), so each job has its own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from model_worker.engines.admission import is_greedy
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams

# DRY ("don't repeat yourself"): a penalty on tokens that would continue a sequence that occurred before.
#
# By p-e-w (text-generation-webui, pull request 5677): a token that followed an earlier occurrence of the newest n
# tokens loses multiplier * base ** (n - allowed_length). n is the length of the longest such occurrence. Occurrences
# shorter than allowed_length do not count.
#
# This replaces ExLlamaV2's own DRY, which builds a tree of all sequences of 20 tokens in Python. That takes 2 s for a
# prompt of 8,000 tokens, during which no answer goes on. It also penalizes nothing if the repeated sequence is longer
# than 20 tokens.


Array = np.ndarray[Any, Any]

LONGEST = 20
"""The most tokens of a repeated sequence that count. Longer repetitions get no higher penalty."""


def penalize(logits: Array, ids: Array, sampling: SamplingParams, breakers: Array) -> None:
    """Lower ``logits`` (float32 [vocabulary], in place) of tokens that would repeat ``ids`` (int64: prompt and answer).

    breakers  bool [vocabulary]: tokens that end a repeated sequence and are not penalized. Ids beyond the array count
              as breakers, too
    """
    if sampling.dry_range:
        ids = ids[-sampling.dry_range :]
    size = len(ids)
    ends = np.arange(size - 1)  # indices where an earlier occurrence of the newest tokens may end
    longest: dict[int, int] = {}
    for length in range(1, min(LONGEST, size) + 1):
        token = int(ids[size - length])
        if token >= len(breakers) or breakers[token]:
            break
        ends = ends[ends >= length - 1]
        ends = ends[ids[ends - (length - 1)] == token]
        if not len(ends):
            break
        if length >= sampling.dry_allowed_length:
            longest.update(dict.fromkeys(np.unique(ids[ends + 1]).tolist(), length))
    for token, length in longest.items():
        if token < len(breakers) and not breakers[token]:
            logits[token] -= sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)


# top_k, top_p, top_a, min_p, tfs and typical_p of draws by the host. Replaces kernels of ExLlamaV2 0.3.2.
#
# The package's top_p drops a token that crosses the limit and goes on with less likely ones. Of the probabilities
# 0.55, 0.25, 0.1, 0.05, ... and a top_p of 0.7 it draws from the first, third and fourth (cpp/sampling.cpp,
# top_p_cpu). Its top_a and min_p keep one token too many if all pass, and then write behind their buffers
# (keep_threshold). Each of the four filters keeps the likeliest tokens, and so does tfs. So the result is a number of
# tokens. The kernel gets that number as top_k, which it computes correctly.
#
# It computes a top_k above MOST_SORTED by sorting. Filters behind it sort what is sorted already, and the package's
# quicksort takes the square of the number of tokens for that: 12 s for a token after a top_k of 60,000. So more tokens
# are not left to top_k: the logits of all others become -inf. Two filters of the package that sort are never used
# together.
#
# The package's typical_p adds each probability to its own logarithm, and drops the token that crosses the limit
# (typical_cpu). The one here is that of the paper (arXiv:2202.00666), and of ``gpu_draws.rule``. It may leave out the
# likeliest tokens: their logits become -inf.


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


XTC_LOWEST = 0.01
"""The lowest xtc_threshold that is accepted. Each draw sorts as many tokens as could reach the threshold."""
XTC_HIGHEST = 0.5
"""Above this, XTC never leaves a token out, because two tokens cannot both be more likely than this."""

NEVER = float("-inf")
"""Bias of a token that must not be drawn."""


def settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the arguments of ExLlamaV2Sampler.Settings, except the bias.

    Frequency and presence penalty are left out: the package would count the prompt, too (see TokenBias). The
    others that are left out are wrong in 0.3.2, or too slow: top_p, top_a, min_p, tfs, typical_p and a large top_k
    (exllamav2.cut), DRY (exllamav2.dry) and XTC (exllamav2.xtc). Mirostat and XTC sort, and so does skew. Beside them
    the skew is applied by AnswerJob.
    """
    greedy = is_greedy(sampling)
    mirostat = not greedy and sampling.mirostat_mode == 2
    dynamic = not greedy and sampling.max_temp > sampling.min_temp
    return {
        "token_repetition_penalty": sampling.repetition_penalty,
        "token_repetition_range": sampling.penalty_range,
        "token_repetition_decay": sampling.repetition_decay,
        "token_frequency_penalty": 0.0,
        "token_presence_penalty": 0.0,
        "dry_multiplier": 0.0,
        "temperature": 1.0 if greedy else sampling.temperature,
        "temperature_last": not greedy and sampling.temperature_last,
        "smoothing_factor": 0.0 if greedy else sampling.smoothing_factor,
        "min_temp": sampling.min_temp if dynamic else 0.0,
        "max_temp": sampling.max_temp if dynamic else 0.0,
        "temp_exponent": sampling.temp_exponent,
        "top_k": 1 if greedy else sampling.top_k if sampling.top_k <= MOST_SORTED else 0,
        "top_p": 0.0,
        "top_a": 0.0,
        "min_p": 0.0,
        "tfs": 0.0,
        "typical": 0.0,
        "skew": 0.0 if greedy or mirostat or xtc_is_on(sampling) else sampling.skew,
        "mirostat": mirostat,
        "mirostat_tau": sampling.mirostat_tau,
        "mirostat_eta": sampling.mirostat_eta,
        "xtc_probability": 0.0,
        "cfg_scale": None if sampling.cfg_scale == 1.0 else sampling.cfg_scale,
    }


def xtc_is_on(sampling: SamplingParams) -> bool:
    return sampling.xtc_probability > 0 and sampling.xtc_threshold <= XTC_HIGHEST and not is_greedy(sampling)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise RequestError for parameters that are not computed, or that fail an assertion of the package in the middle
    of a step."""
    if xtc_is_on(sampling) and sampling.xtc_threshold < XTC_LOWEST:
        raise RequestError(
            f"xtc_threshold is {sampling.xtc_threshold}: this model's engine takes {XTC_LOWEST} or more",
            field="xtc_threshold",
        )
    if xtc_is_on(sampling) and sampling.mirostat_mode:
        raise RequestError(
            "xtc_probability and mirostat_mode are not offered together",
            field="xtc_probability",
            code=ErrorCode.UNSUPPORTED,
        )


class TokenBias:
    """The value added to a job's logits: biases, exclusions, and the penalties that count only the answer.

    Excluded ids are -inf.

    tensor   float32 [padded vocabulary]
    base     the same without the penalties
    counted  how often each token stands in the answer, if that counts
    """

    def __init__(self, sampling: SamplingParams, padded: int, eos_ids: Iterable[int]) -> None:
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self.counts = bool(self._frequency or self._presence)
        self.counted: dict[int, int] = {}
        bias = torch.full((padded,), NEVER if sampling.allowed_tokens else 0.0, dtype=torch.float32)
        bias[list(sampling.allowed_tokens)] = 0.0
        for token, value in (sampling.logit_bias or {}).items():
            bias[token] += value
        bias[list(sampling.banned_tokens)] = NEVER
        if sampling.ignore_eos:
            bias[[token for token in eos_ids if token < padded]] = NEVER
        self.tensor = bias
        self.base = bias.clone() if self.counts else bias
        self._values = bias.numpy()  # the same memory: an access takes a tenth of the time

    @staticmethod
    def of(sampling: SamplingParams, padded: int, eos_ids: Iterable[int]) -> "TokenBias | None":
        """Return the bias of a request, or None if nothing would ever be added."""
        used = (
            sampling.frequency_penalty, sampling.presence_penalty, sampling.logit_bias, sampling.banned_tokens,
            sampling.allowed_tokens, sampling.ignore_eos,
        )  # fmt: skip
        return TokenBias(sampling, padded, eos_ids) if any(used) else None

    def count(self, token: int) -> None:
        """Count one more token of the answer."""
        seen = self.counted.get(token, 0)
        self.counted[token] = seen + 1
        self._values[token] -= self._frequency if seen else self._frequency + self._presence

    def count_only(self, tokens: Iterable[int]) -> None:
        """Count only ``tokens`` as the answer, after other tokens were taken back."""
        if not self.counts:
            return
        for token, seen in self.counted.items():
            self._values[token] += self._presence + seen * self._frequency
        self.counted.clear()
        for token in tokens:
            self.count(token)


class PieceSearch:
    """Finds the tokens whose text holds a string. It searches all at once: a millisecond or two for a large
    vocabulary."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._text = np.frombuffer("\0".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
        lengths = np.fromiter((len(piece) + 1 for piece in pieces), np.int64, len(pieces))
        self._ends = np.cumsum(lengths)
        self.holding = lru_cache(maxsize=256)(self._holding)

    def _holding(self, text: str) -> frozenset[int]:
        """Return the ids of the tokens whose text contains ``text``."""
        at = np.arange(len(self._text) - len(text) + 1)
        for offset, character in enumerate(text):
            at = at[self._text[at + offset] == ord(character)]
        return frozenset(np.unique(np.searchsorted(self._ends, at, side="right")).tolist())
