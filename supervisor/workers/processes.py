"""Read the processes of this machine, with their sessions and start times, from /proc, see proc(5)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
COMMAND_LENGTH = 120


@dataclass(frozen=True, slots=True)
class Seen:
    """A living process.

    started  clock ticks from boot
    mark     the value of the environment variable that the caller named; None if it is not set or cannot be read
    command  the arguments of the process, shortened
    """

    pid: int
    parent: int
    session: int
    started: int
    uid: int
    mark: str | None
    command: str


def boot_id() -> str:
    """Return the kernel's id of this boot; empty if the kernel has none."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks from boot; None if there is no such process."""
    stat = _stat(pid)
    return None if stat is None else stat[3]


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal such as SIGSTOP, or by a debugger."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def processes_with(variable: str) -> Iterator[Seen]:
    """Return every process that is neither dead nor a zombie.

    variable  the environment variable that is read as ``Seen.mark``
    """
    for name in os.listdir(_PROC):
        if not name.isdecimal():
            continue
        pid = int(name)
        stat = _stat(pid)
        if stat is None or stat[0] in "ZX":
            continue
        _, parent, session, started = stat
        try:
            uid = (_PROC / name).stat().st_uid
        except OSError:
            continue  # gone meanwhile
        yield Seen(pid, parent, session, started, uid, _mark(pid, variable), command_of(pid))


def command_of(pid: int) -> str:
    """Return the command line of a process, for people; its name if it has none; a question mark if it has ended."""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes()
        shown = arguments or (_PROC / str(pid) / "comm").read_bytes()
    except OSError:
        return "?"
    words = " ".join(shown.decode(errors="replace").replace("\0", " ").split())
    return "".join(c if c.isprintable() else "?" for c in words)[:COMMAND_LENGTH]


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """Return state, parent, session and start of a process; None if it has ended.

    The name in parentheses may hold parentheses itself.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19])


def _mark(pid: int, variable: str) -> str | None:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None  # another user's
    wanted = f"{variable}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(wanted):
            return entry[len(wanted) :].decode(errors="replace")
    return None
