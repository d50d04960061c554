"""Figures of the requests of one model for metrics: counts, and histograms with fixed buckets. Pure.

A request is counted once, when it ends. That costs the loop some microseconds for each request, and nothing for a
token. The figures belong to the supervisor, so they survive the workers.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from supervisor.requests.stories import OTHER, RequestRecord

FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S: Final = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds: those of vLLM, and smaller ones for a small model on a fast GPU."""
TOKENS: Final = tuple(number * 10**power for power in range(6) for number in (1, 2, 5))
HISTOGRAMS: Final[Mapping[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}
MOST_ENDS: Final = 64
"""Most reasons for an end, and most keys, that are counted apart. Others are counted together as OTHER."""
LOCAL: Final = ""
"""Stands for the supervisor's own user where others have the name of their key."""


class Histogram:
    """How many values lie in each bucket, and their sum.

    bounds  the upper bound of each bucket but the last, ascending. A value that equals a bound lies below it
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RequestFigures:
    """What ended requests of a model have taken, by histogram, by end and by key."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._ends, self._errors = Counter[str](), Counter[str]()
        self._tokens = {"prompt": 0, "cached": 0, "draft_accepted": 0, "draft_rejected": 0}
        self._keys: dict[str, tuple[int, int, int]] = {}
        """By key, its requests, and the tokens of their prompts and answers."""

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended. Only those that a worker has finished are in the histograms."""
        end, prompt, answer = record.end, record.prompt_tokens or 0, record.tokens
        ends = self._errors if end.error else self._ends
        ends[_counted_as(end.error or end.finish_reason or OTHER, ends)] += 1
        self._tokens["prompt"] += prompt
        key = _counted_as(record.owner.name or LOCAL, self._keys)
        requests, read, written = self._keys.get(key, (0, 0, 0))
        self._keys[key] = requests + 1, read + prompt, written + answer
        if not end.computed or record.ended is None:
            return
        self._tokens["cached"] += end.cached_tokens or 0
        self._tokens["draft_accepted"] += end.draft_accepted or 0
        self._tokens["draft_rejected"] += end.draft_rejected or 0
        age_s = record.ended - record.accepted
        self._add("request_prompt_tokens", prompt)
        self._add("request_generation_tokens", answer)
        self._add("e2e_request_latency_seconds", age_s)
        self._add("request_queue_time_seconds", _seconds(end.queue_ms))
        if record.resumes:  # another worker has begun the answer: the times of this one are not those of the answer
            return
        decode_s = _seconds(end.decode_ms)
        self._add("request_prefill_time_seconds", _seconds(end.prefill_ms))
        self._add("request_decode_time_seconds", decode_s)
        if decode_s is not None and answer:
            self._add("time_to_first_token_seconds", max(0.0, age_s - decode_s))
            if answer > 1:
                self._histograms["inter_token_latency_seconds"].add(decode_s / (answer - 1), answer - 1)

    def describe(self) -> dict[str, Any]:
        """Return the figures, see protocol.figures.ModelFigures."""
        return {
            "ends": dict(self._ends),
            "errors": dict(self._errors),
            "tokens": dict(self._tokens),
            "keys": [[name, *counts] for name, counts in self._keys.items()],
            "histograms": {
                name: {"counts": list(histogram.counts), "sum": histogram.sum}
                for name, histogram in self._histograms.items()
                if any(histogram.counts)  # 200 models without requests would have 45,000 series
            },
        }

    def _add(self, histogram: str, value: float | None) -> None:
        if value is not None:
            self._histograms[histogram].add(value)


def _counted_as(name: str, counts: Collection[str]) -> str:
    """Return the name under which something is counted: OTHER if MOST_ENDS other names are counted already."""
    return name if name in counts or len(counts) < MOST_ENDS else OTHER


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
