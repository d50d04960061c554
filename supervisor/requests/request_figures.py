"""Figures of the requests of one model for metrics: counts, and histograms with fixed buckets. Pure.

A request is counted once, when it ends. That costs the loop some microseconds for each request, and nothing for a
token. The figures belong to the supervisor, so they survive the workers.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final

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
OTHER: Final = "other"
DISCONNECTED: Final = "disconnected"
"""The end of a request whose client has gone."""
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
        self._ends: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._tokens = {"prompt": 0, "cached": 0, "draft_accepted": 0, "draft_rejected": 0}
        self._keys: dict[str, list[int]] = {}

    def finished(self, key: str | None, body: Mapping[str, Any], age_s: float, *, resumed: bool) -> None:
        """Count a request that a worker has finished.

        key      the name of the key that asked; None for the supervisor's own user
        body     the map of its last event, see protocol.bodies.FinishedEvent. Values that cannot be are left out
        age_s    the time since it was accepted
        resumed  whether its answer was begun by another worker: then the times of this worker are not those of the
                 answer
        """
        reason = body.get("finish_reason")
        _count(self._ends, reason if isinstance(reason, str) else OTHER)
        usage, timings = (_map(body.get(name)) for name in ("usage", "timings"))
        prompt, answer = _whole(usage.get("prompt_tokens")), _whole(usage.get("completion_tokens"))
        self._tokens["prompt"] += prompt
        for name in ("cached", "draft_accepted", "draft_rejected"):
            self._tokens[name] += _whole(usage.get("cached_tokens" if name == "cached" else name))
        self._add("request_prompt_tokens", prompt)
        self._add("request_generation_tokens", answer)
        self._add("e2e_request_latency_seconds", age_s)
        self._count_key(key, prompt, answer)
        queue_s, prefill_s, decode_s = (_seconds(timings.get(f"{part}_ms")) for part in ("queue", "prefill", "decode"))
        self._add("request_queue_time_seconds", queue_s)
        if resumed:
            return
        self._add("request_prefill_time_seconds", prefill_s)
        self._add("request_decode_time_seconds", decode_s)
        if decode_s is not None and answer:
            self._add("time_to_first_token_seconds", max(0.0, age_s - decode_s))
            if answer > 1:
                self._histograms["inter_token_latency_seconds"].add(decode_s / (answer - 1), answer - 1)

    def failed(self, key: str | None, error: str, prompt: int, answer: int) -> None:
        """Count a request that ended with an error.

        error           the name of the error
        prompt, answer  tokens of its prompt, as far as a worker has reported them, and tokens that its client got
        """
        _count(self._errors, error)
        self._tokens["prompt"] += prompt
        self._count_key(key, prompt, answer)

    def ended(self, key: str | None, reason: str, prompt: int, answer: int) -> None:
        """Count a request that ended without an event of a worker: cancelled, or left by its client. As ``failed``."""
        _count(self._ends, reason)
        self._tokens["prompt"] += prompt
        self._count_key(key, prompt, answer)

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

    def _count_key(self, key: str | None, prompt: int, answer: int) -> None:
        name = LOCAL if key is None else key
        if name not in self._keys and len(self._keys) >= MOST_ENDS:
            name = OTHER
        counts = self._keys.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += prompt
        counts[2] += answer


def _count(counts: dict[str, int], name: str) -> None:
    if name not in counts and len(counts) >= MOST_ENDS:
        name = OTHER
    counts[name] = counts.get(name, 0) + 1


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _seconds(value: object) -> float | None:
    """Return the seconds of a time in milliseconds; None for what is no time."""
    return value / 1000 if isinstance(value, (int, float)) and 0 <= value < 1e12 else None
