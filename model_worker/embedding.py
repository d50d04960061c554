"""The jobs of an engine that makes vectors or scores, and their events. A part of the contract in ``engine``.

The events of such a job are one Prefilling when its tokens are counted, then NewVectors, then Finished or Failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PIECE_BYTES: Final = 128 << 10
"""Most bytes of the vectors of one event. The window of a stream then holds 32 MiB."""
MOST_IN_PIECE: Final = 256
"""Most vectors of one event. Scores are short: an answer of thousands would come at its end only, and after the death
of a worker all of them would be computed again."""


@dataclass(frozen=True)
class EmbedJob:
    """A request for vectors of texts, or for scores of documents.

    texts       the texts, or the documents. A sequence of ids is used as it is, without special tokens or a prompt
    query       what the documents are compared with; None for vectors
    prompt      for vectors: name of the prompt before each text, "" for none; None for the model's own choice.
                For scores: the instruction to the model; None for the usual one
    dimensions  numbers of a vector; None for all
    truncate    cut texts that are too long, instead of refusing the request
    sent        pieces that another worker has sent, see ``texts_in_piece``
    """

    id: int
    texts: Sequence[str | Sequence[int]]
    query: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    sent: int = 0


@dataclass(slots=True)
class NewVectors:
    """The vectors, or scores, of the next texts of a job, in the order of the texts.

    first  number of the first text
    size   numbers of each vector; 1 for scores
    data   float32, little endian
    maker  digest of what makes the vectors: the model, and how it is used. Another worker may have another one, after
           a reload, and vectors of two makers cannot be compared
    """

    job: int
    first: int
    size: int
    data: bytes
    maker: bytes = b""


def texts_in_piece(size: int) -> int:
    """Return how many texts one event reports. So the number of events that a client has says which vectors it has.

    size  numbers of a vector
    """
    return max(1, min(MOST_IN_PIECE, PIECE_BYTES // (4 * size)))
