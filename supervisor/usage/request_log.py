"""The request log in the supervisor: a line of JSON for each request that ends, and the process that writes the lines.

The disk may be slow, or hang, and the loop must not wait for it. So a process of its own (``request_log_writer``)
writes the file. While too many lines wait for the process, further ones are lost, and the log later says how many.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

from protocol.process.helper_process import HelperProcess
from supervisor.helper import Helper, HelperWatch, writer_environment
from supervisor.logs.events import EventKind, noted
from supervisor.ports.sockets import Restarts
from supervisor.requests.stories import RequestRecord

_WRITER: Final = (sys.executable, "-P", "-m", "supervisor.usage.request_log_writer")
CHECK_S: Final = 1.0
"""Seconds between two calls of ``check``."""
AGAIN_S: Final = 5.0
"""Least seconds between two starts of the writer."""
LEAVE_S: Final = 3.0
"""Seconds that a supervisor that ends waits for the last lines."""
MOST_UNSENT: Final = 1 << 20
"""Bytes of lines that are kept while the disk is slow: some 3,000 lines. The writer's socket holds some more."""
MOST_BYTES: Final = 2048
"""A longer line is written without the names that its client gave the request."""


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

    def __init__(self, log: logging.Logger, watch: HelperWatch) -> None:
        self._log = log
        self._file: Path | None = None
        self._helper = Helper(
            watch, self._start, lambda record: self._note(json.loads(record)), self._ended, Restarts(AGAIN_S, AGAIN_S)
        )
        self._former: list[HelperProcess] = []
        """Writers of former files. They end when they have written the lines that were sent to them."""
        self._unsaid = 0
        self.lost = 0
        self.trouble: str | None = None
        """Why the lines are not written to the disk now; None if they are."""

    def adopt(self, file: Path | None) -> None:
        """Write to this file from now on; None: write no lines."""
        if file == self._file:
            return
        if (former := self._helper.part()) is not None:
            former.leave()
            self._former = [process for process in self._former if process.code is None] + [former]
        self._file, self.trouble, self._unsaid = file, None, 0
        self.check()

    def add(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended. If too many lines wait, the line is lost."""
        if self._log.isEnabledFor(logging.DEBUG):
            self._say(record)
        if self._file is None:
            return
        line = line_of(record, time.time() - time.monotonic())
        data = _packed(line)
        if len(data) > MOST_BYTES:
            data = _packed(line | {"trace_ids": []})
        if (writer := self._helper.process) is None or writer.unsent > MOST_UNSENT:
            self._unsaid += 1
            self.lost += 1
            return
        if self._unsaid:
            writer.send(_packed({"time": line["time"], "lost": self._unsaid}))
            self._unsaid = 0
        writer.send(data)

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
        """Start the writer if there is none. Call this each second."""
        if self._file is None:
            return
        try:
            self._helper.check(time.monotonic())
        except OSError as e:
            self._note(f"its writer cannot be started: {e.strerror or e}; trying again")

    def describe(self) -> dict[str, Any] | None:
        """Return the log as ``status`` shows it; None if there is none."""
        return None if self._file is None else {"file": str(self._file), "trouble": self.trouble, "lost": self.lost}

    def close(self) -> None:
        """Have the writers write the last lines. Log that they could not within ``LEAVE_S``."""
        former = [*self._former, *filter(None, [self._helper.part()])]
        for process in former:
            process.leave()
        deadline = time.monotonic() + LEAVE_S
        for process in former:
            if not process.finish(deadline - time.monotonic()):
                self._log.error("request log: the last lines were not written to %s within %g s", self._file, LEAVE_S)
                process.kill()

    def _start(self) -> HelperProcess:
        return HelperProcess([*_WRITER, str(self._file)], writer_environment())

    def _ended(self, process: HelperProcess) -> None:
        self._note(f"its writer ended with exit code {process.code}; another one starts")

    def _note(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble is None:
            self._log.info("request log: lines are written to %s again", self._file)
        else:
            self._log.error("request log: %s", trouble, extra=noted(EventKind.SUPERVISOR))


def _packed(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace")
