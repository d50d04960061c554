"""Keep events on disk, one JSON object a line, so that they survive the supervisor.

The file is bounded: when it is full, it is renamed to ``events.jsonl.1``, and the file that had this name is lost. So
at least MAX_BYTES of events are kept, some 15,000.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from supervisor.event_history import EventKind, event_of
from supervisor.log_file import LogFile

NAME = "events.jsonl"
MAX_BYTES = 4 << 20
_TAIL_BYTES = 256 << 10
"""Bytes of the file that ``latest_events`` reads: more than 512 events of usual length."""
_KEYS: dict[str, type | tuple[type, ...]] = {"time": (int, float), "kind": str, "level": str, "message": str}
_LATEST = 1 << 36
"""Seconds since 1970, in the year 4147. Python can name no day after the year 9999."""
_NAMES = ("model", "worker")


class EventFile(LogFile):
    """The handler that appends the events among the supervisor's log records to the file."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        super().__init__(directory / NAME, MAX_BYTES, tell)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) is not None:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of an event."""
        return json.dumps(event_of(record), ensure_ascii=False)

    def lost_lines(self, missing: int, why: str) -> str:
        """Return the event that says how many events are missing."""
        return json.dumps(
            {
                "time": round(time.time(), 3), "kind": str(EventKind.SUPERVISOR), "level": "warning", "model": None,
                "worker": None, "message": f"events lost here: {missing} ({why})",
            }
        )  # fmt: skip


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield all events of the directory, the oldest first. Lines that are no events are left out."""
    for path in (directory / f"{NAME}.1", directory / NAME):
        try:
            with open(path, errors="replace") as file:
                yield from filter(None, map(_parsed, file))
        except OSError:  # none was written yet, or the directory cannot be read
            continue


def latest_events(directory: Path) -> list[dict[str, Any]]:
    """Return the last events of the newest file, the oldest first. Reads a bounded number of bytes."""
    try:
        with open(directory / NAME, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [event for line in lines if (event := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None for a line that was cut, or that somebody else wrote."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not all(isinstance(event.get(key), kind) for key, kind in _KEYS.items()):
        return None
    if not all(isinstance(event.get(key), (str, type(None))) for key in _NAMES):
        return None
    if not 0 <= event["time"] < _LATEST:
        return None
    return {name: value for name, value in event.items() if name != "number"}
