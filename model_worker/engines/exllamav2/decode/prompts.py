"""Read prompts by captured passes.

A pass over 256 tokens of an 8B model is 400 launches, which take the host about as long as the GPU takes to compute
them. Besides, the package copies the block table and the embedded tokens so that the host waits for all steps queued
before. A captured pass is one launch and waits for nothing, so it goes behind a step while running answers go on.

A pass has a fixed number of tokens. A shorter piece of a prompt is filled up with tokens whose keys and values land
behind the prompt's own, in the prompt's last page or in the spare page. No token attends to them: they are overwritten
before the sequence reaches their places.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import Row
from protocol.process.worker_spec import PAGE_TOKENS

MOST_PIECES = 2
"""A prompt's tokens are read by captured passes alone if they are no more than so many of the largest. More tokens are
computed faster in one pass of single launches, which take the host less time than the GPU."""


class PromptPasses:
    """The captured passes of one model.

    passes     by tokens, ascending; without heads, for one row
    positions  the model's positions: the rotary embedding of a pass must not reach beyond
    """

    def __init__(self, passes: Sequence[DecodeGraphs], positions: int) -> None:
        self._passes, self._positions = list(passes), positions
        self._largest = self._passes[-1].queries

    def launched(self, tokens: int) -> int:
        """Return how many of a prompt's next tokens are left to a pass of single launches, from the first."""
        return tokens // self._largest * self._largest if tokens > MOST_PIECES * self._largest else 0

    def read(self, tokens: list[int], start: int, table: Any) -> int:
        """Queue passes over ``tokens``. Return how many tokens they cover: fewer than all near the last position.

        start  tokens of the sequence in the cache
        table  int32: the numbers of the sequence's pages, in order
        """
        done = 0
        while done < len(tokens):
            piece = tokens[done : done + self._largest]
            graphs = self._fitting(len(piece), start + done)
            if graphs is None:
                break
            graphs.replay([_row(piece, start + done, table, graphs)])
            done += len(piece)
        return done

    def _fitting(self, tokens: int, start: int) -> DecodeGraphs | None:
        for graphs in self._passes:
            end = start + graphs.queries
            if tokens <= graphs.queries and end <= self._positions and graphs.fits(1, -(-end // PAGE_TOKENS)):
                return graphs
        return None


def _row(piece: list[int], start: int, table: Any, graphs: DecodeGraphs) -> Row:
    own = -(-(start + len(piece)) // PAGE_TOKENS)
    # The sequence's next page may hold tokens of others that are in use again: it must not be written.
    spare = -(-(start + graphs.queries) // PAGE_TOKENS) - own
    pages = np.concatenate((table[:own], np.full(spare, graphs.spare, dtype=np.int32)))
    return Row(piece + [0] * (graphs.queries - len(piece)), start, pages)
