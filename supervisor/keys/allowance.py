"""How much a key may use: requests at once, and tokens a minute as a token bucket. Pure: times are handed in.

The bucket holds one minute's tokens at most and fills evenly. Each request takes its prompt's tokens (estimated at four
bytes each, as the queue does), and each token of an answer is taken as it comes, which may leave a debt: nobody knows
beforehand how long an answer will be, and a stream that was begun is not slowed. A new request is admitted while
anything is left; so over time a key gets no more than its rate, and at once no more than a minute's tokens and what its
requests in flight go on to say. A constraint that a worker compiles for the key takes tokens, too, once that is done
(``supervisor.requests.parking``).
"""

from dataclasses import dataclass

from protocol.errors import ErrorCode, WireError
from supervisor.keys.rights import Identity

BUSY_RETRY_MS = 1000
"""When to try again where only the end of another request helps, which nobody can foretell."""
MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """``left`` tokens at the time ``at``; negative is a debt."""

    per_minute: int
    left: float
    at: float

    def refill(self, now: float) -> None:
        self.left = min(float(self.per_minute), self.left + (now - self.at) * self.per_minute / MINUTE_S)
        self.at = now

    def wait_s(self) -> float:
        """Seconds until one token is left."""
        return max(0.0, (1 - self.left) * MINUTE_S / self.per_minute)


class Allowance:
    """What one key has left, over all its connections."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.identity = identity
        self.refused = 0
        self._bucket: Bucket | None = None
        self.adopt(identity, now)

    def adopt(self, identity: Identity, now: float) -> None:
        """Its limits may have changed. What was used up stays so."""
        self.identity, before = identity, self._bucket
        rate = identity.tokens_per_minute
        if rate is None:
            self._bucket = None
        elif before is None:
            self._bucket = Bucket(rate, float(rate), now)
        elif before.per_minute != rate:
            before.refill(now)
            self._bucket = Bucket(rate, min(before.left, float(rate)), now)

    def check(self, in_flight: int, now: float) -> None:
        """Raises RATE_LIMITED unless there may be another request.

        in_flight  the key's requests that are unfinished
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
        """So many tokens of a prompt were accepted, or of an answer have come."""
        if self._bucket is not None:
            self._bucket.refill(now)
            self._bucket.left -= tokens

    def tokens_left(self, now: float) -> int | None:
        """For people; None where there is no limit."""
        if self._bucket is None:
            return None
        self._bucket.refill(now)
        return int(self._bucket.left)
