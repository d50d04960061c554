"""Copy the supervisor's log records about a worker to the worker's own log, so that this log tells the whole story.

The worker's process and its libraries write their output to that log, too. Without a fault they write nothing.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from protocol.process.private_paths import make_private, open_private

_FORMAT = "%(asctime)s modelctl %(levelname)-7s %(message)s"
_OURS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} modelctl [A-Z]+ ")


def about(worker: str) -> dict[str, str]:
    """Return the ``extra`` of a log record about a worker. The worker's name begins with the name of its log."""
    return {"worker": worker}


def without_ours(lines: Iterable[str]) -> list[str]:
    """Return the lines of a worker's log that the supervisor has not written: the worker's own last words."""
    return [line for line in lines if not _OURS.match(line)]


class ModelLogs(logging.Handler):
    """Append each record that is ``about`` a worker to that worker's log.

    The file is opened for each record. There are only a few in a worker's life. So a log that somebody has moved is
    created again. A record that cannot be written is lost here, but is in the supervisor's log.

    path_of  returns the path of the log of a name
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        super().__init__()
        self._path_of = path_of
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        worker = getattr(record, "worker", None)
        if worker is None:
            return
        # "letters~2" replaces "letters" in a rollout, and writes to its log.
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
