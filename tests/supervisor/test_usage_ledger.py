"""The ledger's rows by key, model and day, its table, and its file."""

import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.process.helper_link import HelperLink
from supervisor.keys.rights import OWNER, Identity
from supervisor.requests.counters import (
    COMPLETION,
    COUNTS,
    EPOCH,
    PROMPT,
    REQUESTS,
    SERIAL,
    WRITTEN,
    WRITTEN_SERIAL,
    CounterTable,
    make_table,
)
from supervisor.requests.usage_ledger import (
    DAY_S,
    JUMP_S,
    OTHERS,
    STAYS_S,
    BelievedTime,
    Retention,
    UsageLedger,
    UsageRow,
    day_text,
)
from supervisor.usage.writer import Count, StoreTrouble, UsageStore, UsageWriter

LAPTOP, WEB = Identity("laptop", "k" * 40), Identity("web", "f" * 64)
NOON = 20_000 * DAY_S + DAY_S // 2


@pytest.fixture
def table() -> Iterator[CounterTable]:
    descriptor = make_table()
    yield CounterTable(descriptor)
    os.close(descriptor)


def acknowledge(row: UsageRow) -> None:
    """Do what the writer does after a write."""
    for offset, value in enumerate(list(row.counters[COUNTS])):
        row.counters[WRITTEN.start + offset] = value
    row.counters[WRITTEN_SERIAL] = row.counters[SERIAL]


def test_each_key_and_model_has_a_row_for_the_day(table: CounterTable) -> None:
    ledger = UsageLedger(table, NOON)
    row = ledger.row(LAPTOP, "letters")
    assert ledger.row(LAPTOP, "letters") is row
    assert len({row.place, ledger.row(LAPTOP, "stories").place, ledger.row(WEB, "letters").place}) == 3
    assert table.text(row.place) == [day_text(20_000), LAPTOP.key_id, "laptop", "letters"]
    assert table.text(ledger.row(OWNER, "letters").place) == [day_text(20_000), "", "", "letters"]
    row.counters[COMPLETION] += 7
    assert table.counters(row.place)[COMPLETION] == 7
    assert day_text(20_000) == "2024-10-04"


def test_rows_of_a_day_that_is_over_are_used_again_once_they_are_written_and_unused(table: CounterTable) -> None:
    ledger = UsageLedger(table, NOON, rows=4)
    old, other = ledger.row(LAPTOP, "letters"), ledger.row(WEB, "letters")
    old.counters[PROMPT] += 5
    acknowledge(other)
    ledger.advance(NOON + DAY_S, {other.place})
    assert ledger.row(LAPTOP, "a").place not in (old.place, other.place), "one is not written, the other is in use"
    acknowledge(old)
    old.counters[PROMPT] += 1  # after it was written
    ledger.advance(NOON + DAY_S, ())
    fresh = ledger.row(LAPTOP, "b")
    assert fresh.place == other.place
    assert fresh.counters[SERIAL] > other.place
    assert list(fresh.counters[COUNTS]) == [0, 0, 0, 0], "the counts of the former row are gone"
    acknowledge(old)
    ledger.advance(NOON + DAY_S, ())
    assert ledger.row(LAPTOP, "b") is fresh, "a row of today stays"
    assert ledger.row(LAPTOP, "c").place == old.place


def test_a_full_table_counts_further_keys_together_and_loses_no_token(table: CounterTable) -> None:
    ledger = UsageLedger(table, NOON, rows=4)
    rows = [ledger.row(LAPTOP, f"m{i}") for i in range(5)]
    assert rows[2] is rows[3] is rows[4] is not rows[1]
    assert table.text(rows[2].place)[1:] == [OTHERS, OTHERS, OTHERS]
    assert ledger.crowded_out == 3


def test_after_a_clock_was_set_back_another_row_of_the_same_day_begins(table: CounterTable) -> None:
    ledger = UsageLedger(table, NOON)
    first = ledger.row(LAPTOP, "letters")
    ledger.advance(NOON + DAY_S, ())
    tomorrow = ledger.row(LAPTOP, "letters")
    ledger.advance(NOON, ())
    again = ledger.row(LAPTOP, "letters")
    assert len({first.place, tomorrow.place, again.place}) == 3
    assert [row.counters[EPOCH] for row in (first, tomorrow, again)] == [0, 0, 1]
    assert table.text(again.place) == table.text(first.place)
    ledger.advance(NOON + DAY_S, ())
    assert ledger.row(LAPTOP, "letters").counters[EPOCH] == 1, "only a day that was set back begins an epoch"


def test_a_jump_of_the_clock_is_believed_when_it_lasts() -> None:
    clock, ahead = BelievedTime(NOON, 100.0), 500 * DAY_S
    for second in range(int(JUMP_S)):
        assert clock.at(NOON + ahead + second, 100.0 + second) == NOON + second
    assert clock.at(NOON + 61, 161.0) == NOON + 61, "back in time"
    for second in range(62, 122):
        assert clock.at(NOON + ahead + second, 100.0 + second) == NOON + second, (
            "another jump, which has its own minute"
        )
    assert clock.at(NOON + ahead + 122, 222.0) == NOON + ahead + 122
    assert clock.at(NOON + 123, 223.0) == NOON + ahead + 123, "the way back is a jump, too"
    assert clock.at(NOON + 183, 283.0) == NOON + 183


def test_a_clock_that_is_adjusted_is_followed() -> None:
    clock = BelievedTime(NOON, 100.0)
    for minute in range(1, 60):
        assert clock.at(NOON + 100 * minute, 100.0 + 60 * minute) == NOON + 100 * minute
    assert clock.at(NOON + 5900.0 + DAY_S, 3640.0 + DAY_S) == NOON + 5900.0 + DAY_S, "a day of suspension"


def test_days_are_deleted_when_they_have_been_too_old_for_a_day() -> None:
    retention = Retention()
    assert retention.look(1000, 0.0) is None
    assert retention.look(1500, 1.0) is None, "a clock that jumps ahead"
    assert retention.look(1000, 3.0) is None
    assert set(retention.seen) == {1000}
    assert retention.look(1001, STAYS_S / 2) is None
    again = Retention()  # after a restart
    again.seen = dict(retention.seen)
    assert again.look(1001, STAYS_S / 2) == 1000
    assert again.look(1001, 1.0) == 1000, "it could not be deleted"
    again.deleted(1000)
    assert again.look(1001, 1.0) is None
    assert again.look(1001, STAYS_S / 2) == 1001


def count(day: str = "2026-01-02", model: str = "letters", key: str = "laptop", tokens: int = 10) -> Count:
    return Count(day, f"id of {key}", key, model, 1, tokens, 0, 2 * tokens)


def everything(store: UsageStore) -> dict[str, int]:
    total: dict[str, int] = store.read(since=None, key_id=None, key=None, model=None, models=None)["total"]
    return total


def test_a_count_that_is_written_again_replaces_the_former_one(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "new" / "usage.sqlite3", "a")
    for tokens in (10, 10, 15):
        store.write([count(tokens=tokens)])
    assert everything(store) == {"requests": 1, "prompt_tokens": 15, "cached_tokens": 0, "completion_tokens": 30}


def test_sessions_that_are_over_are_added_up_once(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    for session in ("a", "b", "c"):
        store = UsageStore(file, session)
        store.write([count(), count(day="2026-01-01")])
        store.write([count(), count(day="2026-01-01")])
        store.close()
        os.close(store._lock)  # as the end of the process does
    assert everything(UsageStore(file, "d"))["prompt_tokens"] == 60
    with sqlite3.connect(file) as connection:
        assert {row[0] for row in connection.execute("SELECT session FROM usage")} == {""}
    connection.close()


def test_the_counts_of_a_key_a_model_or_a_time_can_be_read(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.sqlite3", "a")
    store.write([count(), count(model="qwen-8b", key="web"), count(day="2025-12-31"), count(key="")])
    everybody = {"since": None, "key_id": None, "key": None, "model": None, "models": None}

    def rows(**wanted: object) -> list[tuple[str, str | None, str]]:
        found = store.read(**{**everybody, **wanted})["rows"]
        return [(row["day"], row["key"], row["model"]) for row in found]

    assert rows() == [
        ("2026-01-02", None, "letters"), ("2026-01-02", "laptop", "letters"), ("2026-01-02", "web", "qwen-8b"),
        ("2025-12-31", "laptop", "letters"),
    ]  # fmt: skip
    assert rows(key="web") == rows(key_id="id of web") == rows(models=["qwen*"]) == [("2026-01-02", "web", "qwen-8b")]
    assert rows(key="") == [("2026-01-02", None, "letters")]
    assert len(rows(since="2026-01-01")) == 3
    assert rows(model="letters", since="2026-01-03") == []
    store.remove_before("2026-01-01")
    assert len(rows()) == 3


def test_a_file_that_cannot_be_used_is_named_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    first = UsageStore(file, "a")
    first.write([count()])
    with pytest.raises(StoreTrouble, match=r"usage.sqlite3 is in use by another supervisor: give each its own"):
        UsageStore(file, "b").write([count()])
    wrong = tmp_path / "wrong.sqlite3"
    wrong.write_bytes(b"this is no database, " * 100)
    broken = UsageStore(wrong, "a")
    with pytest.raises(StoreTrouble, match=r"file is not a database; move the file away"):
        broken.write([count()])
    wrong.rename(tmp_path / "away")
    broken.write([count()])
    newer = tmp_path / "newer.sqlite3"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(StoreTrouble, match=r"is of a newer modelctl \(version 2\)"):
        UsageStore(newer, "a").write([count()])


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    store = UsageStore(file, "a")
    store.write([count()])
    file.rename(tmp_path / "old.sqlite3")
    store.write([count(tokens=3)])
    assert store.openings == 2
    assert everything(store)["prompt_tokens"] == 3


def test_what_is_not_written_yet_is_counted(table: CounterTable) -> None:
    ledger = UsageLedger(table, NOON)
    written, fresh = ledger.row(LAPTOP, "letters"), ledger.row(WEB, "letters")
    for row in (written, fresh):
        row.counters[REQUESTS] += 2
        row.counters[PROMPT] += 30
    acknowledge(written)
    written.counters[COMPLETION] += 4
    assert ledger.unwritten() == (2, 34)


def test_the_writer_keeps_the_days_that_it_is_told_to_keep(table: CounterTable, tmp_path: Path) -> None:
    """A clock that jumps 500 days ahead for three seconds deletes nothing. Hours of an earlier writer count."""
    file, today = tmp_path / "usage.sqlite3", NOON // DAY_S
    days = [day_text(today - age) for age in range(4)]
    before = UsageStore(file, "a")
    before.write([count(day=day) for day in days])
    before.close()
    os.close(before._lock)

    def kept(store: UsageStore) -> list[str]:
        rows = store.read(since=None, key_id=None, key=None, model=None, models=None)["rows"]
        return [row["day"] for row in rows]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        store = UsageStore(file, "b")
        writer = UsageWriter(table, store, 2, HelperLink(theirs.fileno()))
        for second in range(7):
            writer.write(NOON + second + (500 * DAY_S if 2 <= second < 5 else 0), 100.0 + second)
        writer.write(NOON + DAY_S / 4, 100.0 + DAY_S / 4)
        assert kept(store) == days
        store.close()
        os.close(store._lock)
        store = UsageStore(file, "c")
        writer = UsageWriter(table, store, 2, HelperLink(theirs.fileno()))
        writer.write(NOON + DAY_S / 4, 5.0)
        writer.write(NOON + DAY_S, 3.0 + 3 * DAY_S / 4)
        assert kept(store) == days, "two seconds are missing"
        writer.write(NOON + DAY_S, 6.0 + 3 * DAY_S / 4)
    assert kept(store) == days[:2], "the day that was today when the hours began, and yesterday"


def test_counts_of_before_and_after_a_clock_was_set_back_are_added_up(table: CounterTable, tmp_path: Path) -> None:
    store, ledger = UsageStore(tmp_path / "usage.sqlite3", "a"), UsageLedger(table, NOON)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = UsageWriter(table, store, 400, HelperLink(theirs.fileno()))
        for turn, wall in enumerate((NOON, NOON + 500 * DAY_S, NOON, NOON + 500 * DAY_S, NOON)):
            ledger.advance(wall, ())
            ledger.row(LAPTOP, "letters").counters[PROMPT] += 10
            writer.write(NOON, 100.0 + turn)
            ledger.advance(wall, ())  # frees the row that was written
        assert everything(store)["prompt_tokens"] == 50
        store.close()
        ledger.row(LAPTOP, "letters").counters[PROMPT] += 1
        writer.write(NOON, 200.0)
        assert everything(store)["prompt_tokens"] == 51, "opened again, with its own rows"
        store.close()
        os.close(store._lock)
    assert everything(UsageStore(tmp_path / "usage.sqlite3", "b"))["prompt_tokens"] == 51


def test_the_counters_hold_more_than_a_u32(table: CounterTable) -> None:
    row = UsageLedger(table, NOON).row(LAPTOP, "letters")
    row.counters[REQUESTS] += (1 << 40) + 1
    assert row.counters[REQUESTS] == (1 << 40) + 1
