"""What the end of a worker process meant: asked for, worth another try, or not. Pure."""

import signal
from dataclasses import dataclass, replace

from protocol.process.worker_exit import EXIT_ASKED, EXIT_CONFIG, EXIT_ENGINE_FAULT, LOAD_ERROR_PREFIX
from supervisor.workers.crash_diagnosis import abort_fault, engine_fault, last_lines


@dataclass(frozen=True)
class ExitReport:
    """reason   "asked", "config", "no room", "unreadable", "out of VRAM", "out of memory", "CUDA error",
             "engine fault", "hung", "killed", "signal", "spawn" or "exit"
    message  one line for a person, at most MAX_MESSAGE characters
    retry    another try may help
    lines    the last of what it wrote to its log, at most MAX_LINES of MAX_MESSAGE characters; where it was asked for
             its stacks, those of its main thread from the innermost call on. None of an exit that was asked for
    """

    code: int
    reason: str
    message: str
    retry: bool
    lines: tuple[str, ...] = ()


def not_spawned(error: OSError) -> ExitReport:
    """The report of a process that could not even be started."""
    return ExitReport(-1, "spawn", f"cannot start a process: {error.strerror or error}", retry=True)


def not_admitted(reason: str, message: str, *, retry: bool) -> ExitReport:
    """The report of a process that was not started, because it could not have loaded its model."""
    return ExitReport(-1, reason, _printable(message), retry=retry)


MAX_MESSAGE = 300
"""Characters of a message. It ends up in tables and in what clients are told."""
MAX_LINES = 12


def classify(code: int, *, asked: bool, log_tail: list[str], killed: tuple[str, str] | None = None) -> ExitReport:
    """The report of an exit.

    code      exit code, or minus the signal's number
    asked     the supervisor was stopping the worker
    log_tail  the last lines of the worker's log
    killed    (reason, why) if the supervisor itself sent SIGKILL
    """
    if asked:
        message = f"stopped; it was killed: {killed[1]}" if killed else "stopped"
        return ExitReport(code, "asked", _printable(message), retry=False)
    report = _unasked(code, log_tail, killed)
    return replace(report, lines=tuple(map(_printable, last_lines(log_tail, MAX_LINES))))


def _unasked(code: int, log_tail: list[str], killed: tuple[str, str] | None) -> ExitReport:
    if code == EXIT_CONFIG:
        load_errors = [line for line in log_tail if line.startswith(LOAD_ERROR_PREFIX)]
        message = _printable(load_errors[-1]) if load_errors else "cannot load the model as configured"
        return ExitReport(code, "config", message, retry=False)
    last = _printable(next((line.strip() for line in reversed(log_tail) if line.strip()), ""))
    fault = engine_fault(log_tail) if code == EXIT_ENGINE_FAULT else None
    if code == -signal.SIGABRT:
        fault = abort_fault(log_tail)
    if fault is not None:
        return ExitReport(code, fault.reason, _printable(fault.message), retry=True)
    if code == -signal.SIGKILL and killed:
        reason, why = killed
        message = why if reason == "hung" else f"killed by the supervisor: {why}"
        return ExitReport(code, reason, _printable(message), retry=True)
    if code == -signal.SIGKILL:
        return ExitReport(code, "killed", "killed by SIGKILL, not by us (out of memory?)", retry=True)
    if code < 0:
        return ExitReport(code, "signal", f"ended by {_signal_name(-code)}", retry=True)
    if code == EXIT_ASKED:
        return ExitReport(code, "exit", "left without being asked", retry=True)
    return ExitReport(
        code, "exit", _printable(f"exit code {code}: {last}") if last else f"exit code {code}", retry=True
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _printable(line: str) -> str:
    """A log's line without control characters, cut to a length that a table can show."""
    text = "".join(c if c.isprintable() else " " for c in line)
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
