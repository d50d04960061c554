"""The places of logs, and how logs are kept small. Logs hold no prompts, no answers and no keys."""

import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from protocol.limits import SUPERVISOR_NAME
from protocol.process.logs import FOR_PEOPLE, OUTSIDE, lost_line
from protocol.process.paths import default_runtime_dir, make_private, open_private
from protocol.process.shown import LogStyle
from supervisor.logs.events import EventFile, SupervisorLines
from supervisor.logs.files import MODEL_LINES, LogFile, ModelLogs

MAX_LOG_BYTES = 8 << 20
"""A larger log is set aside as NAME.log.1."""
CUT_S = 0.25
"""Seconds between two looks at the logs of workers. A process can write some 500 MB to the page cache meanwhile."""


def log_dir(runtime_dir: Path) -> Path:
    """Return the directory of logs.

    For the default runtime directory the logs are in ``$XDG_STATE_HOME/modelctl/logs``, which survives a logout. For
    any other runtime directory they are in its subdirectory ``logs``.
    """
    if runtime_dir != default_runtime_dir() or "MODELCTL_RUNTIME_DIR" in os.environ:
        return runtime_dir / "logs"
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "modelctl" / "logs"
    try:
        return Path.home() / ".local" / "state" / "modelctl" / "logs"
    except RuntimeError:  # no HOME, and a uid without an entry in passwd (a bare container)
        return runtime_dir / "logs"


def log_path(runtime_dir: Path, name: str) -> Path:
    """Return the path of the log of a model, or of the supervisor (SUPERVISOR_NAME). ``name`` is a checked model
    name."""
    return log_dir(runtime_dir) / f"{name}.log"


def prepare(path: Path) -> int:
    """Make a log's directory, and rename a log that is too large to ``NAME.log.1``. Return the log's size in bytes.

    A full or read-only disk must not keep a model from starting, so errors are ignored; the log then misses lines.
    """
    try:
        make_private(path.parent)
        if (size := path.stat().st_size) <= MAX_LOG_BYTES:
            return size
        path.rename(path.with_name(path.name + ".1"))
    except OSError:
        pass
    return 0


def cut(path: Path) -> bool:
    """Copy a log that is too large to ``NAME.log.1``, and empty it. Return whether that was done.

    For the log of a worker that runs. The file itself must stay. A renamed file would grow without end, because the
    worker's children go on writing to it, and so does code that hangs while it prints. If the log has more than twice
    MAX_LOG_BYTES, its beginning is lost. Otherwise a position in it is one in the copy.
    """
    try:
        if path.stat().st_size <= MAX_LOG_BYTES:
            return False
        log = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        _copy_end(log, path.with_name(path.name + ".1"))
        os.ftruncate(log, 0)
    except OSError:  # the disk is full: then the log's first part is kept, and not its last
        with suppress(OSError):
            os.ftruncate(log, MAX_LOG_BYTES // 2)
    finally:
        os.close(log)
    return True


def _copy_end(log: int, aside: Path) -> None:
    """Copy the last lines of an open log to a new file in the place of ``aside``. Raises OSError."""
    begin = max(0, os.fstat(log).st_size - 2 * MAX_LOG_BYTES)
    end = begin + 3 * MAX_LOG_BYTES  # the log grows meanwhile, perhaps faster than it is copied
    new = aside.with_name(aside.name + ".new")
    copy = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if begin:
            os.write(copy, f"the first {begin} bytes are left out here: the log grew too fast\n".encode())
        while begin < end and (sent := os.sendfile(copy, log, begin, end - begin)):
            begin += sent
        os.replace(new, aside)
    except OSError:
        os.unlink(new)
        raise
    finally:
        os.close(copy)


def tail(path: Path, size: int = 8192, since: int | None = 0) -> list[str]:
    """Return the last lines of a log, as far as they are in its last ``size`` bytes.

    since  leave out the first ``since`` bytes, unless the log has become shorter than that. None: go on in the log that
           was set aside, if this log is shorter than ``size``
    """
    data = _end(path, size, since or 0)
    if since is None and len(data) < size:
        data = _end(path.with_name(path.name + ".1"), size - len(data), 0) + data
    return data.decode(errors="replace").splitlines()


def _end(path: Path, size: int, since: int) -> bytes:
    try:
        with open(path, "rb") as f:
            end = os.fstat(f.fileno()).st_size
            f.seek(max(0, end - size, since if since <= end else 0))
            return f.read(size)
    except OSError:
        return b""


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
