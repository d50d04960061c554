"""Logs are read in bounded pieces, and no line is lost or repeated between two pieces."""

import json
import os
import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import RequestError, WireError
from supervisor.logs import files
from supervisor.logs.reading import MOST_BYTES, MOST_LINES, read_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "m.log"


def append(log: Path, text: str | bytes) -> None:
    with open(log, "ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_the_last_lines_and_then_what_follows(log: Path) -> None:
    append(log, "".join(f"line {n}\n" for n in range(50)))
    first = read_log(log, 3, None)
    assert first["lines"] == ["line 47", "line 48", "line 49"]
    assert (first["unfinished"], first["more"], first["restarted"]) == ("", False, False)
    again = read_log(log, 3, first["position"])
    assert again == first | {"lines": []}
    append(log, "line 50\nline")
    second = read_log(log, 3, first["position"])
    assert (second["lines"], second["unfinished"]) == (["line 50"], "line")
    append(log, " 51\r\nline 52\nline 53\nline 54\nx")
    third = read_log(log, 3, second["position"])
    assert (third["lines"], third["unfinished"], third["more"]) == (["line 51", "line 52", "line 53"], "", True)
    fourth = read_log(log, 3, third["position"])
    assert (fourth["lines"], fourth["unfinished"], fourth["more"]) == (["line 54"], "x", False)


def test_a_log_that_comes_later_is_read_from_its_beginning(log: Path) -> None:
    none = read_log(log, 5, None)
    assert none == {"lines": [], "unfinished": "", "position": "0-0", "more": False, "restarted": False}
    assert read_log(log, 5, "0-0") == none
    append(log, "a\nb\n")
    assert read_log(log, 1, none["position"])["lines"] == ["a"]


@pytest.mark.parametrize("how", ["replaced", "truncated", "removed"])
def test_another_log_in_its_place_starts_anew(log: Path, how: str) -> None:
    append(log, "old line\n" * 10)
    before = read_log(log, 5, None)
    if how == "replaced":
        log.rename(log.with_name("other.log"))
    elif how == "truncated":
        os.truncate(log, 0)
    else:
        log.unlink()
        after = read_log(log, 5, before["position"])
        assert (after["lines"], after["position"], after["restarted"]) == ([], "0-0", True)
    append(log, "new line\n")
    after = read_log(log, 5, before["position"])
    assert (after["lines"], after["restarted"]) == (["new line"], True)
    assert not read_log(log, 5, after["position"])["restarted"]


def test_a_log_that_is_set_aside_is_read_to_its_end_before_the_new_one(log: Path) -> None:
    append(log, "one\n")
    before = read_log(log, 5, None)
    append(log, "two\nthree\nfour, which nobody completes")
    log.rename(log.with_name("m.log.1"))
    seen, position, more = [], before["position"], True
    while more:  # there is no new log yet
        part = read_log(log, 2, position)
        assert not part["restarted"]
        seen, position, more = [*seen, *part["lines"]], part["position"], part["more"]
    assert seen == ["two", "three", "four, which nobody completes"]
    append(log, "five\nsix\n")
    after = read_log(log, 5, position)
    assert (after["lines"], after["restarted"], after["more"]) == (["five", "six"], False, False)
    log.with_name("m.log.1").rename(log.with_name("kept"))  # a new file must not get its inode
    log.rename(log.with_name("m.log.1"))
    append(log, "seven\n")
    assert read_log(log, 5, after["position"])["lines"] == ["seven"]
    again = read_log(log, 5, before["position"])
    assert (again["lines"], again["restarted"]) == (["seven"], True)


def test_a_log_that_is_emptied_is_read_to_its_end_in_the_copy(log: Path) -> None:
    append(log, "one\n" * 10)
    before = read_log(log, 5, None)
    size = files.MAX_LOG_BYTES
    append(log, "two\n" + "x" * size + "\nunfinished")
    assert files.cut(log)
    assert log.stat().st_size == 0
    append(log, "three\n")
    shown, reply = [], read_log(log, MOST_LINES, before["position"])
    while True:
        assert not reply["restarted"]
        shown += reply["lines"]
        if not reply["more"]:
            break
        reply = read_log(log, MOST_LINES, reply["position"])
    assert (shown[0], shown[-2:]) == ("two", ["unfinished", "three"])
    assert "".join(shown).count("x") == size
    assert files.tail(log, 30, since=None)[1:] == ["unfinishedthree"]
    assert files.tail(log, 30) == ["three"]
    assert not files.cut(log)


def test_of_a_log_that_grew_too_fast_the_end_is_kept(log: Path) -> None:
    append(log, "first\n" + "y" * (3 * files.MAX_LOG_BYTES) + "\nlast\n")
    before = read_log(log, 1, None)
    assert files.cut(log)
    with open(log.with_name("m.log.1")) as copy:
        assert (
            copy.readline() == f"the first {files.MAX_LOG_BYTES + 12} bytes are left out here: the log grew too fast\n"
        )
        assert copy.read().endswith("y\nlast\n")
    append(log, "next\n")
    assert read_log(log, 5, before["position"]) == read_log(log, 5, "1-0")  # it begins anew


@pytest.mark.parametrize("old", [4, 10, 16])
def test_since_begins_in_the_log_that_was_set_aside(log: Path, old: int) -> None:
    """The lines of seconds 0 to 9 are in the log that was set aside, and those of 10 to 19 in the present one."""
    begin = datetime(2026, 1, 2, 3, 4, 0, tzinfo=UTC)
    for n in range(20):
        if n == 10:
            log.rename(log.with_name("m.log.1"))
        append(log, f'{{"time": "{begin.replace(second=n).isoformat()}", "message": "{n}"}}\n')
    lines, part = [], read_log(log, 3, None, since=begin.replace(second=old).timestamp())
    while True:
        lines += part["lines"]
        if not part["more"]:
            break
        part = read_log(log, 3, part["position"])
    assert [json.loads(line)["message"] for line in lines] == [str(n) for n in range(old, 20)]


def test_a_log_set_aside_that_cannot_be_read_is_left_out(log: Path) -> None:
    log.with_name("m.log.1").mkdir()
    line = '{"time": "2026-01-02T03:04:05+00:00", "message": "x"}'
    append(log, line + "\n")
    assert read_log(log, 5, None, since=0.0)["lines"] == [line]
    assert read_log(log, 5, "7-0")["lines"] == [line]


def test_what_is_read_is_bounded(log: Path) -> None:
    append(log, "short\n" * MOST_BYTES)
    assert len(read_log(log, MOST_LINES, None)["lines"]) == MOST_LINES
    part = read_log(log, MOST_LINES, f"{log.stat().st_ino}-0")
    assert len(part["lines"]) == MOST_LINES
    assert part["more"]
    append(log, "x" * (3 * MOST_BYTES))
    last = read_log(log, MOST_LINES, None)
    assert (last["lines"], len(last["unfinished"])) == ([], MOST_BYTES)
    append(log, "\n")
    last = read_log(log, MOST_LINES, None)
    assert ([len(line) for line in last["lines"]], last["unfinished"]) == ([MOST_BYTES - 1], ""), "its end is shown"


def test_a_line_that_is_too_long_comes_in_pieces(log: Path) -> None:
    append(log, "y" * (2 * MOST_BYTES + 100) + "\nnext\n")
    position, pieces = f"{log.stat().st_ino}-0", []
    for _ in range(4):
        part = read_log(log, MOST_LINES, position)
        position, pieces = part["position"], pieces + part["lines"]
    assert [len(piece) for piece in pieces] == [MOST_BYTES, MOST_BYTES, 100, 4]


def test_a_reader_that_follows_misses_nothing_and_sees_nothing_twice(log: Path) -> None:
    seed = int(os.environ.get("TEST_SEED", "16"))
    print("seed", seed)
    chance = random.Random(seed)
    whole = [f"{n} " + "z" * chance.randrange(chance.choice((3, 3000, 60_000))) for n in range(400)]
    text = "".join(line + "\n" for line in whole).encode()
    position, seen, at = "0-0", [], 0
    while at < len(text) or len(seen) < len(whole):
        size = chance.randrange(100_000)
        append(log, text[at : at + size])
        at += size
        part = read_log(log, chance.randrange(1, 40), position)
        assert not part["restarted"]
        assert sum(map(len, part["lines"])) <= MOST_BYTES
        position, seen = part["position"], seen + part["lines"]
    assert seen == whole


def test_bytes_that_are_no_text_are_replaced(log: Path) -> None:
    append(log, b"\xff\xfe \x1b[31mred\n\x00\n")
    assert read_log(log, 5, None)["lines"] == ["\ufffd\ufffd \x1b[31mred", "\x00"]


@pytest.mark.parametrize("after", ["", "1", "-1", "1-", "1-2-3", "a-b", "../m", "1" * 21 + "-0", "1-1\n", "０-０"])
def test_what_is_no_position_is_refused(log: Path, after: str) -> None:
    append(log, "line\n")
    with pytest.raises(RequestError, match="as `logs` returns it") as caught:
        read_log(log, 5, after)
    assert caught.value.field == "after"


def test_a_position_that_cannot_be_starts_anew(log: Path) -> None:
    append(log, "line\n")
    after = read_log(log, 5, f"{log.stat().st_ino}-{'9' * 20}")
    assert (after["lines"], after["restarted"]) == (["line"], True)


def put_fifo(log: Path) -> None:
    os.mkfifo(log)


def put_directory(log: Path) -> None:
    log.mkdir()


def put_device(log: Path) -> None:
    log.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [put_fifo, put_directory, put_device])
def test_what_is_no_file_is_refused_at_once(log: Path, put: Any) -> None:
    put(log)
    with pytest.raises(WireError, match="cannot be read: it is no regular file"):
        read_log(log, 5, None)


BEGIN = 1_763_830_000.0


def line_at(seconds: int, kind: str = "people") -> str:
    at = datetime.fromtimestamp(BEGIN + seconds, UTC)
    if kind == "json":
        return f'{{"time": "{at.isoformat(timespec="milliseconds").replace("+00:00", "Z")}", "message": "{seconds}"}}'
    if kind == "no offset":
        return f"{at.astimezone():%Y-%m-%d %H:%M:%S},000 INFO    {seconds}"
    zone = timezone(timedelta(hours=(9, -8, 5.5)[seconds % 3]))  # as if each line came from another machine
    return f"{at.astimezone(zone).isoformat(' ', 'milliseconds').replace('.', ',')} INFO    {seconds}"


@pytest.mark.parametrize("kind", ["people", "no offset", "json"])
def test_the_lines_from_a_time_on(log: Path, kind: str) -> None:
    append(log, "".join(line_at(n, kind) + f"\n  a line without a time, {'x' * (n % 300)}\n" for n in range(3000)))
    for first in (0, 1, 17, 1500, 2998, 2999):
        found = read_log(log, 2, None, BEGIN + first)
        assert found["lines"][0] == line_at(first, kind)
        assert found["more"] is (first < 2999)
    assert read_log(log, 5, None, BEGIN - 9)["lines"][0] == line_at(0, kind)
    assert read_log(log, 5, None, BEGIN + 2999.5)["lines"] == []
    for strange in (float("nan"), float("inf"), -float("inf")):
        assert len(read_log(log, 5, None, strange)["lines"]) in (0, 5)


def test_a_long_traceback_hides_no_later_line(log: Path) -> None:
    append(log, line_at(0) + "\n" + "  a frame of a stack\n" * 20_000 + line_at(5) + "\n")
    shown, reply = [], read_log(log, MOST_LINES, None, BEGIN + 3)
    while reply["more"]:
        shown += reply["lines"]
        reply = read_log(log, MOST_LINES, reply["position"])
    assert [*shown, *reply["lines"]][-1] == line_at(5)
