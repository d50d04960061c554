"""Figures about the generator's last steps, for `status`."""

import statistics
import time
from collections import deque
from typing import Any

RECENT = 128
"""The number of steps that the figures cover."""


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent: deque[tuple[float, int, int, bool]] = deque(maxlen=RECENT)
        self._defragmented: float | None = None

    def step(self, seconds: float, jobs: int, tokens: int, read: bool) -> None:
        """Note one step.

        seconds  how long the step took
        jobs     number of jobs that got tokens
        tokens   number of tokens that they got
        read     whether a part of a prompt was computed
        """
        self.steps += 1
        self._recent.append((seconds, jobs, tokens, read))

    def defragmented(self) -> None:
        """Note that the generator has looked at its pages. It moves them together if more than a tenth are out of
        order."""
        self._defragmented = time.monotonic()

    def reset(self) -> None:
        """Forget the steps, but not when pages were last moved."""
        self.steps = 0
        self.draft_accepted = self.draft_rejected = 0
        self._recent.clear()

    def figures(self) -> dict[str, Any]:
        """Return the figures.

        step_ms             median
        jobs_per_step       mean over steps that made any tokens
        tokens_per_step     mean over steps that made any tokens
        prefill_share       share of steps that computed prompts, 0 to 1
        draft_accepted      share of speculated tokens that were accepted
        defragmented_s_ago  seconds since the generator looked at its pages
        """
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
