"""How much of a prompt is read between two steps of running answers. Pure."""

from protocol.process.worker_spec import PAGE_TOKENS

_AIM = 0.85
"""Share of the limit at which a gap is aimed, as chunks of one size differ by some milliseconds."""
_SLOWER, _FASTER = 0.5, 0.1
"""Weight of a new measurement that is slower, or faster, than the estimate. One slow chunk is a gap that users see; the
next must be smaller."""


class Pace:
    """Chooses the size of a chunk so that the gap between two steps stays below a limit.

    A gap is taken as the duration of a step without prompts, plus a duration for each prompt token. Both are measured
    while the model serves. The duration of a token grows with the prompt, and so follows the latest chunk. Tokens of
    prompts whose log-probabilities are wanted take longer: they have a duration of their own.

    most     tokens of a chunk while no answer is running, a multiple of 256
    limit_s  the longest gap that is wanted, in seconds. The least chunk is a page of 256 tokens, whatever it takes
    """

    def __init__(self, most: int, limit_s: float) -> None:
        self._most, self._limit = most, limit_s
        self._step: float | None = None
        self._tokens: dict[bool, float] = {}

    def tokens(self, running: bool, scored: bool = False) -> int:
        """Return how many prompt tokens may be read before the next step, a multiple of 256.

        running  whether an answer waits for that step
        scored   whether log-probabilities of some of these tokens are computed
        """
        if not running:
            return self._most
        token = self._tokens.get(scored)
        if token is None or self._step is None:
            return PAGE_TOKENS
        fits = (_AIM * self._limit - self._step) / max(token, 1e-9)
        return max(PAGE_TOKENS, min(self._most, int(fits) // PAGE_TOKENS * PAGE_TOKENS))

    def measured(self, gap_s: float, tokens: int, scored: bool = False) -> None:
        """Note the time between two steps of running answers, and the prompt tokens that were read in it. ``scored``:
        whether some of them had their log-probabilities computed."""
        if not tokens:
            self._step = _towards(self._step, gap_s)
        elif self._step is not None:
            self._tokens[scored] = _towards(self._tokens.get(scored), max(gap_s - self._step, 0.0) / tokens)


def _towards(estimate: float | None, value: float) -> float:
    if estimate is None:
        return value
    return estimate + (value - estimate) * (_SLOWER if value > estimate else _FASTER)
