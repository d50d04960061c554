"""Read the last lines of a log, and go on from there, for the verb ``logs``.

A call reads at most ``MOST_BYTES`` from the file, and some more to find a time, so that clients wait only a moment for
it. The logs are where the
supervisor itself writes with every record, so the disk that holds them is one that the supervisor waits for anyway.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from protocol.errors import ErrorCode, RequestError, WireError

MOST_LINES = 1000
"""Lines that one call returns."""
MOST_BYTES = 128 << 10
"""Bytes that one call reads. A line that is longer is returned in pieces of this size."""
_PROBE_BYTES = 16 << 10
"""Bytes that are read at each place where a line with a time is looked for: at about 25 places of a log of 8 MiB."""
_TIME = re.compile(rb'\{"time": "([^"]{19,32})"|(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?) ')
"""How a line of a log begins: as JSON, in UTC, or for people, in local time. Lines of a traceback have no time."""
_POSITION = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_NOWHERE = "0-0"
"""The position in a log that does not exist yet."""


def read_log(path: Path, lines: int, after: str | None, since: float | None = None) -> dict[str, Any]:
    """Return the result of the verb ``logs`` for one log. A log that does not exist is empty.

    A position is the number of the file (its inode) and an offset in bytes. If the log at ``path`` is another file than
    that of the position, or has become shorter, reading begins at the beginning of the present file.

    path   the log
    lines  the greatest number of lines
    after  the position to go on from; None for the last lines
    since  seconds since 1970. Without ``after``: the first lines from that time on, and not the last ones

    Raises RequestError for a text that is no position, and WireError if the log cannot be read.
    """
    inode, offset = _parsed(after)
    try:
        # A log in whose place somebody has put a FIFO must not stop the supervisor.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _result([], "", _NOWHERE, restarted=inode != 0)
    except OSError as e:
        raise _unreadable(path, e.strerror or str(e)) from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(path, "it is no regular file")
        size = status.st_size
        if after is None and since is not None:
            begin = _offset_since(file, size, since)
            return _following(_read(file, begin), status, begin, lines, restarted=False)
        if after is None:
            return _last(_read(file, max(0, size - MOST_BYTES)), status, lines)
        goes_on = inode == status.st_ino and offset <= size
        begin = offset if goes_on else 0
        return _following(_read(file, begin), status, begin, lines, restarted=inode != 0 and not goes_on)
    except OSError as e:
        raise _unreadable(path, e.strerror or str(e)) from None
    finally:
        os.close(file)


def _read(file: int, begin: int) -> bytes:
    return os.pread(file, MOST_BYTES, begin)


def _offset_since(file: int, size: int, since: float) -> int:
    """Return the offset of the first line that was written at ``since`` or later; ``size`` if there is none.

    The times of lines ascend, so this halves the range in which the line must be. Lines without a time belong to the
    line before them. Where there are too many of them, some lines that are older may be taken along.
    """
    least, most, found = 0, size, size
    while least < most:
        middle = (least + most) // 2
        data = os.pread(file, _PROBE_BYTES, middle)
        first = next(_timed_lines(data, whole=middle == 0), None)
        if first is None:
            most = middle
            if middle + len(data) < size:
                found = middle + max(0, data.find(b"\n") + 1)
        elif first[1] >= since:
            most, found = middle, middle + first[0]
        else:
            least = middle + first[0] + 1
    return found


def _timed_lines(data: bytes, *, whole: bool) -> Iterator[tuple[int, float]]:
    """Yield (offset, seconds since 1970) of each line that has a time.

    whole  whether the data begins with the beginning of a line
    """
    at = 0 if whole else data.find(b"\n") + 1
    while whole or at:
        if found := _TIME.match(data, at):
            with suppress(ValueError):  # it only looks like a time
                yield at, datetime.fromisoformat((found[1] or found[2]).decode("ascii")).timestamp()
        at = data.find(b"\n", at) + 1
        whole = False


def _last(data: bytes, status: os.stat_result, lines: int) -> dict[str, Any]:
    """Return the last lines of the end of a log."""
    begin = max(0, status.st_size - MOST_BYTES)
    *complete, unfinished = data.split(b"\n")
    if begin and complete:
        del complete[0]  # its beginning was not read
    return _result(
        complete[-lines:], unfinished, _position(status, begin + len(data) - len(unfinished)), restarted=False
    )


def _following(data: bytes, status: os.stat_result, begin: int, lines: int, *, restarted: bool) -> dict[str, Any]:
    """Return the first lines behind an offset."""
    *complete, unfinished = data.split(b"\n")
    end = begin + len(data) - len(unfinished)
    if not complete and len(data) == MOST_BYTES:
        complete, unfinished, end = [data], b"", begin + len(data)
    if len(complete) > lines:
        end = begin + sum(len(line) + 1 for line in complete[:lines])
        complete, unfinished = complete[:lines], b""
    more = begin + len(data) < status.st_size or end + len(unfinished) < begin + len(data)
    if more:
        unfinished = b""
    return _result(complete, unfinished, _position(status, end), more=more, restarted=restarted)


def _result(
    lines: list[bytes], unfinished: bytes | str, position: str, *, restarted: bool, more: bool = False
) -> dict[str, Any]:
    if isinstance(unfinished, bytes):
        unfinished = unfinished.decode(errors="replace")
    return {
        "lines": [line.decode(errors="replace").removesuffix("\r") for line in lines],
        "unfinished": unfinished,
        "position": position,
        "more": more,
        "restarted": restarted,
    }


def _position(status: os.stat_result, offset: int) -> str:
    return f"{status.st_ino}-{offset}"


def _parsed(after: str | None) -> tuple[int, int]:
    if after is None:
        return 0, 0
    found = _POSITION.fullmatch(after)
    if found is None:
        raise RequestError(
            "after must be a position as `logs` returns it: two numbers, such as 4711-8192", field="after"
        )
    return int(found[1]), int(found[2])


def _unreadable(path: Path, why: str) -> WireError:
    return WireError(ErrorCode.INTERNAL, f"{path} cannot be read: {why}")
