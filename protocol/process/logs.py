"""Send the standard output and error of a process to its log, also after somebody has moved that file."""

import atexit
import errno
import faulthandler
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Final

from protocol.process.paths import open_private
from protocol.process.shown import LogStyle, harmless, masked, masked_values

# The lines that a process writes to its log: for people, or as JSON. ``LogStyle`` says which.
#
# Libraries keep a level of their own: below INFO they may log texts of requests, which no log may hold.


OURS: Final = ("model_worker", "gateway")
"""The packages of the processes that call ``begin``: their loggers take every level."""
FOR_PEOPLE: Final = "%(asctime)s %(levelname)-7s %(message)s"


def json_line(seconds: float, level: str, message: str, **fields: Any) -> str:
    """Return a line of a log as JSON.

    seconds  the time of the line, since 1970
    fields   further keys of the line, which stand before the message
    """
    at = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": at, "level": level, **fields, "message": message}, ensure_ascii=False)


class LogLines(logging.Formatter):
    """The formatter of a log, which writes lines for people until ``as_json`` is set.

    text   the format for people
    about  keys of each JSON line, such as the name of the process
    """

    def __init__(self, text: str = FOR_PEOPLE, **about: str) -> None:
        super().__init__(text)
        self.as_json = False
        self.about = about

    def format(self, record: logging.LogRecord) -> str:
        if not self.as_json:
            return masked(super().format(record))
        fields = {**self.about, **self.fields_of(record)}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        fields, message = masked_values(fields), masked(record.getMessage())
        return json_line(record.created, record.levelname.lower(), message, **fields)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the local time with its offset from UTC. Programs in other time zones read logs, too."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds").replace(".", ",")

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return further keys of the JSON line: those that the record's ``extra`` has as ``fields``."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        return fields


def lost_line(handler: logging.Handler, missing: int, why: str) -> str:
    """Return the line that stands in a handler's log where lines are missing."""
    text = f"lines lost here: {missing} ({why})"
    return handler.format(logging.LogRecord("modelctl", logging.WARNING, "", 0, text, None, None))


# Write to a standard stream that another program reads, and never wait for that program.
#
# A reader may stop: Ctrl-S in the terminal, ``| less`` with a full pipe, a log collector that hangs. A write(2) to its
# descriptor then sleeps, and with it the loop of the process. O_NONBLOCK is no remedy, because the shell and other
# programs share the descriptor's flags. So a thread writes, and only the thread waits.


MOST_WAITING: Final = 1000
"""Texts that wait for the reader. Each is a line, or a traceback. Further texts are lost."""
LEAVE_S: Final = 1.0
"""Seconds that a process that ends waits until the reader has taken the last texts."""
_NAMES: Final = {1: "standard output", 2: "standard error"}


class OutsideOutput(io.RawIOBase):
    """A descriptor that belongs to others, too. ``write`` takes a whole text and returns at once.

    Texts that find no room, or cannot be written, are lost and counted. When the reader goes on, a line says how many
    are missing.

    lost_line  returns this line, from the number of lost texts and the reason
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost_line: Callable[[int, str], str] = "modelctl: lines lost here: {} ({})".format
        self._descriptor = descriptor
        # SimpleQueue has no lock that a signal handler could find taken by the code that it interrupts.
        self._waiting: SimpleQueue[tuple[bytes, int] | threading.Event] = SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None
        # The caller of ``write`` alone changes _refused, the thread alone changes the others.
        self._refused = self._failed = self._told = 0
        self._failure: OSError | None = None

    @property
    def trouble(self) -> str | None:
        """Return why texts are lost, and how many. None if none are, or if the reader has left: nobody misses them."""
        if not self._lost or (self._failure is not None and self._failure.errno in (errno.EPIPE, errno.EIO)):
            return None
        what = "is not read" if self._failure is None else f"cannot be written: {self._why}"
        return f"{_NAMES[self._descriptor]} {what}; lines lost: {self._lost}"

    @property
    def is_behind(self) -> bool:
        """Return whether the reader has not taken everything yet."""
        return self._busy or not self._waiting.empty()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        text = bytes(data)
        if self._waiting.qsize() >= MOST_WAITING or not self._has_thread():
            self._refused += 1
        else:
            self._waiting.put((text, self._refused))
        return len(text)

    def drain(self) -> None:
        """Wait until the reader has taken everything, but for ``LEAVE_S`` at most."""
        if self.is_behind:
            over = threading.Event()
            self._waiting.put(over)
            over.wait(LEAVE_S)

    @property
    def _lost(self) -> int:
        return self._refused + self._failed - self._told

    @property
    def _why(self) -> str:
        return "nobody reads it" if self._failure is None else self._failure.strerror or str(self._failure)

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, daemon=True, name=_NAMES[self._descriptor])
            try:
                thread.start()
            except RuntimeError:  # the user has too many processes; the next text tries again
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._busy = True
            text, refused = item
            self._put(text, refused + self._failed - self._told)
            if self._failure is None and self._waiting.empty() and self._lost:
                self._put(b"", self._lost)
            self._busy = False

    def _put(self, text: bytes, missing: int) -> None:
        """Write a text, behind a line that says how many are missing before it. Wait for the reader."""
        if missing:
            text = f"{self.lost_line(missing, self._why)}\n".encode(errors="backslashreplace") + text
        try:
            while text:
                try:
                    text = text[os.write(self._descriptor, text) :]
                except BlockingIOError:  # another program has set O_NONBLOCK
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        except OSError as e:
            self._failure = e
            self._failed += 1
        else:
            self._failure = None
            self._told += missing


OUTSIDE: Final[dict[int, OutsideOutput]] = {}
"""The standard streams of this process by descriptor, after ``never_wait``."""


class LogOutput:
    """Sends everything that this process and its libraries print to its log.

    While the log cannot be opened, the output is lost until ``follow`` can open the log.

    path  path of the log; the log is made with mode 0600, in a directory that exists
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not self._redirect():
            _point_output_to(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
        sys.stdout, sys.stderr = LogWriter(1), LogWriter(2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def follow(self) -> None:
        """Open the log again if another file has its name now: logrotate has moved the log, or somebody removed it.

        If the log cannot be opened, output goes on to the old file, and the next call tries again.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(1)):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._redirect()

    def _redirect(self) -> bool:
        try:
            fd = open_private(Path(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            return False
        _point_output_to(fd)
        return True


def _point_output_to(fd: int) -> None:
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def never_wait() -> None:
    """Let nothing that this process writes to its standard output and error wait for the reader of these streams.

    For a process that has not sent them to a log of its own. Call ``write_rest`` before ``os._exit``.
    """
    for descriptor in (1, 2):
        OUTSIDE[descriptor] = OutsideOutput(descriptor)
    sys.stdout, sys.stderr = LogWriter(1), LogWriter(2)
    atexit.register(write_rest)


def write_rest() -> None:
    """Wait a moment for the readers of standard output and error, so that they get the last lines."""
    for outside in OUTSIDE.values():
        outside.drain()


class LogWriter(io.TextIOWrapper):
    """Writes text to a descriptor without a buffer. On a full disk lines are lost, but ``print`` raises nothing.

    about  keys of JSON lines, if each line of the text is to become one; None to write the text as it is
    """

    about: ClassVar[dict[str, str] | None] = None

    def __init__(self, descriptor: int, *, plain: bool = False) -> None:
        """plain  write the text as it is, whatever ``about`` is"""
        raw: Any = OUTSIDE.get(descriptor)
        if raw is None:
            raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._stream = "stdout" if descriptor == 1 else "stderr"
        self._plain = plain
        self._is_terminal = descriptor in OUTSIDE and os.isatty(descriptor)
        self._unfinished = ""

    def write(self, text: str) -> int:
        shown = masked(text)
        shown = harmless(shown) if self._is_terminal else shown
        if self._unfinished or (self.about is not None and not self._plain):
            *lines, self._unfinished = (self._unfinished + shown).split("\n")
            about = {**(self.about or {}), "stream": self._stream}
            shown = "".join(json_line(time.time(), "info", line, **about) + "\n" for line in lines)
        self.steer(shown)
        return len(text)

    def steer(self, text: str) -> None:
        """Write a text as it is, also to a terminal, which obeys it."""
        try:
            super().write(text)
        except OSError:
            pass

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def begin_log(process: str, style: LogStyle, text: str = FOR_PEOPLE, **about: str) -> None:
    """Write the records of this process to its standard error.

    process  what the process is: "worker" or "gateway"
    text     the format of lines for people
    about    further keys of JSON lines, such as the model
    """
    handler = logging.StreamHandler(LogWriter(2, plain=True))
    handler.setFormatter(LogLines(text, process=process, **about))
    if 2 in OUTSIDE:
        OUTSIDE[2].lost_line = partial(lost_line, handler)
    logging.getLogger().handlers[:] = [handler]
    adopt_style(style)


def adopt_style(style: LogStyle) -> None:
    """Write the log of this process in this style from now on. ``begin_log`` has been called before."""
    lines = logging.getLogger().handlers[0].formatter
    assert isinstance(lines, LogLines)
    lines.as_json = style.is_json
    LogWriter.about = lines.about if style.is_json else None
    logging.getLogger().setLevel(max(style.number, logging.INFO))
    for package in OURS:
        logging.getLogger(package).setLevel(style.number)
