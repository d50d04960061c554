"""XTC ("exclude top choices") with ExLlamaV2's sampler. The package's own XTC kernel uses wrong indices in 0.3.2.

By p-e-w (text-generation-webui, pull request 6335): with a given probability, every token at least as likely as the
threshold is left out, except the least likely of these. As in that implementation, newlines and special tokens are
never left out.
"""

import math
from collections.abc import Callable, Collection, Sequence

Draw = Callable[[float, int], tuple[int, Sequence[int], Sequence[float]]]
"""(random, n) -> (token, ids, probabilities). The token is the one at ``random`` of the cumulated probabilities, added
from the likeliest token on. The lists are the n likeliest ids and their probabilities, after all other filters. May be
called twice for the same logits."""
SCALE = 0.9998
"""The factor by which the sampler itself multiplies the random number."""


def draw_excluding_top(draw: Draw, random: float, threshold: float, protected: Collection[int]) -> int:
    """Return one of the tokens that XTC leaves: the one at ``random``, in [0, 1), of their cumulated probabilities.

    The sampler adds up probabilities from the likeliest token on. So a draw among the remaining tokens is the sampler's
    draw at a number that skips the share of the excluded tokens.
    """
    most = math.ceil(1 / threshold)
    _, ids, probs = draw(0.0, most)
    likely = [token for token, p in zip(ids, probs, strict=True) if p >= threshold and token not in protected]
    gone = set(likely[:-1])
    left = random * SCALE * (1 - sum(p for token, p in zip(ids, probs, strict=True) if token in gone))
    for token, p in zip(ids, probs, strict=True):
        if p > 0 and token not in gone:
            left -= p
            if left <= 0:
                return token
    token = draw(min((sum(probs) + left) / SCALE, 1.0), most)[0]
    return token if token not in gone else likely[-1]
