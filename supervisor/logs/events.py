"""The supervisor's log and its latest events, such as deaths and reloads, which the verb ``events`` tells.

A record of the supervisor's log becomes an event if its ``extra`` comes from ``noted``. So each fact is written at one
place only, and the log and this history cannot contradict each other. The history is in memory, and bounded: the oldest
events make room for new ones. Nothing is noted per request or per token. ``EventFile`` keeps events on disk.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from protocol.limits import SUPERVISOR_NAME
from protocol.process.logs import FOR_PEOPLE, OUTSIDE, LogLines, lost_line
from protocol.process.shown import LogStyle, masked
from supervisor.logs.files import MAX_LOG_BYTES, MODEL_LINES, LogFile, ModelLogs, about, log_dir, log_path, model_of

KEPT = 512
"""Events that are remembered."""
MOST_DURING = 50
"""Events that ``during`` returns."""
MOST_CHARACTERS = 1000
"""Longest text of an event. The last words of a worker may be longer; the log has all of them."""


SERVES, LEAVES, FAILS = "modelctl ", "shutting down", "the supervisor stops because of a fault of its own"
"""How the messages begin with which a supervisor begins, begins its shutdown, and ends after a fault."""


class EventKind(StrEnum):
    SUPERVISOR = "supervisor"
    """The supervisor started, or began to shut down. Or it found that the one before it had ended without an order."""
    STATE = "state"
    """A worker entered another state. The event has `before`, `state` and `reason`."""
    DEATH = "death"
    """A worker's process ended although nobody asked for that. The message says what follows: another try, or none."""
    REFUSAL = "refusal"
    """A worker was not started: there is no room for it, or the model cannot be loaded as configured."""
    HANG = "hang"
    """A worker makes no progress, or goes on after all."""
    KILL = "kill"
    """The supervisor killed a worker."""
    PLACEMENT = "placement"
    """A worker was placed on GPUs, or waits for room."""
    EVICTION = "eviction"
    """Idle workers were unloaded to make room for another model."""
    RELOAD = "reload"
    """models.yaml was read again, or workers are restarted one after the other."""
    FOLDER = "folder"
    """A directory below one of the `folders` is not served, with the reason."""
    VRAM = "vram"
    """GPU memory of a dead worker is not back, or the GPUs cannot be read."""
    LOG = "log"
    """The supervisor's log cannot be written, or can be written again."""
    QUEUE = "queue"
    """Requests are refused because a queue is full, or none is any more."""
    TROUBLE = "trouble"
    """Something has been wrong with the supervisor as a whole for five minutes, or is so no more. The message begins
    with the trouble's name, as in `status`."""
    KEYS = "keys"
    """The list of keys has changed: keys were added, changed, revoked or have expired. Or it cannot be read."""
    GATEWAY = "gateway"
    """The gateway was started, ended, or is started again."""
    CLUSTER = "cluster"
    """A machine of the Ray cluster has come or is gone, or the cluster cannot be used."""


def noted(kind: EventKind, worker: str | None = None, **facts: str) -> dict[str, Any]:
    """Return the ``extra`` of a log record that is an event.

    worker  the worker that the record is about, as in ``files.about``; None if it is about no worker
    facts   further keys of the event. ``message`` stands for the text of the record, which may be too long for people
    """
    return {"event": (kind, facts), **({} if worker is None else about(worker))}


def event_of(record: logging.LogRecord) -> dict[str, Any] | None:
    """Return the event that a log record is, without a number; None if it is none."""
    event = getattr(record, "event", None)
    if event is None:
        return None
    kind, facts = event
    worker = getattr(record, "worker", None)
    return {
        "time": round(record.created, 3),
        "kind": str(kind),
        "level": record.levelname.lower(),
        "model": None if worker is None else model_of(worker),
        "worker": worker,
        "message": shortened(record.getMessage()),
        **{name: shortened(fact) for name, fact in facts.items()},
    }


class EventHistory(logging.Handler):
    """Keeps the last events. Their numbers start at 1 with each supervisor and have no gaps.

    earlier  events of supervisors before this one, the oldest first. They get the first numbers
    """

    def __init__(self, kept: int = KEPT, earlier: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__()
        self._events: deque[dict[str, Any]] = deque(maxlen=kept)
        self._newest = 0
        self.counts = dict.fromkeys(map(str, EventKind), 0)
        """Events of this supervisor, by kind."""
        for event in earlier[-kept:]:
            self._add(event)

    def emit(self, record: logging.LogRecord) -> None:
        event = event_of(record)
        if event is not None:
            self.counts[event["kind"]] += 1
            self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        self._newest += 1
        self._events.append({"number": self._newest, **event})

    def since(self, after: int | None, limit: int, visible: Callable[[str | None], bool]) -> dict[str, Any]:
        """Return the result of the verb ``events``, oldest event first.

        after    the number of the last event that the caller knows; None for the last ``limit`` events
        limit    the greatest number of events
        visible  whether the caller may see events of this model; None stands for events of no model
        """
        oldest = self._newest - len(self._events) + 1
        known = 0 if after is None else min(after, self._newest)
        fresh = [e for e in islice(self._events, max(0, known + 1 - oldest), None) if visible(e["model"])]
        chosen = fresh[-limit:] if after is None else fresh[:limit]
        last = chosen[-1]["number"] if len(chosen) < len(fresh) and after is not None else self._newest
        return {
            "events": chosen,
            "last": last,
            "newest": self._newest,
            "dropped": after is not None and after + 1 < oldest,
        }

    def knows(self, model: str) -> bool:
        """Return whether an event is about a model."""
        return any(event["model"] == model for event in self._events)

    def during(self, model: str, begin: float, took_ms: float | None) -> list[dict[str, Any]]:
        """Return the events of a model in a span of time, the oldest first, at most ``MOST_DURING``.

        begin    seconds since 1970
        took_ms  milliseconds until the end of the span; None if it has not ended
        """
        end = math.inf if took_ms is None else begin + took_ms / 1000
        found = (e for e in self._events if e["model"] == model and begin <= e["time"] <= end)
        return list(islice(found, MOST_DURING))


def died_at(earlier: Sequence[dict[str, Any]]) -> float | None:
    """Return the time of the former supervisor's last event if that supervisor ended without an order. None if it was
    ordered to shut down, if it told of a fault, or if nothing is known of it.

    earlier  the last events of former supervisors, the oldest first
    """
    for event in reversed(earlier):
        if event["kind"] == EventKind.SUPERVISOR:
            if event["message"].startswith((LEAVES, FAILS)):
                return None
            if event["message"].startswith(SERVES):
                break
    return float(earlier[-1]["time"]) if earlier else None


def shortened(text: str) -> str:
    """Return a text without line breaks that is at most ``MOST_CHARACTERS`` long. The mark [...] shows a cut.

    A text may quote the name of a file, which need not be text, and an event goes over the wire.
    """
    text = masked(" ".join(text.splitlines())).encode(errors="backslashreplace").decode()
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 5] + "[...]"


# Keep events on disk, one JSON object a line, so that they survive the supervisor.
#
# The file is bounded: when it is full, it is renamed to ``events.jsonl.1``, and the file that had this name is lost.
# So at least MAX_BYTES of events are kept, some 15,000.


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
        text = f"events lost here: {missing} ({why})"
        record = logging.LogRecord("modelctl", logging.WARNING, "", 0, text, None, None)
        record.event = EventKind.SUPERVISOR, {}
        return self.format(record)


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


# The lines of the supervisor's log as JSON: those that are events have all keys of the event.


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


def set_up_logging(runtime_dir: Path, screen: logging.Handler | None, style: LogStyle) -> logging.Logger:
    """Return the supervisor's logger. It writes to the supervisor's log file, and to ``screen`` if there is one.

    Records about a worker go to that worker's log, too. ``status.LogControl`` changes the style later.
    """
    logger = logging.getLogger("modelctl")
    logger.setLevel(min(logging.INFO, style.number))
    logger.propagate = False

    def tell(line: str) -> None:
        if screen is not None:
            screen.handle(logger.makeRecord(logger.name, logging.WARNING, __file__, 0, line, (), None))

    file = LogFile(log_path(runtime_dir, SUPERVISOR_NAME), MAX_LOG_BYTES, tell)
    models = ModelLogs(partial(log_path, runtime_dir))
    for handler in (screen, file, models):
        if handler is None:
            continue
        lines = SupervisorLines(MODEL_LINES if handler is models else FOR_PEOPLE, process="supervisor")
        lines.as_json = style.is_json
        handler.setFormatter(lines)
        logger.addHandler(handler)
        if handler is not models:
            handler.setLevel(style.number)
    if screen is not None and 2 in OUTSIDE:
        OUTSIDE[2].lost_line = partial(lost_line, screen)
    logger.addHandler(EventFile(log_dir(runtime_dir), tell))
    logging.raiseExceptions = False  # a terminal that has gone must not stop the supervisor
    return logger


def log_trouble(logger: logging.Logger) -> str | None:
    """Return why lines of the supervisor's log are missing, in its file or on its screen. None while none are."""
    trouble = next((handler.trouble for handler in logger.handlers if isinstance(handler, LogFile)), None)
    if trouble is None and 2 in OUTSIDE and (unread := OUTSIDE[2].trouble) is not None:
        trouble = f"on {unread}; the log file has them"
    return trouble
