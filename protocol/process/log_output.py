"""Send the standard output and error of a process to its log, also after somebody has moved that file."""

import atexit
import faulthandler
import io
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from protocol.process.log_lines import FOR_PEOPLE, OURS, LogLines, json_line, lost_line
from protocol.process.log_style import LogStyle
from protocol.process.masking import masked
from protocol.process.outside_output import OutsideOutput
from protocol.process.private_paths import open_private
from protocol.process.terminal_text import harmless

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
