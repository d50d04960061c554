"""The random numbers of an answer. Each number depends only on the seed and its place, not on earlier numbers.

So a seeded answer that another worker resumes is the answer that the first worker would have given. Other answers of
the batch, speculation, and tokens that were drawn and thrown away do not change it. Does not import torch.
"""

import os
from hashlib import blake2b
from struct import Struct

_pack = Struct("<qqqq").pack


class Draws:
    """The random numbers of one answer.

    seed  0 to 2**63 - 1; None: a seed from the operating system
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int | None) -> None:
        self._seed = int.from_bytes(os.urandom(8), "little") >> 1 if seed is None else seed

    def at(self, place: int, *, which: int = 0, returns: int = 0) -> float:
        """Return a uniform number in [0, 1) of 53 bits. Costs a microsecond.

        place    number of tokens of the answer before the drawn one; -1 heals the prompt (engines/healing)
        which    index of the number among those that this token needs
        returns  how often the answer has gone back and thrown tokens away (engines/banned). With its former number, a
                 token that is drawn again would be the blocked token's neighbour in the order of probabilities
        """
        digest = blake2b(_pack(self._seed, place, returns, which), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
