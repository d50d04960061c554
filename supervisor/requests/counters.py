"""The counters that the supervisor's loop and the usage writer share: a table in memory without a file.

The loop adds to the counters with plain stores. So counting never waits for a disk, and what was counted survives a
SIGKILL of the supervisor: the writer still has the memory, sees the end of its socket, and writes the last values.

A row of the table has 16 numbers (u64) and a text. A row is in use if its SERIAL is not 0. The loop alone makes rows
and frees them. The writer only acknowledges what it has written.
"""

import json
import mmap
import os
from dataclasses import dataclass
from typing import Any, Final

from protocol.values import Kinds

SERIAL: Final = 0
"""Number that tells a row from earlier rows at the same place."""
REQUESTS, PROMPT, CACHED, COMPLETION = 1, 2, 3, 4
"""Accepted requests, and tokens: of prompts, those of them that the cache had, and of answers."""
COUNTS: Final = slice(REQUESTS, COMPLETION + 1)
WRITTEN: Final = slice(8, 12)
"""The counts that the writer has written to the disk last,"""
WRITTEN_SERIAL: Final = 12
"""and the row that it meant. The writer stores this number last."""
EPOCH: Final = 13
"""How often the clock was set back to an earlier day before the row was begun."""
NUMBERS: Final = 16
_ROW: Final = 384
_TEXT: Final = 8 * NUMBERS
ROWS: Final = 16_384
"""Pairs of keys and models that can be counted at once. The table takes memory only for rows that were used."""
Counters = memoryview
"""The 16 numbers of a row."""


@dataclass(frozen=True)
class UsageQuestion:
    """A question to the writer. ``about``: the parameters of ``UsageStore.read``; None for ``UsageStore.last_days``."""

    number: int
    about: dict[str, Any] | None = None


@dataclass(frozen=True)
class UsageAnswer:
    """The writer's answer to a question. ``body``: the body of the REPLY as the client gets it."""

    number: int
    body: bytes


@dataclass(frozen=True)
class Trouble:
    """The file cannot be used, and why; None: it can be used again."""

    why: str | None


TO_WRITER: Final = Kinds[UsageQuestion]("the supervisor and the usage writer", UsageQuestion)
FROM_WRITER: Final = Kinds[UsageAnswer | Trouble]("the usage writer and the supervisor", UsageAnswer, Trouble)


class CounterTable:
    """The table, as one of the two processes sees it. Row 0 has no counters: its first number is the highest row used.

    descriptor  the memory that ``make_table`` has made
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, ROWS * _ROW)
        self._bytes = memoryview(self._memory)
        self._numbers = self._bytes.cast("Q")

    @property
    def highest(self) -> int:
        """The highest row that was ever used."""
        return int(self._numbers[0])

    def counters(self, row: int) -> Counters:
        """Return the numbers of a row. They stay those of the table."""
        first = row * _ROW // 8
        return self._numbers[first : first + NUMBERS]

    def open(self, row: int, serial: int, text: list[str], epoch: int = 0) -> Counters:
        """Begin a row with counts of zero. The serial is stored last, so the writer never sees half a row."""
        numbers = self.counters(row)
        numbers[SERIAL] = 0
        numbers[1:] = memoryview(bytes(8 * (NUMBERS - 1))).cast("Q")
        numbers[EPOCH] = epoch
        packed = json.dumps(text).encode()
        at = row * _ROW + _TEXT
        if len(packed) > _ROW - _TEXT - 2:
            raise ValueError(f"{len(packed)} bytes name a row: at most {_ROW - _TEXT - 2} fit")
        self._bytes[at : at + 2 + len(packed)] = len(packed).to_bytes(2, "little") + packed
        numbers[SERIAL] = serial
        self._numbers[0] = max(self.highest, row)
        return numbers

    def text(self, row: int) -> list[str]:
        """Return the text with which a row was begun."""
        at = row * _ROW + _TEXT
        size = int.from_bytes(self._bytes[at : at + 2], "little")
        found: list[str] = json.loads(bytes(self._bytes[at + 2 : at + 2 + size]))
        return found


def make_table() -> int:
    """Return the descriptor of a new table. Raises OSError."""
    descriptor = os.memfd_create("usage", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, ROWS * _ROW)
    return descriptor
