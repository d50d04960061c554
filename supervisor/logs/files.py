"""The log files of the supervisor and of models: their places, their sizes, and how each process writes its own.

A file is opened again when somebody moves it, and notes lines that were lost. Logs hold no prompts, no answers and no
keys.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from protocol.process.logs import lost_line
from protocol.process.paths import default_runtime_dir, make_private, open_private
from protocol.process.shown import LogStyle

MAX_LOG_BYTES = 8 << 20
"""A larger log is set aside as NAME.log.1."""
CUT_S = 0.25
"""Seconds between two looks at the logs of workers. A process can write some 500 MB to the page cache meanwhile."""


def log_dir(runtime_dir: Path) -> Path:
    """Return the directory of logs.

    For the default runtime directory the logs are in ``$XDG_STATE_HOME/modelctl/logs``, which survives a logout. For
    any other runtime directory they are in its subdirectory ``logs``.
    """
    if runtime_dir != default_runtime_dir() or "MODELCTL_RUNTIME_DIR" in os.environ:
        return runtime_dir / "logs"
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "modelctl" / "logs"
    try:
        return Path.home() / ".local" / "state" / "modelctl" / "logs"
    except RuntimeError:  # no HOME, and a uid without an entry in passwd (a bare container)
        return runtime_dir / "logs"


def log_path(runtime_dir: Path, name: str) -> Path:
    """Return the path of the log of a model, or of the supervisor (SUPERVISOR_NAME). ``name`` is a checked model
    name."""
    return log_dir(runtime_dir) / f"{name}.log"


def prepare(path: Path) -> int:
    """Make a log's directory, and rename a log that is too large to ``NAME.log.1``. Return the log's size in bytes.

    A full or read-only disk must not keep a model from starting, so errors are ignored; the log then misses lines.
    """
    try:
        make_private(path.parent)
        if (size := path.stat().st_size) <= MAX_LOG_BYTES:
            return size
        path.rename(path.with_name(path.name + ".1"))
    except OSError:
        pass
    return 0


def cut(path: Path) -> bool:
    """Copy a log that is too large to ``NAME.log.1``, and empty it. Return whether that was done.

    For the log of a worker that runs. The file itself must stay. A renamed file would grow without end, because the
    worker's children go on writing to it, and so does code that hangs while it prints. If the log has more than twice
    MAX_LOG_BYTES, its beginning is lost. Otherwise a position in it is one in the copy.
    """
    try:
        if path.stat().st_size <= MAX_LOG_BYTES:
            return False
        log = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        _copy_end(log, path.with_name(path.name + ".1"))
        os.ftruncate(log, 0)
    except OSError:  # the disk is full: then the log's first part is kept, and not its last
        with suppress(OSError):
            os.ftruncate(log, MAX_LOG_BYTES // 2)
    finally:
        os.close(log)
    return True


def _copy_end(log: int, aside: Path) -> None:
    """Copy the last lines of an open log to a new file in the place of ``aside``. Raises OSError."""
    begin = max(0, os.fstat(log).st_size - 2 * MAX_LOG_BYTES)
    end = begin + 3 * MAX_LOG_BYTES  # the log grows meanwhile, perhaps faster than it is copied
    new = aside.with_name(aside.name + ".new")
    copy = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if begin:
            os.write(copy, f"the first {begin} bytes are left out here: the log grew too fast\n".encode())
        while begin < end and (sent := os.sendfile(copy, log, begin, end - begin)):
            begin += sent
        os.replace(new, aside)
    except OSError:
        os.unlink(new)
        raise
    finally:
        os.close(copy)


def tail(path: Path, size: int = 8192, since: int | None = 0) -> list[str]:
    """Return the last lines of a log, as far as they are in its last ``size`` bytes.

    since  leave out the first ``since`` bytes, unless the log has become shorter than that. None: go on in the log that
           was set aside, if this log is shorter than ``size``
    """
    data = _end(path, size, since or 0)
    if since is None and len(data) < size:
        data = _end(path.with_name(path.name + ".1"), size - len(data), 0) + data
    return data.decode(errors="replace").splitlines()


def _end(path: Path, size: int, since: int) -> bytes:
    try:
        with open(path, "rb") as f:
            end = os.fstat(f.fileno()).st_size
            f.seek(max(0, end - size, since if since <= end else 0))
            return f.read(size)
    except OSError:
        return b""


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
        with suppress(OSError):
            make_private(path.parent)
            fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
            with open(fd, "wb", buffering=0) as file:
                file.write(line.encode(errors="backslashreplace"))
