"""The program that writes the counters to the disk, and answers questions about them. It may wait for the disk.

    python -P -m supervisor.usage.writer FILE SESSION DAYS TABLE

FILE     the SQLite file, see ``store``
SESSION  the text of this supervisor's life
DAYS     days that are kept, today included
TABLE    the descriptor of the table of counters, see ``counters``
stdin    the link to the supervisor (``helper_link``), whose records are maps in msgpack

The supervisor sends questions: the parameters of ``UsageStore.read``, or ``{last_days: true}``. The program answers
each with ``{answer, body}``: the number of the question, and the body of the REPLY as the client gets it. It says
``{trouble}`` when the file cannot be used, and null when it can be used again. When the supervisor ends, however it
ends, the socket ends. Then the program writes the last counts and leaves.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgpack

from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.process.helper_link import HelperLink, become_helper, serve
from supervisor.usage.counters import COUNTS, EPOCH, SERIAL, WRITTEN, WRITTEN_SERIAL, CounterTable
from supervisor.usage.ledger import DAY_S, Retention, day_number, day_text
from supervisor.usage.store import Count, StoreTrouble, UsageStore

WRITE_S: Final = 1.0
"""Seconds between two writes."""
LEAVE_S: Final = 10
"""Seconds for the last write. Then SIGALRM ends the process, unless it hangs in the kernel."""
AGES_S: Final = 3600.0
"""Seconds between two writes of how long counts have been too old."""


class UsageWriter:
    """Writes the counts of one table to one store."""

    def __init__(self, table: CounterTable, store: UsageStore, days: int, link: HelperLink) -> None:
        self._table = table
        self._store = store
        self._days = days
        self._link = link
        self._written: dict[int, tuple[int, ...]] = {}
        """Place of a row → its serial and counts when they were written last."""
        self._openings = 0
        self._retention: Retention | None = None
        self._looked_at = self._ages_at = 0.0
        self._trouble: str | None = "nothing was written yet"

    def run(self) -> None:
        """Write once a second and answer questions until the supervisor ends. Then write the last time."""
        serve(self._link, self._answer, self._write_now)
        signal.alarm(LEAVE_S)
        self._try_write(time.time(), _steady(), last=True)

    def _write_now(self) -> float:
        self.write(time.time(), _steady())
        return WRITE_S

    def write(self, wall: float, steady: float) -> None:
        """Write the counts that have changed, and tell the supervisor if the file cannot be used.

        wall    seconds since 1970
        steady  seconds of a clock that nobody sets
        """
        trouble = self._try_write(wall, steady)
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell({"trouble": trouble})

    def _try_write(self, wall: float, steady: float, *, last: bool = False) -> str | None:
        """Write the counts that have changed. Return why that was not possible; None if it was."""
        try:
            self._delete_old(wall, steady, last=last)
            if changed := self._changed():
                self._store.write(self._counts(changed))
                if self._openings != self._store.openings:  # a new file: it has none of the counts yet
                    self._openings = self._store.openings
                    self._written.clear()
                    changed = self._changed()
                    self._store.write(self._counts(changed))
                for place, values in changed.items():
                    self._acknowledge(place, values)
        except StoreTrouble as e:
            return str(e)
        return None

    def _delete_old(self, wall: float, steady: float, *, last: bool) -> None:
        if self._retention is None:
            ages = self._store.ages()
            self._retention, self._looked_at, self._ages_at = Retention(), steady, steady
            self._retention.seen = {day_number(day): seconds for day, seconds in ages.items()}
        oldest = int(wall // DAY_S) - self._days + 1
        before = self._retention.look(oldest, steady - self._looked_at)
        self._looked_at = steady
        if before is not None:
            self._store.remove_before(day_text(before))
            self._retention.deleted(before)
        if last or before is not None or steady - self._ages_at >= AGES_S:
            self._store.keep_ages({day_text(day): seconds for day, seconds in self._retention.seen.items()})
            self._ages_at = steady

    def _changed(self) -> dict[int, tuple[int, ...]]:
        """Return serial and counts of the rows that differ from what was written, by place."""
        found = {}
        for place in range(1, self._table.highest + 1):
            numbers = self._table.counters(place)
            values = (numbers[SERIAL], *numbers[COUNTS])
            if values[0] and self._written.get(place) != values:
                found[place] = values
        return found

    def _counts(self, changed: dict[int, tuple[int, ...]]) -> list[Count]:
        found = []
        for place, (_, requests, prompt, cached, completion) in changed.items():
            day, key_id, key, model = self._table.text(place)
            epoch = self._table.counters(place)[EPOCH]
            found.append(Count(day, key_id, key, model, requests, prompt, cached, completion, epoch))
        return found

    def _acknowledge(self, place: int, values: tuple[int, ...]) -> None:
        self._written[place] = values
        numbers = self._table.counters(place)
        for offset, value in enumerate(values[1:]):
            numbers[WRITTEN.start + offset] = value
        numbers[WRITTEN_SERIAL] = values[0]

    def _answer(self, record: bytes) -> None:
        question = msgpack.unpackb(record)
        number = question.pop("ask")
        self.write(time.time(), _steady())
        try:
            if self._trouble is not None:
                raise StoreTrouble(self._trouble)
            result = self._store.last_days() if question == {"last_days": True} else self._store.read(**question)
            body = pack_body({"result": result})
        except StoreTrouble as e:
            body = pack_body({"error": WireError(ErrorCode.HELPER_FAILED, str(e)).to_wire()})
        self._tell({"answer": number, "body": body})

    def _tell(self, message: dict[str, Any]) -> None:
        self._link.send(msgpack.packb(message))


def _steady() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # it goes on while the machine is suspended


def main(arguments: list[str]) -> None:
    link = become_helper("usage writer", dies=False)
    file, session, days, descriptor = arguments
    os.umask(0o077)
    store = UsageStore(Path(file), session)
    UsageWriter(CounterTable(int(descriptor)), store, int(days), link).run()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
