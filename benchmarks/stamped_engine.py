"""An engine without torch whose tokens say which process made them, and when. Named by an import string."""

import os
import time
from dataclasses import dataclass

from model_worker.engine import EngineEvent, Finished, NewTokens
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine

LENGTH = 1 + 8 + 16
"""Characters of a token."""


@dataclass(frozen=True)
class Token:
    """letter  that of ``tests.deterministic_engine.answer``
    pid     the worker's process
    made    seconds of CLOCK_MONOTONIC, which all processes of a machine share
    """

    letter: str
    pid: int
    made: float


class StampedEngine(DeterministicEngine):
    """The deterministic engine. Each letter is followed by the worker's pid and the time, both hexadecimal."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._pid = f"{os.getpid():08x}"

    def step(self) -> list[EngineEvent]:
        events = super().step()
        stamp = f"{self._pid}{time.monotonic_ns():016x}"
        for event in events:
            if isinstance(event, NewTokens | Finished):
                event.text += stamp
        return events


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a text that StampedEngine has made. Raises ValueError for any other text."""
    parts = [text[at : at + LENGTH] for at in range(0, len(text), LENGTH)]
    return [Token(part[0], int(part[1:9], 16), int(part[9:], 16) / 1e9) for part in parts]
