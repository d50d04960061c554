"""Guess the next tokens of a sequence from its own past, for speculation without a draft model.

The package's own code indexes beyond sequences of fewer than three tokens, which ends the process.
"""

from collections.abc import Sequence
from typing import Any

import torch

LONGEST = 3
"""The number of tokens in the longest run that is looked up."""


class NGrams:
    """A table of the token that last followed each run of one to three tokens. Costs a microsecond per token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._followed: dict[tuple[int, ...], int] = {}
        self._last: tuple[int, ...] = ()
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        last = self._last
        for begin in range(len(last)):
            self._followed[last[begin:]] = token
        self._last = (*last, token)[-LONGEST:]

    def propose(self, size: int) -> list[int]:
        """Return a guess of the next ``size`` tokens from the past. A token that has no precedent repeats the last one.

        Call ``push`` at least once before.
        """
        last, tokens = self._last, []
        for _ in range(size):
            guess = last[-1]
            for begin in range(len(last)):
                found = self._followed.get(last[begin:])
                if found is not None:
                    guess = found
                    break
            tokens.append(guess)
            last = (*last, guess)[-LONGEST:]
        return tokens


def propose_for_all(generator: Any) -> torch.Tensor | None:
    """Guess tokens for all jobs, in place of the package's code. Return ids [jobs, draft tokens], or None without
    jobs."""
    size = generator.num_draft_tokens
    rows = [job.past.propose(size) for job in generator.active_jobs if job.is_prefill_done()]
    return torch.tensor(rows, dtype=torch.long) if rows else None
