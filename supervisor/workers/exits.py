"""Find the reason for the end of a worker's process, a message for people, and whether another try may help. Pure.

The reason is found in the exit code, the signal, and the last lines of the worker's log: the tracebacks of Python and
the lines that C++'s ``terminate`` writes. The patterns match the texts of PyTorch 2, CUDA and numpy. One log holds the
lines of many processes. Only the last traceback, or the lines between the last two aborts, belong to the process that
has ended.
"""

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocol.process.shown import masked
from protocol.process.worker_spec import EXIT_ASKED, EXIT_AWAY, EXIT_CONFIG, EXIT_ENGINE_FAULT, LOAD_ERROR_PREFIX

MAX_MESSAGE = 300
"""The most characters of a message. Tables show messages, and clients get them."""
MAX_LINES = 12

_TRACEBACK = "Traceback (most recent call last):"
_CAUSED = "The above exception was the direct cause of the following exception:"
_ABORTED = "Fatal Python error: Aborted"  # faulthandler, which every worker has enabled
_TERMINATE = "terminate called after throwing an instance of"

_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")

_OUT_OF_VRAM = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|^(\w+\.)*OutOfMemoryError\b"
)
_OUT_OF_MEMORY = re.compile(
    r"^(\w+\.)*_?(Array)?MemoryError\b|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Cannot allocate memory"
)
_CUDA_ERROR = re.compile(
    r"(?:CUDA error|Triton Error \[CUDA\]): *(?P<what>.+)|(?P<status>\b(?:CUBLAS|CUDNN)_STATUS_[A-Z_]+)"
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
_TOTAL = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)|([\d.]+ [KMGT]iB) total capacity")
_FREE = re.compile(r"of which ([\d.]+ (?:[KMGT]i)?B(?:ytes)?|0 bytes) is free|([\d.]+ (?:[KMGT]i)?B(?:ytes)?) free")


@dataclass(frozen=True)
class ExitReport:
    """The report of a process that has ended, or that was not started.

    reason   "asked", "config", "no room", "unreadable", "away", "out of VRAM", "out of memory", "CUDA error",
             "engine fault", "hung", "killed", "lost", "signal", "spawn" or "exit"
    message  one line for a person, at most MAX_MESSAGE characters
    retry    whether another try may help
    lines    the last lines that the process wrote to its log, at most MAX_LINES of MAX_MESSAGE characters. If it wrote
             its stacks last, the lines of its main thread's stack, from the innermost call on. Empty if the supervisor
             had asked for the exit
    """

    code: int
    reason: str
    message: str
    retry: bool
    lines: tuple[str, ...] = ()


def not_spawned(error: OSError) -> ExitReport:
    """Return the report of a process that the system could not start."""
    return ExitReport(-1, "spawn", f"cannot start a process: {error.strerror or error}", retry=True)


def not_admitted(reason: str, message: str, *, retry: bool) -> ExitReport:
    """Return the report of a process that the supervisor did not start, because the model could not be loaded."""
    return ExitReport(-1, reason, _printable(message), retry=retry)


def classify(code: int, *, asked: bool, log_tail: list[str], killed: tuple[str, str] | None = None) -> ExitReport:
    """Return the report of an exit.

    code      exit code, or minus the signal's number
    asked     whether the supervisor was stopping the worker
    log_tail  the last lines of the worker's log
    killed    (reason, why) if the supervisor itself sent SIGKILL
    """
    if asked:
        message = f"stopped; it was killed: {killed[1]}" if killed else "stopped"
        return ExitReport(code, "asked", _printable(message), retry=False)
    report = _unasked(code, log_tail, killed)
    return replace(report, lines=tuple(map(_printable, last_lines(log_tail, MAX_LINES))))


def _unasked(code: int, log_tail: list[str], killed: tuple[str, str] | None) -> ExitReport:
    if code in (EXIT_CONFIG, EXIT_AWAY):
        load_errors = [line for line in log_tail if line.startswith(LOAD_ERROR_PREFIX)]
        message = _printable(load_errors[-1]) if load_errors else "cannot load the model as configured"
        away = code == EXIT_AWAY
        return ExitReport(code, "away" if away else "config", message, retry=away)
    last = _printable(next((line.strip() for line in reversed(log_tail) if line.strip()), ""))
    fault = engine_fault(log_tail) if code == EXIT_ENGINE_FAULT else None
    if code == -signal.SIGABRT:
        fault = abort_fault(log_tail)
    if fault is not None:
        return ExitReport(code, fault.reason, _printable(fault.message), retry=True)
    if code == -signal.SIGKILL and killed:
        reason, why = killed
        message = why if reason in ("hung", "lost") else f"killed by the supervisor: {why}"
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
    """Return a line of a log without control characters, cut to MAX_MESSAGE characters."""
    text = masked("".join(c if c.isprintable() else " " for c in line))
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason for the end of a process, as found in its log.

    reason   "out of VRAM", "out of memory", "CUDA error" or "engine fault"
    message  for a person: what happened and, where it is known, what to do
    """

    reason: str
    message: str


def engine_fault(log_tail: Sequence[str]) -> Diagnosis:
    """Return the diagnosis for an engine's exception, from the exception that ended the worker or from its cause."""
    lines = _exceptions(log_tail)
    for line in lines:
        if fault := _known(line):
            return fault
    return Diagnosis("engine fault", lines[-1] if lines else "the engine raised")


def last_lines(log_tail: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` lines, without empty ones, that say most about the end of a process.

    These are the last lines. If the process wrote its stacks last, these are the first lines of the last stack, which
    is the main thread's.
    """
    lines = [line for line in log_tail if line.strip()]
    stacks = [number for number, line in enumerate(lines) if _STACK.match(line)]
    if stacks and all(line.startswith('  File "') for line in lines[stacks[-1] + 1 :]):
        return lines[stacks[-1] :][:count]
    return lines[-count:]


def abort_fault(log_tail: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis for a SIGABRT, from the lines that C++ wrote before it; None if the reason is not known."""
    ends = [number for number, line in enumerate(log_tail) if line.startswith(_ABORTED)]
    begin, end = (ends[-2] + 1 if len(ends) > 1 else 0), (ends[-1] if ends else len(log_tail))
    started = [number for number in range(begin, end) if log_tail[number].startswith(_TERMINATE)]
    if not started:
        return None
    lines = log_tail[started[-1] : end]
    what = next((line for line in lines if line.lstrip().startswith("what():")), lines[0])
    return _known(what.strip().removeprefix("what():").strip())


def _exceptions(log_tail: Sequence[str]) -> list[str]:
    """Return the first line of each exception of the last traceback, from the cause to the exception raised last.

    The last line would not do: CUDA's errors end in lines of advice on debugging.
    """
    starts = [number for number, line in enumerate(log_tail) if line.strip() == _TRACEBACK]
    # The log's tail may not hold the beginning of a long traceback. Then all of it belongs to that traceback.
    blocks = [log_tail[a:b] for a, b in itertools.pairwise([*(starts or [0]), len(log_tail)])]
    lines = [_exception_line(blocks[-1])]
    for block in reversed(blocks[:-1]):
        if not any(line.strip() == _CAUSED for line in block):
            break
        lines.insert(0, _exception_line(block))
    return [line for line in lines if line]


def _exception_line(block: Sequence[str]) -> str:
    frames = [number for number, line in enumerate(block) if line.startswith('  File "')]
    if frames:
        for line in block[frames[-1] + 1 :]:
            if line.strip() and not line.startswith(" "):
                return line.strip()
    return next((line.strip() for line in reversed(block) if line.strip()), "")


def _known(line: str) -> Diagnosis | None:
    if _OUT_OF_VRAM.search(line):
        return Diagnosis("out of VRAM", _vram_message(line))
    if _OUT_OF_MEMORY.search(line):
        message = "" if line == "MemoryError" else f" ({line})"
        return Diagnosis(
            "out of memory",
            "the machine is out of memory (RAM, not VRAM): stop other models or programs, or raise the memory limit "
            f"that the supervisor runs under{message}",
        )
    if found := _CUDA_ERROR.search(line):
        what = (found["what"] or found["status"]).strip()
        return Diagnosis("CUDA error", f"CUDA error: {what}; {_cuda_advice(what)}")
    return None


def _vram_message(line: str) -> str:
    """Return the message about full GPU memory. It leaves out the GPU's number: a worker counts only its own GPUs."""
    wanted, free, total = (_first(pattern, line) for pattern in (_WANTED, _FREE, _TOTAL))
    figures = f": {wanted} more were wanted" if wanted else ""
    if wanted and free:
        figures += f", {free}{f' of {total}' if total else ''} were free"
    return (
        f"the GPU's memory is used up{figures}; give the model a smaller cache_size, max_batch_size or max_seq_len, a "
        "smaller cache_mode, or a GPU with more room (`modelctl ps` shows who holds VRAM)"
    )


def _cuda_advice(what: str) -> str:
    if "device-side assert" in what:
        return "a kernel was given a value out of its range: the lines before the traceback in the log say which check"
    if "no kernel image" in what:
        return "this build of PyTorch or of an extension was not made for this GPU: install one for its architecture"
    return "if it comes again, `dmesg | grep -i xid` tells a failing GPU from a failing kernel"


def _first(pattern: re.Pattern[str], line: str) -> str | None:
    found = pattern.search(line)
    return next(group for group in found.groups() if group) if found else None
