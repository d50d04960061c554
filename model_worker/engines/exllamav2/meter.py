"""What the generator has been doing lately, for `status`: cheap enough for every step."""

import statistics
import time
from collections import deque
from typing import Any

RECENT = 128
"""Steps that the figures are about."""


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent: deque[tuple[float, int, int, bool]] = deque(maxlen=RECENT)
        self._defragmented: float | None = None

    def step(self, seconds: float, jobs: int, tokens: int, read: bool) -> None:
        """One step: its duration, jobs that got tokens, these tokens, whether part of a prompt was computed."""
        self.steps += 1
        self._recent.append((seconds, jobs, tokens, read))

    def defragmented(self) -> None:
        """The generator has looked at its pages, and moved them together if more than a tenth were out of order."""
        self._defragmented = time.monotonic()

    def reset(self) -> None:
        """Forget the steps, not when pages were moved."""
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent.clear()

    def figures(self) -> dict[str, Any]:
        """Flat: step_ms (median), jobs_per_step and tokens_per_step (means over steps that made any), prefill_share
        (0 to 1, of steps), draft_accepted (share of those speculated), defragmented_s_ago."""
        figures: dict[str, Any] = {}
        if self._recent:
            seconds, jobs, tokens, read = zip(*self._recent, strict=True)
            decoding = sum(n > 0 for n in jobs) or 1
            figures["step_ms"] = round(statistics.median(seconds) * 1000, 3)
            figures["jobs_per_step"] = round(sum(jobs) / decoding, 2)
            figures["tokens_per_step"] = round(sum(tokens) / decoding, 2)
            figures["prefill_share"] = round(sum(read) / len(read), 3)
        if speculated := self.draft_accepted + self.draft_rejected:
            figures["draft_accepted"] = round(self.draft_accepted / speculated, 3)
        if self._defragmented is not None:
            figures["defragmented_s_ago"] = round(time.monotonic() - self._defragmented, 1)
        return figures
