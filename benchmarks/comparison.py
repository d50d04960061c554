"""Compare greedy answers of two models that should be alike: how many are equal, and how far apart they are.

With random weights the margins are smaller than rounding errors. Log-probabilities distinguish rounding from a wrong
computation.
"""

from collections.abc import Sequence

from benchmarks.report import Result
from protocol.client.answers import Completion, TokenLogprob

WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 20}
"""Fields of a request whose answer ``gap`` can compare."""
GAP_TARGET = "<= 0.25"
"""The target for ``gap``, in nats. The random 1B in fp16 differs by at most 0.007 from the 1B in fp32. Rounding the
weights to 4 bits makes a difference of 3.4 (both by transformers on a CPU, 256 places). ExLlamaV2's kernel for GPTQ
adds up in fp16, with 5 to 7 times the error of fp16 matrices (a matrix of the 1B, with the kernel compiled for the
CPU)."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or that only one answer has; None if the answers are equal."""
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if shared == len(a) == len(b) else shared


def gap(a: Completion, b: Completion) -> float:
    """Return the largest difference of a chosen token's log-probabilities, in nats, up to the first token that differs.

    A token that is not among the other answer's likeliest has at most the lowest log-probability of these there.
    """
    different = first_difference(a.token_ids, b.token_ids)
    end = len(a.token_ids) if different is None else different + 1
    places = zip(a.logprobs[:end], b.logprobs[:end], strict=False)  # one of them may have ended
    return max((max(_apart(x, y), _apart(y, x)) for x, y in places), default=0.0)


def _apart(chosen: TokenLogprob, other: TokenLogprob) -> float:
    there = {token.token_id: token.logprob for token in (*other.top, other)}
    if (found := there.get(chosen.token_id)) is not None:
        return abs(chosen.logprob - found)
    return max(0.0, chosen.logprob - min(there.values()))


def compare(label: str, whose: str, mine: list[Completion], theirs: list[Completion], must_equal: bool) -> list[Result]:
    """Compare two answers to each request.

    ``must_equal`` gives equality a target. The gap always has a target. It is known if the answers have
    log-probabilities.
    """
    first = [first_difference(a.token_ids, b.token_ids) for a, b in zip(mine, theirs, strict=True)]
    count = len(first)
    print(f"{label}: first token that differs from {whose}, by answer: {first} (None: none)", flush=True)
    equal = Result(
        f"{label}: answers equal to {whose}", first.count(None), f"of {count}", f">= {count}" if must_equal else None
    )
    results = [equal]
    if differing := [at for at in first if at is not None]:
        results.append(Result(f"{label}: earliest difference from {whose}", min(differing), "tokens"))
    if all(answer.logprobs for answer in (*mine, *theirs)):
        most = max(gap(a, b) for a, b in zip(mine, theirs, strict=True))
        results.append(Result(f"{label}: log probabilities are off {whose} by", most, "nats", GAP_TARGET))
    return results
