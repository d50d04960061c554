"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a sequence that occurred before.

By p-e-w (text-generation-webui, pull request 5677): a token that followed an earlier occurrence of the newest n tokens
loses multiplier * base ** (n - allowed_length). n is the length of the longest such occurrence. Occurrences shorter
than allowed_length do not count.

This replaces ExLlamaV2's own DRY, which builds a tree of all sequences of 20 tokens in Python. That takes 2 s for a
prompt of 8,000 tokens, during which no answer goes on. It also penalizes nothing if the repeated sequence is longer
than 20 tokens.
"""

from typing import Any

import numpy as np

from protocol.request import SamplingParams

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
