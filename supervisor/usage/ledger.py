"""Give each request the counters of its key, model and day. Pure: the day is an argument, and no disk is touched.

A request counts on the day (UTC) on which it was accepted, also if its answer ends on the next day.
"""

from collections.abc import Collection
from datetime import date
from typing import Final, NamedTuple, Protocol

from supervisor.keys.rights import Identity
from supervisor.usage.counters import (
    COMPLETION,
    COUNTS,
    PROMPT,
    REQUESTS,
    ROWS,
    SERIAL,
    WRITTEN,
    WRITTEN_SERIAL,
    Counters,
)

OTHERS: Final = "(others)"
"""The key and the model of the one row that counts for all when the table is full. Its day is that of its first use."""
_OTHERS_PLACE: Final = 1
DAY_S: Final = 86_400


class UsageRow(NamedTuple):
    """The place of a row in the table, and its counters."""

    place: int
    counters: Counters


class _Table(Protocol):
    def counters(self, row: int) -> Counters: ...
    def open(self, row: int, serial: int, text: list[str]) -> Counters: ...


class UsageLedger:
    """The rows that count now.

    Rows of days that are over are used again when the writer has written them and no request counts there any more. So
    the table is bounded by the keys and models of one day, as long as the disk takes what is written.

    seconds  the time in seconds since 1970
    """

    def __init__(self, table: _Table, seconds: float, rows: int = ROWS) -> None:
        self._table = table
        self._day = int(seconds // DAY_S)
        self._free = list(range(rows - 1, _OTHERS_PLACE, -1))
        self._serial = 0
        self._today: dict[tuple[str, str], UsageRow] = {}
        self._former: list[UsageRow] = []
        self._others: UsageRow | None = None
        self.crowded_out = 0
        """Requests that were counted in the row of the others."""

    def row(self, owner: Identity, model: str) -> UsageRow:
        """Return the row of today for a key and a model."""
        found = self._today.get((owner.key_id, model))
        return self._new(owner, model) if found is None else found

    def advance(self, seconds: float, used: Collection[int]) -> None:
        """Begin a new day when it has come, and free rows of former days. Call this once a second.

        used  the places of rows in which unfinished requests count

        If the clock is set back, requests still count on the latest day that was reached. A row's day, key and model
        occur only once in a supervisor's life, and the writer depends on that.
        """
        if (day := int(seconds // DAY_S)) > self._day:
            self._day = day
            self._former += self._today.values()
            self._today.clear()
        kept = []
        for row in self._former:
            numbers = row.counters
            is_written = numbers[WRITTEN_SERIAL] == numbers[SERIAL] and numbers[WRITTEN] == numbers[COUNTS]
            if not is_written or row.place in used:
                kept.append(row)
            else:
                numbers[SERIAL] = 0
                self._free.append(row.place)
        self._former = kept

    def unwritten(self) -> tuple[int, int]:
        """Return the requests and the tokens of prompts and answers that the writer has not written yet."""
        requests = tokens = 0
        for row in (*self._today.values(), *self._former, *filter(None, [self._others])):
            numbers = row.counters
            counts = list(numbers[COUNTS])
            if numbers[WRITTEN_SERIAL] == numbers[SERIAL]:
                counts = [count - written for count, written in zip(counts, numbers[WRITTEN], strict=True)]
            requests += counts[REQUESTS - COUNTS.start]
            tokens += counts[PROMPT - COUNTS.start] + counts[COMPLETION - COUNTS.start]
        return requests, tokens

    def _new(self, owner: Identity, model: str) -> UsageRow:
        if not self._free:
            self.crowded_out += 1
            if self._others is None:
                self._others = self._open(_OTHERS_PLACE, OTHERS, OTHERS, OTHERS)
            return self._others
        row = self._today[owner.key_id, model] = self._open(self._free.pop(), owner.key_id, owner.name or "", model)
        return row

    def _open(self, place: int, key_id: str, key: str, model: str) -> UsageRow:
        self._serial += 1
        return UsageRow(place, self._table.open(place, self._serial, [day_text(self._day), key_id, key, model]))


def day_text(day: int) -> str:
    """Return a day, counted from 1970-01-01, in ISO 8601."""
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()
