"""Log files of the supervisor and of models, and how each process writes its own.

A file is kept small, is opened again when somebody moves it, and notes lines that were lost.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protocol.process.logs import lost_line
from protocol.process.paths import make_private, open_private
from protocol.process.shown import LogStyle


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


# How each process writes its log: the settings of models.yaml, and the levels that operators have set since.
#
# ``LogControl`` in supervisor/status.py has the processes follow.


class LogStyles:
    """The styles of all logs.

    start  what models.yaml says, for every process whose level nobody has set
    """

    def __init__(self, start: LogStyle) -> None:
        self.start = start
        self._levels: dict[str, str] = {}

    def of(self, name: str) -> LogStyle:
        """Return the style of a model's workers, of the supervisor or of the gateway."""
        return LogStyle(self._levels.get(name, self.start.level), self.start.format)

    def set(self, names: Iterable[str], level: str) -> None:
        """Set the level of these processes."""
        self._levels |= dict.fromkeys(names, level)

    def adopt(self, start: LogStyle) -> None:
        """Take over what models.yaml says now. Another level there replaces all levels that were set."""
        if start.level != self.start.level:
            self._levels.clear()
        self.start = start

    def least(self) -> int:
        """Return the least level of all processes."""
        return min(LogStyle(level).number for level in (self.start.level, *self._levels.values()))


class StyledByModel(logging.Handler):
    """A handler of records about workers, whose level is that of the worker's model."""

    styles = LogStyles(LogStyle())

    def takes(self, record: logging.LogRecord, model: str) -> bool:
        """Return whether the log of this model gets the record."""
        return record.levelno >= self.styles.of(model).number


# Copy the supervisor's log records about a worker to the worker's own log, so that this log tells the whole story.
#
# The worker's process and its libraries write their output to that log, too. Without a fault they write nothing.


MODEL_LINES = "%(asctime)s modelctl %(levelname)-7s %(message)s"
_OURS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}[+-]\d\d:\d\d (modelctl [A-Z]+|worker (DEBUG|INFO)) ")


def about(worker: str) -> dict[str, str]:
    """Return the ``extra`` of a log record about a worker. The worker's name begins with the name of its log."""
    return {"worker": worker}


def model_of(worker: str) -> str:
    """Return the model of a worker, by the name that records about it have."""
    return worker.partition(":")[0].partition("~")[0]


def without_ours(lines: Iterable[str]) -> list[str]:
    """Return the last words of a worker: the lines of its log without those of the supervisor, and without what the
    worker itself says of its usual work. Lines of JSON are returned as texts."""
    return [text for line in lines for text in _words(line) if not _OURS.match(text)]


def _words(line: str) -> Iterator[str]:
    """Yield the texts of a line. A line of JSON has several if it has a traceback, and none if it is ours."""
    try:
        said = json.loads(line) if line.startswith('{"time": ') else None
    except ValueError:  # it was cut
        said = None
    if said is None:
        yield line
    elif said.get("process") == "worker" and ("stream" in said or said.get("level") in ("warning", "error")):
        yield from str(said.get("message")).splitlines()
        yield from str(said.get("traceback", "")).splitlines()


class ModelLogs(StyledByModel):
    """Append each record that is ``about`` a worker to that worker's log.

    The file is opened for each record. There are only a few in a worker's life. So a log that somebody has moved is
    created again. A record that cannot be written is lost here, but is in the supervisor's log.

    path_of  returns the path of the log of a name
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        super().__init__()
        self._path_of = path_of

    def emit(self, record: logging.LogRecord) -> None:
        worker = getattr(record, "worker", None)
        if worker is None or not self.takes(record, model_of(worker)):
            return
        # "letters~2" replaces "letters" in a turnover, and writes to its log.
        path = self._path_of(worker.partition("~")[0])
        line = self.format(record).replace("\n", " ") + "\n"
        try:
            make_private(path.parent)
            fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
        except OSError:
            return
        try:
            os.write(fd, line.encode(errors="backslashreplace"))
        except OSError:
            pass
        finally:
            os.close(fd)
