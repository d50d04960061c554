"""The rule for drawing a token, as numbers: what of a request the rule needs, in the integers that it computes with.

A draw must give the same token on a CPU and on a GPU, alone and in a batch. So sums are sums of integers, which do not
depend on their order, and each operation on floating-point numbers is rounded to float32 by itself.
"""

import math
from dataclasses import dataclass

from model_worker.engines.admission import is_greedy
from protocol.request import SamplingParams

ONE = 1 << 40
"""The weight of the likeliest token. Another token weighs less by the factor between the two probabilities."""
POINT_BITS = 53
ID_BITS = 22
"""A weight of 41 bits and an id of 22 bits make one positive number of 64 bits, which orders the candidates."""
NO_LIMIT = (1 << 31) - 1
LONGEST = 1 << 30
"""More than the tokens of any context."""


def why_on_host(sampling: SamplingParams) -> str | None:
    """Return the name of the option that this rule lacks, so that ExLlamaV2's sampler draws on the host. None: the rule
    has all that the request needs."""
    # The names are those of the request.
    if sampling.dry_multiplier:
        return "dry_multiplier"
    if sampling.cfg_scale != 1:
        return "cfg_scale"
    if is_greedy(sampling):
        return None
    others = {
        "mirostat_mode": sampling.mirostat_mode != 0,
        "xtc_probability": sampling.xtc_probability > 0,
        "tfs": sampling.tfs < 1,
        "typical_p": sampling.typical_p < 1,
        "skew": sampling.skew != 0,
        "max_temp": sampling.max_temp > sampling.min_temp,
        "temperature_last": sampling.temperature_last and sampling.temperature != 1,
    }
    return next((name for name, used in others.items() if used), None)


def fits_gpu(sampling: SamplingParams) -> bool:
    return why_on_host(sampling) is None


@dataclass(frozen=True)
class Rule:
    """The numbers of one request.

    greedy             take the lowest id of the highest logit
    slope              float32: multiplies the distance to the highest logit (or its square) before the exponential
    smooth             whether the distance is squared
    top_k              candidates to keep; 0 is off
    top_p              share of the sum to keep, times 2**53; 0 is off
    top_a              times 2**40; 0 is off
    min_p              least weight of a candidate; 0 is off
    repetition, fade   float32: the penalty, and what is added to it per token beyond ``reach_full``
    reach_full         number of newest tokens with the full penalty
    reach              number of newest tokens with a penalty
    frequency, presence  float32, subtracted for the tokens of the answer
    """

    greedy: bool
    slope: float = 1.0
    smooth: bool = False
    top_k: int = 0
    top_p: int = 0
    top_a: int = 0
    min_p: int = 0
    repetition: float = 1.0
    fade: float = 0.0
    reach_full: int = 0
    reach: int = 0
    frequency: float = 0.0
    presence: float = 0.0

    @property
    def cuts(self) -> bool:
        """Return whether the candidates are ordered by weight. Without a cut they are in the order of their ids."""
        return bool(self.top_k or self.top_p or self.top_a or self.min_p)

    @property
    def repeats(self) -> bool:
        return self.repetition != 1 and self.reach > 0

    @property
    def counts(self) -> bool:
        return self.frequency != 0 or self.presence != 0

    @staticmethod
    def of(sampling: SamplingParams, drawable: int) -> "Rule":
        """Return the numbers of a request. ``drawable``: ids below this can be drawn. Raises ValueError for a request
        that the rule lacks an option for."""
        lacking = why_on_host(sampling)
        if lacking is not None:
            raise ValueError(f"{lacking} is not part of the rule for draws: let the host's sampler draw")
        penalty, decay = sampling.repetition_penalty, sampling.repetition_decay
        full = LONGEST if sampling.penalty_range < 0 else min(sampling.penalty_range, LONGEST)
        penalties = {
            "repetition": penalty,
            "fade": (1 - penalty) / decay if decay else 0.0,
            "reach_full": full,
            "reach": min(full + decay, NO_LIMIT),
            "frequency": sampling.frequency_penalty,
            "presence": sampling.presence_penalty,
        }
        if is_greedy(sampling):
            return Rule(True, **penalties)  # type: ignore[arg-type]
        smooth = sampling.smoothing_factor > 0
        return Rule(
            False,
            slope=(sampling.smoothing_factor if smooth else 1.0) / sampling.temperature,
            smooth=smooth,
            top_k=sampling.top_k if sampling.top_k < drawable else 0,
            top_p=max(int(sampling.top_p * 2.0**POINT_BITS), 1) if sampling.top_p < 1 else 0,
            top_a=math.ceil(sampling.top_a * ONE),
            min_p=math.ceil(sampling.min_p * ONE),
            **penalties,  # type: ignore[arg-type]
        )


def point_of(number: float) -> int:
    """Return a number of ``engines.draws`` in [0, 1) as an integer below 2**53, without rounding."""
    return int(number * 2.0**POINT_BITS)
