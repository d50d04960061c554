"""The lines of the supervisor's log as JSON: those that are events have all keys of the event."""

import logging
from typing import Any

from protocol.process.log_lines import LogLines
from supervisor.event_history import event_of
from supervisor.model_logs import model_of


class SupervisorLines(LogLines):
    """The formatter of the supervisor's log, and of its lines in the logs of models."""

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the worker that a record is about, and the keys of an event."""
        event = event_of(record)
        if event is not None:
            left_out = ("time", "level", "message")
            return {key: value for key, value in event.items() if key not in left_out and value is not None}
        worker = getattr(record, "worker", None)
        about = {} if worker is None else {"model": model_of(worker), "worker": worker}
        return {**about, **super().fields_of(record)}
