"""Limits of a key: requests at once, and tokens per minute as a token bucket. Pure: times are arguments.

The bucket holds one minute's tokens at most and fills evenly. Each request takes the tokens of its prompt, estimated at
four bytes each, as in the queue. Each token of an answer is taken when it comes. That may leave a debt, because nobody
knows in advance how long an answer will be, and a running stream is not slowed. A new request is admitted while at
least one token is left. So over time a key gets no more than its rate. In a short time it gets no more than one
minute's tokens plus the remaining answers of its running requests. When a worker has compiled a constraint for a
request of the key, that takes tokens, too (``supervisor.requests.worker_events``).
"""

from dataclasses import dataclass

from protocol.errors import ErrorCode, WireError
from supervisor.keys.rights import Identity

BUSY_RETRY_MS = 1000
"""Milliseconds after which a client should try again if the key must wait for one of its requests to end. Nobody can
predict that end."""
MINUTE_S = 60.0


@dataclass(slots=True)
class TokenBucket:
    """A token bucket with ``left`` tokens at the time ``at``. A negative number is a debt."""

    per_minute: int
    left: float
    at: float

    def refill(self, now: float) -> None:
        self.left = min(float(self.per_minute), self.left + (now - self.at) * self.per_minute / MINUTE_S)
        self.at = now

    def wait_s(self) -> float:
        """Return the seconds until one token is left."""
        return max(0.0, (1 - self.left) * MINUTE_S / self.per_minute)


class Allowance:
    """The requests and tokens that one key may still use, over all its connections."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.identity = identity
        self.refused = 0
        self._bucket: TokenBucket | None = None
        self.adopt(identity, now)

    def adopt(self, identity: Identity, now: float) -> None:
        """Take over limits that may have changed. Tokens that were used stay used."""
        self.identity, before = identity, self._bucket
        rate = identity.tokens_per_minute
        if rate is None:
            self._bucket = None
        elif before is None:
            self._bucket = TokenBucket(rate, float(rate), now)
        elif before.per_minute != rate:
            before.refill(now)
            self._bucket = TokenBucket(rate, min(before.left, float(rate)), now)

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
        if (bucket := self._bucket) is None:
            return
        bucket.refill(now)
        if bucket.left < 1:
            self.refused += 1
            wait = bucket.wait_s()
            message = (
                f"key {identity.name!r} has used its {bucket.per_minute} tokens a minute: try again in {wait:.1f} s"
            )
            raise WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=max(1, round(1000 * wait)))

    def charge(self, tokens: int, now: float) -> None:
        """Take tokens of a prompt that was accepted, or of an answer that has come."""
        if self._bucket is not None:
            self._bucket.refill(now)
            self._bucket.left -= tokens

    def tokens_left(self, now: float) -> int | None:
        """Return the number of tokens that are left, for people; None without a limit."""
        if self._bucket is None:
            return None
        self._bucket.refill(now)
        return int(self._bucket.left)
