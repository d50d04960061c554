"""Log-probabilities of a prompt's tokens, from logits that are computed chunk by chunk.

This file imports torch. The checks of a job do not, and engines without torch use them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engine import PIECE, PromptLogprobs, PromptScoring

MOST_LOGITS = 1 << 24
"""Logits that are held at once: 64 MB in float32, which are 131 places of a vocabulary of 128,256 ids. All logits of a
prompt of 32,768 tokens would take 16 GB."""

Array = np.ndarray[Any, Any]


def places_at_once(vocab: int) -> int:
    """Return the number of places whose logits may be held at once."""
    return max(1, MOST_LOGITS // vocab)


def score(logits: torch.Tensor, tokens: Sequence[int], top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int64, log-probabilities float32), both [places, 1 + top]: the given token and the likeliest ones.

    logits  [places, vocab], of any floating type
    tokens  for each place the token of the prompt. A token beyond the vocabulary has a log-probability of -infinity
    """
    logits = logits.float()
    own = torch.tensor(tokens, device=logits.device)[:, None]
    known = own < logits.shape[-1]
    total = logits.logsumexp(-1, keepdim=True)
    likeliest = logits.topk(min(top, logits.shape[-1]), dim=-1)
    value = logits.gather(-1, torch.where(known, own, 0)).masked_fill(~known, float("-inf"))
    return torch.cat((own, likeliest.indices), -1), torch.cat((value, likeliest.values), -1) - total


class PromptPieces:
    """Cuts the log-probabilities of one prompt into the pieces that events report.

    prompt  the ids of the whole prompt
    top     the number of likeliest tokens at each place
    next    the number of the next token that has to be added
    """

    def __init__(self, job_id: int, prompt: Sequence[int], scoring: PromptScoring) -> None:
        self._job, self.prompt, self.top = job_id, prompt, scoring.top
        self.next = self._reported = scoring.first
        self._ids: list[Array] = []
        self._logprobs: list[Array] = []

    def wanted(self, begin: int, end: int) -> range:
        """Return the places to score among those that are computed, ``begin`` to ``end - 1``. A place tells of the
        token behind it."""
        return range(max(begin, self.next - 1), min(end, len(self.prompt) - 1))

    def behind(self, places: range) -> Sequence[int]:
        """Return the prompt's tokens behind these places."""
        return self.prompt[places.start + 1 : places.stop + 1]

    def add(self, ids: Array, logprobs: Array) -> list[PromptLogprobs]:
        """Add what ``score`` returned for the next places. Return the pieces that are complete."""
        self._ids.append(ids.astype("<u4"))
        self._logprobs.append(logprobs.astype("<f4"))
        self.next += len(ids)
        pieces: list[PromptLogprobs] = []
        while (size := self._size) and self._reported + size <= self.next:
            pieces.append(self._cut(size))
        return pieces

    def alone(self) -> list[PromptLogprobs]:
        """Return the only piece of a prompt of one token; no piece for any other prompt."""
        if len(self.prompt) > 1:
            return []
        return [PromptLogprobs(self._job, 1, 0, self.prompt[0], b"", b"")]

    @property
    def _size(self) -> int:
        """The number of tokens in the next piece."""
        last = min(-(-self._reported // PIECE) * PIECE, len(self.prompt) - 1)
        return max(0, last + 1 - self._reported)

    def _cut(self, size: int) -> PromptLogprobs:
        ids, logprobs = np.concatenate(self._ids), np.concatenate(self._logprobs)
        first, self._reported = self._reported, self._reported + size
        self._ids, self._logprobs = [ids[size:]], [logprobs[size:]]
        before = self.prompt[first - 1]
        top = ids.shape[1] - 1
        return PromptLogprobs(self._job, first, top, before, ids[:size].tobytes(), logprobs[:size].tobytes())
