"""Translate a request's sampling parameters to settings of ExLlamaV2's sampler. Does not import exllamav2.

The package's defaults are not neutral (temperature 0.8, top_k 50, top_p 0.8, repetition penalty 1.025), so every
setting is written here. The package's settings object keeps state (mirostat, DRY), so each job has its own.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from model_worker.engines.admission import is_greedy
from model_worker.engines.exllamav2.cut import MOST_SORTED
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams

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
