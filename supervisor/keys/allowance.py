"""Limits of a key: requests at once, and tokens and requests in a time, as token buckets. Pure: times are arguments.

A bucket holds the tokens of its period, a minute or a day, and fills evenly. So a key that has used the tokens of a day
need not wait until midnight. The buckets live in the supervisor's memory, and are full when it starts.

Each request takes the tokens of its prompt, estimated at four bytes each, as in the queue. Each token of an answer is
taken when it comes. That may leave a debt, because nobody knows in advance how long an answer will be, and a running
stream is not slowed. A new request is admitted while at least one token is left. So over time a key gets no more than
its rate. In a short time it gets no more than one period's tokens plus the remaining answers of its running requests.
When a worker has compiled a constraint for a request of the key, that takes tokens, too
(``supervisor.requests.worker_events``).
"""

from dataclasses import dataclass
from typing import Final

from protocol.errors import ErrorCode, WireError
from supervisor.keys.rights import Identity

BUSY_RETRY_MS = 1000
"""Milliseconds after which a client should try again if the key must wait for one of its requests to end. Nobody can
predict that end."""
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
RATES: Final = {
    "requests_per_minute": (MINUTE_S, "requests a minute"),
    "tokens_per_minute": (MINUTE_S, "tokens a minute"),
    "tokens_per_day": (DAY_S, "tokens a day"),
}
"""Field of ``Identity`` → the period in seconds, and the unit for people."""
OF_REQUESTS: Final = "requests_per_minute"


@dataclass(slots=True)
class TokenBucket:
    """A token bucket with ``left`` tokens at the time ``at``. A negative number is a debt.

    rate  tokens that it gets in ``period_s`` seconds, and holds at most
    """

    rate: int
    period_s: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        self.left = min(float(self.rate), self.left + (now - self.at) * self.rate / self.period_s)
        self.at = now

    def wait_s(self) -> float:
        """Return the seconds until one token is left."""
        return max(0.0, (1 - self.left) * self.period_s / self.rate)


class Allowance:
    """The requests and tokens that one key may still use, over all its connections."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.identity = identity
        self.refused = 0
        self._buckets: dict[str, TokenBucket] = {}
        self.adopt(identity, now)

    def adopt(self, identity: Identity, now: float) -> None:
        """Take over limits that may have changed. Tokens that were used stay used."""
        self.identity, before = identity, self._buckets
        self._buckets = {}
        for name, (period_s, _) in RATES.items():
            rate: int | None = getattr(identity, name)
            if rate is None:
                continue
            left = float(rate)
            if (old := before.get(name)) is not None:
                old.refill(now)
                left = min(left, old.left)
            self._buckets[name] = TokenBucket(rate, period_s, left, now)

    def check(self, in_flight: int, now: float) -> None:
        """Raise RATE_LIMITED if the key may not send another request now.

        in_flight  the key's unfinished requests
        """
        identity = self.identity
        if identity.max_in_flight is not None and in_flight >= identity.max_in_flight:
            self.refused += 1
            message = f"key {identity.name!r} has {in_flight} requests unfinished and may have {identity.max_in_flight}"
            raise WireError(
                ErrorCode.RATE_LIMITED, f"{message}: wait for one to end, or cancel one", retry_after_ms=BUSY_RETRY_MS
            )
        for bucket in self._buckets.values():
            bucket.refill(now)
        empty = {name: bucket.wait_s() for name, bucket in self._buckets.items() if bucket.left < 1}
        if empty:
            self.refused += 1
            name, wait = max(empty.items(), key=lambda item: item[1])
            used = f"{self._buckets[name].rate} {RATES[name][1]}"
            message = f"key {identity.name!r} has used its {used}: try again in {wait:.1f} s"
            raise WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=max(1, round(1000 * wait)))

    def charge(self, tokens: int, now: float) -> None:
        """Take tokens of a prompt that was accepted, or of an answer that has come."""
        for name, bucket in self._buckets.items():
            if name != OF_REQUESTS:
                bucket.refill(now)
                bucket.left -= tokens

    def count_request(self, now: float) -> None:
        """Take a request that was accepted."""
        if (bucket := self._buckets.get(OF_REQUESTS)) is not None:
            bucket.refill(now)
            bucket.left -= 1

    def left(self, name: str, now: float) -> int | None:
        """Return what is left of a rate, a key of ``RATES``, for people; None without this limit."""
        if (bucket := self._buckets.get(name)) is None:
            return None
        bucket.refill(now)
        return int(bucket.left)
