"""The request log in the supervisor: a line of JSON for each request that ends, and the process that writes the lines.

The disk may be slow, or hang, and the loop must not wait for it. So the loop writes each line to a pipe, and a process
of its own (``request_log_writer``) writes the file. A line is so short that the pipe takes all of it or nothing. While
the pipe is full, lines are lost, and the log later says how many.
"""

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from select import PIPE_BUF
from typing import Any, Final

from supervisor.event_history import EventKind, noted
from supervisor.helper import writer_environment
from supervisor.requests.stories import RequestRecord

_WRITER: Final = (sys.executable, "-P", "-m", "supervisor.request_log_writer")
CHECK_S: Final = 1.0
"""Seconds between two calls of ``check``."""
AGAIN_S: Final = 5.0
"""Least seconds between two starts of the writer."""
LEAVE_S: Final = 3.0
"""Seconds that a supervisor that ends waits for the last lines."""
PIPE_BYTES: Final = 1 << 20
"""What the pipe holds while the disk is slow: some 3,000 lines. The kernel may allow less."""


def line_of(record: RequestRecord, unix: float) -> dict[str, Any]:
    """Return the line of a request that has ended. It holds no text of the request.

    unix  what has to be added to monotonic seconds to get seconds since 1970
    """
    ended = round((record.accepted if record.ended is None else record.ended) + unix, 3)
    return {"time": ended, **record.summary(unix)}


class RequestLog:
    """The lines of ended requests, and the process that writes them. Use it on the loop's thread only.

    lost  the number of lines that were lost since the supervisor's start
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._file: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving: list[subprocess.Popen[bytes]] = []
        """Writers of former files. They end when they have written what their pipes hold."""
        self._lines = self._says = -1
        self._unsaid = 0
        self._started_at = -AGAIN_S
        self.lost = 0
        self.trouble: str | None = None
        """Why the lines are not written to the disk now; None if they are."""

    def adopt(self, file: Path | None) -> None:
        """Write to this file from now on; None: write no lines."""
        if file == self._file:
            return
        self._end_writer()
        self._file, self.trouble, self._unsaid, self._started_at = file, None, 0, -AGAIN_S
        self.check()

    def add(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended. If the pipe is full, the line is lost."""
        if self._log.isEnabledFor(logging.DEBUG):
            self._say(record)
        if self._file is None:
            return
        line = line_of(record, time.time() - time.monotonic())
        data = _packed(line)
        if len(data) > PIPE_BUF // 2:
            data = _packed(line | {"trace_ids": []})
        if self._unsaid:
            data = _packed({"time": line["time"], "lost": self._unsaid}) + data
        try:
            os.write(self._lines, data)
            self._unsaid = 0
        except OSError:  # the pipe is full, or there is no writer now
            self._unsaid += 1
            self.lost += 1

    def _say(self, record: RequestRecord) -> None:
        """Say the end of a request in the log, as the worker's log does, which gives the request the same name."""
        line = line_of(record, time.time() - time.monotonic())
        how = line["finish_reason"] or line["error"]
        self._log.debug(
            "request %s: model %s, ended (%s), %s tokens after %.0f ms",
            record.id, record.model, how, line["tokens"], line["total_ms"] or 0.0,
            extra={"fields": {"request": record.id}},
        )  # fmt: skip

    def check(self) -> None:
        """Start the writer if there is none, and take in what it says. Call this each second."""
        self._leaving = [process for process in self._leaving if process.poll() is None]
        if self._process is not None:
            self._hear()
            if (code := self._process.poll()) is not None:
                self._close_pipes()
                self._process = None
                self._note(f"its writer ended with exit code {code}; another one starts")
        now = time.monotonic()
        if self._file is not None and self._process is None and now - self._started_at >= AGAIN_S:
            self._started_at = now
            self._start(self._file)

    def describe(self) -> dict[str, Any] | None:
        """Return the log as ``status`` shows it; None if there is none."""
        return None if self._file is None else {"file": str(self._file), "trouble": self.trouble, "lost": self.lost}

    def close(self) -> None:
        """Have the writers write the last lines. Log that they could not within ``LEAVE_S``."""
        self._end_writer()
        deadline = time.monotonic() + LEAVE_S
        for process in self._leaving:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log.error("request log: the last lines were not written to %s within %g s", self._file, LEAVE_S)
                process.kill()

    def _start(self, file: Path) -> None:
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            theirs, self._lines, self._says, their_says = opened
            self._process = subprocess.Popen(
                [*_WRITER, str(file)],
                stdin=theirs,
                stdout=their_says,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C, or a kill of the supervisor's group, must not lose lines
                cwd="/",
                env=writer_environment(),
            )
        except OSError as e:
            for descriptor in opened:
                os.close(descriptor)
            self._lines = self._says = -1
            self._note(f"its writer cannot be started: {e.strerror or e}; trying again")
            return
        os.close(theirs)
        os.close(their_says)
        os.set_blocking(self._lines, False)
        os.set_blocking(self._says, False)
        with suppress(OSError):  # the user has many pipes already
            fcntl.fcntl(self._lines, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def _hear(self) -> None:
        """Take in what the writer says: a line of JSON when it begins to fail, and when it works again."""
        try:
            said = os.read(self._says, PIPE_BUF)
        except OSError:
            return
        for line in said.splitlines():
            with suppress(ValueError):
                self._note(json.loads(line))

    def _note(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble is None:
            self._log.info("request log: lines are written to %s again", self._file)
        else:
            self._log.error("request log: %s", trouble, extra=noted(EventKind.SUPERVISOR))

    def _end_writer(self) -> None:
        if self._process is not None:
            self._leaving.append(self._process)
            self._process = None
            self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._lines)
        os.close(self._says)
        self._lines = self._says = -1


def _packed(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
