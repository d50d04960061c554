"""The lines that a process writes to its log: for people, or as JSON. ``log_style`` says which.

Libraries keep a level of their own: below INFO they may log texts of requests, which no log may hold.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from protocol.process.masking import masked, masked_values

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
