"""The program that writes the counters to the disk, and answers questions about them. It may wait for the disk.

    python -P -m supervisor.usage.writer FILE SESSION DAYS TABLE

FILE     the SQLite file, see ``store``
SESSION  the text of this supervisor's life
DAYS     days that are kept, today included
TABLE    the descriptor of the table of counters, see ``counters``
stdin    the link to the supervisor (``helper_link``), with the messages of ``counters``

The program answers each question. It says Trouble when the file cannot be used, and when it can be used again. When the
supervisor ends, however it ends, the socket ends. Then the program writes the last counts and leaves.
"""

import fcntl
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.process.helper_link import HelperLink, become_helper, serve
from protocol.values import pack
from supervisor.requests.counters import (
    COUNTS,
    EPOCH,
    SERIAL,
    TO_WRITER,
    WRITTEN,
    WRITTEN_SERIAL,
    CounterTable,
    Trouble,
    UsageAnswer,
)
from supervisor.requests.usage_ledger import DAY_S, Retention, day_number, day_text

# The file with the counts: SQLite, with one row for each day, key, model and session.
#
# A session is one life of a supervisor, or the part of it after its clock was set back (SESSION.EPOCH). Its writer
# stores the counts of the session as they stand, again and again, so a write that is repeated counts nothing twice.
# When the session is over, the next writer adds its rows to those of the session "" and removes them. A lock makes
# sure that the former writer has ended by then.


VERSION: Final = 1
"""The version of the file's tables."""
LOCK_S: Final = 2.0
"""Seconds to wait for the lock. The writer of a supervisor that was killed still writes its last counts."""
MOST_ROWS: Final = 5_000
"""Most rows of one answer, which must fit a message."""
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key_id TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, session TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key_id, model, session)
) WITHOUT ROWID"""
_AGES: Final = "CREATE TABLE IF NOT EXISTS ages (day TEXT PRIMARY KEY, seconds REAL NOT NULL) WITHOUT ROWID"
"""For how many seconds the days before each day were seen to be too old, see ``usage_ledger.Retention``."""
_SUMS: Final = ", ".join(f"sum({name})" for name in _COUNTS)
_ADD: Final = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)
_SET: Final = ", ".join(f"{name} = excluded.{name}" for name in ("key", *_COUNTS))


class Count(NamedTuple):
    """The counts of one row of the table of counters, as they stand."""

    day: str
    key_id: str
    key: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    epoch: int = 0


class StoreTrouble(Exception):
    """The file cannot be used now. The message says why, and what to do."""


class UsageStore:
    """The open file. Every method raises StoreTrouble if the disk or the file does not do what is needed.

    session  a text that no other supervisor's life has
    """

    def __init__(self, file: Path, session: str) -> None:
        self._file = file
        self._session = session
        self._lock = -1
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self.openings = 0
        """How often the file was opened. After that it may be another file, which has none of the counts."""

    def write(self, counts: Sequence[Count]) -> None:
        """Store the counts of this session as they stand."""
        statement = (
            "INSERT INTO usage (day, key_id, key, model, session, requests, prompt_tokens, cached_tokens, "
            "completion_tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
            f"ON CONFLICT (day, key_id, model, session) DO UPDATE SET {_SET}"
        )
        rows = [(*count[:4], self._part(count.epoch), *count[4:8]) for count in counts]
        self._change([(statement, rows)])

    def _part(self, epoch: int) -> str:
        return f"{self._session}.{epoch}" if epoch else self._session

    def remove_before(self, day: str) -> None:
        """Forget the days before this one."""
        self._change([("DELETE FROM usage WHERE day < ?", [(day,)])])

    def ages(self) -> dict[str, float]:
        """Return what ``keep_ages`` has stored."""
        with self._opened() as connection:
            return dict(connection.execute("SELECT day, seconds FROM ages"))

    def keep_ages(self, ages: dict[str, float]) -> None:
        """Store for how many seconds the days before each day were seen to be too old."""
        self._change([("DELETE FROM ages", [()]), ("INSERT INTO ages VALUES (?, ?)", list(ages.items()))])

    def read(
        self, *, since: str | None, key_id: str | None, key: str | None, model: str | None, models: Sequence[str] | None
    ) -> dict[str, Any]:
        """Return the counts by day, key and model, the latest day first, and their sums.

        key_id  the id of the one key; None for all
        key     the name of the key; None for all, and empty for requests without a key
        models  patterns of the models that are meant; None for all
        """
        wanted = {"day >= ?": since, "key_id = ?": key_id, "key = ?": key, "model = ?": model}
        clauses = [clause for clause, value in wanted.items() if value is not None]
        values = [value for value in wanted.values() if value is not None]
        if models is not None:
            clauses.append("may_use(model)")
        where = f"WHERE {' AND '.join(clauses)} " if clauses else ""
        with self._opened() as connection:
            connection.create_function(
                "may_use",
                1,
                lambda name: any(fnmatchcase(name, pattern) for pattern in models or ()),
                deterministic=True,
            )
            names = f"SELECT day, key, model, {_SUMS} FROM usage {where}GROUP BY day, key_id, model "
            order = "ORDER BY day DESC, key, model LIMIT ?"
            rows = connection.execute(names + order, [*values, MOST_ROWS + 1]).fetchall()
            total = connection.execute(f"SELECT {_SUMS} FROM usage {where}", values).fetchone()
        columns = ("day", "key", "model", *_COUNTS)
        return {
            "rows": [dict(zip(columns, row, strict=True)) | {"key": row[1] or None} for row in rows[:MOST_ROWS]],
            "total": dict(zip(_COUNTS, (count or 0 for count in total), strict=True)),
            "more": len(rows) > MOST_ROWS,
        }

    def last_days(self) -> dict[str, str]:
        """Return the last day of each key's usage, by the key's id."""
        with self._opened() as connection:
            return dict(connection.execute("SELECT key_id, max(day) FROM usage WHERE key_id <> '' GROUP BY key_id"))

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _change(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]]) -> None:
        with self._opened() as connection, connection:  # the second one commits
            for statement, rows in statements:
                connection.executemany(statement, rows)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the file if that is needed. Close it at an error of SQLite, which becomes StoreTrouble."""
        try:
            yield self._open()
        except sqlite3.Error as e:
            self.close()
            remedy = "mend that; the counts are kept in memory until then"
            if (isinstance(e, sqlite3.DatabaseError) and "not a database" in str(e)) or "malformed" in str(e):
                remedy = "move the file away, and a new one is made; the counts are kept in memory until then"
            raise StoreTrouble(f"{self._file} cannot be used: {e}; {remedy}") from None

    def _open(self) -> sqlite3.Connection:
        """Return the connection. If there is none, take the lock, open the file and take in former sessions.

        A file that was moved away is not written to any more.
        """
        if self._connection is not None and self._inode == _inode_of(self._file):
            return self._connection
        self.close()
        self._take_lock()
        connection = sqlite3.connect(self._file, timeout=1.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")  # others may read the file while this process writes
            connection.execute("PRAGMA synchronous = FULL")  # what was committed survives a loss of power
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise StoreTrouble(f"{self._file} is of a newer modelctl (version {version}): move it away, or update")
            with connection:
                connection.execute(_TABLE)
                connection.execute(_AGES)
                connection.execute(f"PRAGMA user_version = {VERSION}")
                self._merge(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._inode = connection, _inode_of(self._file)
        self.openings += 1
        return connection

    def _merge(self, connection: sqlite3.Connection) -> None:
        former = "FROM usage WHERE session NOT IN ('', ?) AND session NOT GLOB ?"
        own = [self._session, f"{self._session}.*"]
        connection.execute(
            f"INSERT INTO usage SELECT day, key_id, max(key), model, '', {_SUMS} {former} GROUP BY day, key_id, model "
            f"ON CONFLICT (day, key_id, model, session) DO UPDATE SET {_ADD}",
            own,
        )
        connection.execute(f"DELETE {former}", own)

    def _take_lock(self) -> None:
        if self._lock >= 0:
            return
        path = self._file.with_name(f"{self._file.name}.lock")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise StoreTrouble(
                f"{path} cannot be opened: {e.strerror}; mend that, or set supervisor.usage.file"
            ) from None
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
            os.close(lock)
            message = f"{self._file} is in use by another supervisor: give each its own supervisor.usage.file"
            raise StoreTrouble(message)
        self._lock = lock


def _inode_of(file: Path) -> int:
    try:
        return file.stat().st_ino
    except OSError:
        return 0


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
            self._link.send(pack(Trouble(trouble)))

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
        asked = TO_WRITER.read(record)
        self.write(time.time(), _steady())
        try:
            if self._trouble is not None:
                raise StoreTrouble(self._trouble)
            result = self._store.last_days() if asked.about is None else self._store.read(**asked.about)
            body = pack_body({"result": result})
        except StoreTrouble as e:
            body = pack_body({"error": WireError(ErrorCode.HELPER_FAILED, str(e)).to_wire()})
        self._link.send(pack(UsageAnswer(asked.number, body)))


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
