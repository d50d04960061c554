"""Give each request the counters of its key, model and day. Pure: the time is an argument, and no disk is touched.

A request counts on the day (UTC) on which it was accepted, also if its answer ends on the next day. The day comes from
a clock that people and programs set, perhaps wrongly and for seconds only. So a jump of that clock is believed when it
has lasted (``BelievedTime``), and old counts are deleted when they have been old for a day (``Retention``).
"""

from collections.abc import Collection
from datetime import date
from typing import Final, NamedTuple, Protocol

from supervisor.keys.rights import Identity
from supervisor.requests.counters import (
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
JUMP_S: Final = 60.0
"""Seconds by which the clock may differ from the steady one until that counts as a jump, and for which a jump must last
until it is believed. A machine without a clock of its own gets its time from the network soon after its start."""
STAYS_S: Final = 86_400.0
"""Seconds for which counts must have been too old before they are deleted."""


class BelievedTime:
    """The time of the clock (seconds since 1970), without jumps that do not last.

    wall    the time of the clock
    steady  seconds of a clock that nobody sets, such as CLOCK_BOOTTIME
    """

    def __init__(self, wall: float, steady: float) -> None:
        self._offset = wall - steady
        self._other: tuple[float, float] | None = None
        """Another offset that is seen now, and since when."""

    def at(self, wall: float, steady: float) -> float:
        """Return the believed time. Call this about once a second."""
        offset = wall - steady
        if abs(offset - self._offset) <= JUMP_S:
            self._offset, self._other = offset, None
        elif self._other is None or abs(offset - self._other[0]) > JUMP_S:
            self._other = offset, steady
        elif steady - self._other[1] >= JUMP_S:
            self._offset, self._other = offset, None
        return steady + self._offset


class Retention:
    """Decides which days are deleted: those that have been too old for ``STAYS_S`` in all, at every look meanwhile.

    seen  day → for how many seconds the days before it were seen to be too old. Kept across restarts
    """

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def look(self, oldest: int, elapsed: float) -> int | None:
        """Return the day before which all days may be deleted; None if there is none.

        oldest   the oldest day that is kept, by the clock
        elapsed  seconds since the last look, which no jump of the clock has changed
        """
        # A day beyond the oldest one is there only if the clock was ahead, so its seconds prove nothing.
        self.seen = {oldest: 0.0} | {day: seconds + elapsed for day, seconds in self.seen.items() if day <= oldest}
        return max((day for day, seconds in self.seen.items() if seconds >= STAYS_S), default=None)

    def deleted(self, before: int) -> None:
        """Take note that all days before this one were deleted."""
        self.seen = {day: seconds for day, seconds in self.seen.items() if day > before}


class UsageRow(NamedTuple):
    """The place of a row in the table, and its counters."""

    place: int
    counters: Counters


class _Table(Protocol):
    def counters(self, row: int) -> Counters: ...
    def open(self, row: int, serial: int, text: list[str], epoch: int) -> Counters: ...


class UsageLedger:
    """The rows that count now.

    Rows of days that are over are used again when the writer has written them and no request counts there any more. So
    the table is bounded by the keys and models of one day, as long as the disk takes what is written.

    seconds  the time in seconds since 1970
    """

    def __init__(self, table: _Table, seconds: float, rows: int = ROWS) -> None:
        self._table = table
        self._day = int(seconds // DAY_S)
        self._epoch = 0
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
        """Begin another day when it has come, and free rows of former days. Call this once a second.

        used  the places of rows in which unfinished requests count

        If the clock is set back, another epoch begins. A row's epoch, day, key and model occur only once in a
        supervisor's life, and the writer depends on that.
        """
        if (day := int(seconds // DAY_S)) != self._day:
            self._epoch += day < self._day
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
        text = [day_text(self._day), key_id, key, model]
        return UsageRow(place, self._table.open(place, self._serial, text, self._epoch))


def day_text(day: int) -> str:
    """Return a day, counted from 1970-01-01, in ISO 8601."""
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()


def day_number(text: str) -> int:
    """Return the number of days from 1970-01-01 to a day in ISO 8601."""
    return date.fromisoformat(text).toordinal() - date(1970, 1, 1).toordinal()
