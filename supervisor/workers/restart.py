"""Whether and when to start a model again after its process ended unasked. Pure: times and chance are arguments.

The limit counts unexpected exits in a sliding window, whatever the uptime (a model that crashes 1.5 s after each start
must not be restarted for ever). An exit for which a request was refused as poisoned is not told to this module. The
limit is kept per model and ends in ``failed`` for that model alone: models are independent, so the supervisor itself
does not give up, unlike an OTP supervisor.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """limit      unexpected exits within the window that end in ``failed``
    window_s     seconds
    initial_s    pause before the second try, doubled for each further one; the first is tried at once
    max_s        longest pause
    jitter       share by which a pause is lengthened at random, so that several models do not return in step
    """

    limit: int = 5
    window_s: float = 60.0
    initial_s: float = 0.5
    max_s: float = 30.0
    jitter: float = 0.2


class RestartHistory:
    """The recent failures of one model."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._failures: deque[float] = deque()

    def failed(self, now: float, chance: float) -> float | None:
        """Record a failure. Returns seconds to wait before the next try, or None to give up.

        chance  a draw from [0, 1)
        """
        policy = self.policy
        while self._failures and now - self._failures[0] > policy.window_s:
            self._failures.popleft()
        self._failures.append(now)
        count = len(self._failures)
        if count >= policy.limit:
            return None
        if count == 1:
            return 0.0
        pause = min(policy.max_s, policy.initial_s * 2.0 ** (count - 2))
        return pause * (1.0 + policy.jitter * chance)

    def forgive(self) -> None:
        """Forget everything: an operator started the model."""
        self._failures.clear()

    @property
    def recent(self) -> int:
        """Failures counted at the last one."""
        return len(self._failures)
