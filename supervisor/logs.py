"""The places of logs, and how logs are kept small. Logs hold no prompts, no answers and no keys."""

import logging
import os
from functools import partial
from pathlib import Path

from protocol.limits import SUPERVISOR_NAME
from protocol.process.log_lines import FOR_PEOPLE, lost_line
from protocol.process.log_output import OUTSIDE
from protocol.process.log_style import LogStyle
from protocol.process.private_paths import make_private
from protocol.process.runtime_paths import default_runtime_dir
from supervisor.event_file import EventFile
from supervisor.log_file import LogFile
from supervisor.log_lines import SupervisorLines
from supervisor.model_logs import MODEL_LINES, ModelLogs

MAX_LOG_BYTES = 8 << 20
"""A larger log is renamed to NAME.log.1: a worker's log when the worker starts, the supervisor's at once."""


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


def tail(path: Path, size: int = 8192, since: int = 0) -> list[str]:
    """Return the last lines of a log, as far as they are in its last ``size`` bytes.

    since  leave out the first ``since`` bytes, unless the log has become shorter than that
    """
    try:
        with open(path, "rb") as f:
            end = os.fstat(f.fileno()).st_size
            f.seek(max(0, end - size, since if since <= end else 0))
            return f.read(size).decode(errors="replace").splitlines()
    except OSError:
        return []


def set_up_logging(runtime_dir: Path, screen: logging.Handler | None, style: LogStyle) -> logging.Logger:
    """Return the supervisor's logger. It writes to the supervisor's log file, and to ``screen`` if there is one.

    Records about a worker go to that worker's log, too. ``log_styles.LogControl`` changes the style later.
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
        trouble = f"{unread}; the log file has them"
    return trouble
