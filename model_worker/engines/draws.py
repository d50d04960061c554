"""The random numbers of an answer: each follows from the seed and the place it is drawn for, and from nothing before.

So a seeded answer that another worker goes on with is the one that it would have been, and neither company nor
speculation nor what was drawn and thrown away changes it. No torch.
"""

import os
from hashlib import blake2b
from struct import Struct

_pack = Struct("<qqqq").pack


class Draws:
    """The numbers of one answer.

    seed  0 to 2**63 - 1; None: of the system's choice
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int | None) -> None:
        self._seed = int.from_bytes(os.urandom(8), "little") >> 1 if seed is None else seed

    def at(self, place: int, *, which: int = 0, returns: int = 0) -> float:
        """A number in [0, 1), uniform, of 53 bits. Costs a microsecond.

        place    tokens of the answer before the one that is drawn; -1 heals the prompt (engines/healing)
        which    of the numbers that are drawn for this token
        returns  how often the answer has gone back and thrown tokens away (engines/banned): with the number that it was
                 drawn at before, a token drawn anew would be the blocked one's neighbour in the order of probabilities
        """
        digest = blake2b(_pack(self._seed, place, returns, which), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
