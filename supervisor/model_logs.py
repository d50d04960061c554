"""Copy the supervisor's log records about a worker to the worker's own log, so that this log tells the whole story.

The worker's process and its libraries write their output to that log, too. Without a fault they write nothing.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protocol.process.private_paths import make_private, open_private
from supervisor.log_styles import StyledByModel

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
