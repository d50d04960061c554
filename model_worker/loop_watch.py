"""Find out whether an answer repeats itself (option ``stop_on_loop``). Does not import torch.

An answer loops if its last N tokens are one block of at most N / 3 tokens, written again and again. So the block is
there three times at least, and the last time may be cut. In other words, the last N tokens have a period p <= N // 3:
each of them, except for the first p, is the same token as the one p places before it.
"""

import numpy as np

REPEATS = 3
"""How often a block has to be there."""


class LoopWatch:
    """Takes the tokens of one answer, and says when the answer loops.

    A token costs a few operations on arrays of N / 3 numbers: about 3 microseconds for an N of 300, and 5 for 4096. The
    cost does not depend on the tokens, so no text makes it slow.

    length  N
    """

    __slots__ = ("_at", "_ids", "_needed", "_periods", "_runs")

    def __init__(self, length: int) -> None:
        most = self._periods = length // REPEATS
        # The last tokens begin at _at, the newest one first. Before _at is room for new ones. When there is none left,
        # the last tokens move to the back.
        self._ids = np.full(8 * most + 1, -1, np.int64)
        self._at = len(self._ids) - most
        # For each period p, how many tokens in a row equal the one p places before them.
        self._runs = np.zeros(most, np.int64)
        self._needed = length - np.arange(1, most + 1)

    def push(self, token: int) -> bool:
        """Take the next token. Return whether the answer loops now."""
        at, ids = self._at, self._ids
        if at == 0:
            kept = ids[: self._periods].copy()
            at = len(ids) - self._periods
            ids[at:] = kept
        equal = ids[at : at + self._periods] == token
        self._runs += 1
        self._runs *= equal
        self._at = at - 1
        ids[self._at] = token
        return bool((self._runs >= self._needed).any())
