"""Read the last lines of a log, and go on from there, for the verb ``logs``.

A call reads at most ``MOST_BYTES`` from the file, and some more to find a time, so that clients wait only a moment for
it. The supervisor itself writes its records to the same directory, so it waits for that disk anyway.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
_TIME = re.compile(rb'\{"time": "([^"]{19,32})"|(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?(?:[+-]\d\d:\d\d)?) ')
"""How a line of a log begins: as JSON, in UTC, or for people, in local time with its offset. A line of an engine
may have a time without an offset: it is taken as local time here. Lines of a traceback have no time."""
_POSITION = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_NOWHERE = "0-0"
"""The position in a log that does not exist yet."""


@dataclass(frozen=True)
class _Log:
    """A log that is open for reading.

    file  the descriptor
    """

    file: int
    status: os.stat_result

    @property
    def size(self) -> int:
        return self.status.st_size

    def has(self, inode: int, offset: int) -> bool:
        """Return whether a position is one of this file."""
        return inode == self.status.st_ino and offset <= self.size


def read_log(path: Path, lines: int, after: str | None, since: float | None = None) -> dict[str, Any]:
    """Return the result of the verb ``logs`` for one log. A log that does not exist is empty.

    A position is the number of the file (its inode) and an offset in bytes. A log that was set aside as ``NAME.log.1``,
    by its name or as a copy, is read before the present one: from a position in it, or if it has lines since a time. If
    neither file is that of the position, or the file has become shorter, reading begins at the beginning of the present
    file.

    path   the log
    lines  the greatest number of lines
    after  the position to go on from; None for the last lines
    since  seconds since 1970. Without ``after``: the first lines from that time on, and not the last ones

    Raises RequestError for a text that is no position, and WireError if the log cannot be read.
    """
    inode, offset = _parsed(after)
    with ExitStack() as stack:
        # The present log is opened first. If it is set aside after that, its descriptor is still that of the position;
        # in the other order, lines could be in neither of the two files.
        present = _opened(path, stack)
        try:
            if after is None and since is None:
                return _result([], "", _NOWHERE, restarted=False) if present is None else _last(present, lines)
            aside = _set_aside(path, stack)
            goes_on = False
            if aside is not None:
                goes_on = aside.has(inode, offset) or _was_cut(present, aside, inode, offset)
                begin = offset if goes_on else aside.size
                if after is None and since is not None:
                    begin = _offset_since(aside, since)
                if begin < aside.size:
                    return _following_aside(aside, begin, lines)
            if present is None:
                return _result([], "", after if after and goes_on else _NOWHERE, restarted=inode != 0 and not goes_on)
            if after is None and since is not None:
                return _following(present, _offset_since(present, since), lines, restarted=False)
            here = present.has(inode, offset)
            restarted = inode != 0 and not here and not goes_on
            return _following(present, offset if here else 0, lines, restarted=restarted)
        except OSError as e:
            raise _unreadable(path, e.strerror or str(e)) from None


def _opened(path: Path, stack: ExitStack) -> _Log | None:
    """Open a log; None if there is none. Raises WireError if it cannot be read."""
    try:
        # A log in whose place somebody has put a FIFO must not stop the supervisor.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise _unreadable(path, e.strerror or str(e)) from None
    stack.callback(os.close, file)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(path, "it is no regular file")
    return _Log(file, status)


def _set_aside(path: Path, stack: ExitStack) -> _Log | None:
    """Open the log that was set aside; None if there is none, or none that can be read."""
    with suppress(WireError):
        return _opened(path.with_name(path.name + ".1"), stack)
    return None


def _was_cut(present: _Log | None, aside: _Log, inode: int, offset: int) -> bool:
    """Return whether a position is one in the copy of a log that was emptied, see ``files.cut``."""
    return present is not None and present.status.st_ino == inode and present.size < offset <= aside.size


def _offset_since(log: _Log, since: float) -> int:
    """Return the offset of the first line that was written at ``since`` or later; the log's size if there is none.

    The times of lines ascend, so this halves the range in which the line must be. Lines without a time belong to the
    line before them. Where there are too many of them, some lines that are older may be taken along.
    """
    size = log.size
    least, most, found = 0, size, size
    while least < most:
        middle = (least + most) // 2
        data = os.pread(log.file, _PROBE_BYTES, middle)
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


def _last(log: _Log, lines: int) -> dict[str, Any]:
    """Return the last lines of the end of a log."""
    begin = max(0, log.size - MOST_BYTES)
    data = os.pread(log.file, MOST_BYTES, begin)
    *complete, unfinished = data.split(b"\n")
    if begin and len(complete) > 1:
        del complete[0]  # its beginning was not read. If it is the only line, its end is better than nothing
    return _result(complete[-lines:], unfinished, _position(log, begin + len(data) - len(unfinished)), restarted=False)


def _following_aside(log: _Log, begin: int, lines: int) -> dict[str, Any]:
    """Return the first lines behind an offset of a log that was set aside. More follow, there or in the present log."""
    found = _following(log, begin, lines, restarted=False)
    if not found["more"] and len(found["lines"]) < lines:
        # Nobody completes a line there any more.
        rest = [found["unfinished"]] if found["unfinished"] else []
        found |= {"lines": found["lines"] + rest, "position": _position(log, log.size)}
    return found | {"unfinished": "", "more": True}


def _following(log: _Log, begin: int, lines: int, *, restarted: bool) -> dict[str, Any]:
    """Return the first lines behind an offset."""
    data = os.pread(log.file, MOST_BYTES, begin)
    *complete, unfinished = data.split(b"\n")
    end = begin + len(data) - len(unfinished)
    if not complete and len(data) == MOST_BYTES:
        complete, unfinished, end = [data], b"", begin + len(data)
    if len(complete) > lines:
        end = begin + sum(len(line) + 1 for line in complete[:lines])
        complete, unfinished = complete[:lines], b""
    more = begin + len(data) < log.size or end + len(unfinished) < begin + len(data)
    if more:
        unfinished = b""
    return _result(complete, unfinished, _position(log, end), more=more, restarted=restarted)


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


def _position(log: _Log, offset: int) -> str:
    return f"{log.status.st_ino}-{offset}"


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
