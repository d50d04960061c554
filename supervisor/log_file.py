"""The supervisor's log file. It is kept small, is opened again when somebody moves it, and notes lines that were
lost."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from protocol.process.log_lines import lost_line
from protocol.process.private_paths import make_private, open_private


class LogFile(logging.Handler):
    """The handler that appends each record to a file that only its owner can read.

    Each record goes to the file that has the log's name at that moment. So if logrotate has moved the log, or somebody
    has removed it, the next record creates it again.

    A failed write loses the record, but does not stop the supervisor. ``tell`` reports the first failure. When writing
    works again, a line before the next record says how many records are missing.

    path       path of the log; its directory is made with mode 0700
    max_bytes  size beyond which the log is renamed to ``NAME.log.1``
    tell       called with one line for people when the log begins to lose records
    """

    def __init__(self, path: Path, max_bytes: int, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.path = path
        self._max_bytes = max_bytes
        self._tell = tell
        self._fd = -1
        self._failure: str | None = None
        self._missing = 0

    @property
    def trouble(self) -> str | None:
        """Return why records are missing, and how many; None while all of them are written."""
        if self._failure is None:
            return None
        message = f"{self.path} cannot be written: {self._failure}; lines lost: {self._missing}"
        return f"{message}; free its disk, or make the file writable"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record) + "\n")
        except OSError as e:
            first, self._failure = self._failure is None, e.strerror or str(e)
            self._missing += 1
            if first:
                self._tell(f"the log {self.trouble}")

    def lost_lines(self, missing: int, why: str) -> str:
        """Return the line that stands where records are missing."""
        return lost_line(self, missing, why)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()

    def _write(self, line: str) -> None:
        if self._failure is not None:
            line = f"{self.lost_lines(self._missing, self._failure)}\n{line}"
        data = line.encode(errors="backslashreplace")
        self._open(len(data))
        if (written := os.write(self._fd, data)) < len(data):  # the disk became full in the middle of the line
            os.write(self._fd, data[written:])
        self._failure, self._missing = None, 0

    def _open(self, more: int) -> None:
        """Open the file that has the log's name now, with room for ``more`` bytes."""
        there = self._named()
        if there is not None and stat.S_ISREG(there.st_mode) and there.st_size + more > self._max_bytes:
            self.path.rename(self.path.with_name(self.path.name + ".1"))
            there = None
        if self._fd >= 0 and there is not None and os.path.samestat(there, os.fstat(self._fd)):
            return
        if there is None:
            make_private(self.path.parent)
        # Without O_NONBLOCK, a FIFO in the log's place would stop this process until somebody reads it.
        fd = open_private(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def _named(self) -> os.stat_result | None:
        try:
            return os.stat(self.path)
        except FileNotFoundError:
            return None
