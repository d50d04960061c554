"""Read the processes of this machine, with their sessions and start times, from /proc, see proc(5)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from supervisor.workers.guard import value_of

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


class Stat(NamedTuple):
    """The state (a letter), parent, session and start of a process, which is in clock ticks from boot."""

    state: str
    parent: int
    session: int
    started: int

    @property
    def is_zombie(self) -> bool:
        """Whether the process has ended, and was not collected yet."""
        return self.state in "ZX"


def boot_id() -> str:
    """Return the kernel's id of this boot; empty if the kernel has none."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks from boot; None if there is no such process."""
    stat = stat_of(pid)
    return None if stat is None else stat.started


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal such as SIGSTOP, or by a debugger."""
    stat = stat_of(pid)
    return stat is not None and stat.state in "Tt"


def processes_with(variable: str) -> Iterator[Seen]:
    """Return every process that is neither dead nor a zombie.

    variable  the environment variable that is read as ``Seen.mark``
    """
    for name in os.listdir(_PROC):
        if not name.isdecimal():
            continue
        pid = int(name)
        stat = stat_of(pid)
        if stat is None or stat.is_zombie:
            continue
        try:
            uid = (_PROC / name).stat().st_uid
        except OSError:
            continue  # gone meanwhile
        mark = value_of(pid, variable) or None
        yield Seen(pid, stat.parent, stat.session, stat.started, uid, mark, command_of(pid))


def command_of(pid: int) -> str:
    """Return the command line of a process, for people; its name if it has none; a question mark if it has ended."""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes()
        shown = arguments or (_PROC / str(pid) / "comm").read_bytes()
    except OSError:
        return "?"
    words = " ".join(shown.decode(errors="replace").replace("\0", " ").split())
    return "".join(c if c.isprintable() else "?" for c in words)[:COMMAND_LENGTH]


def stat_of(pid: int) -> Stat | None:
    """Return what /proc/PID/stat tells of a process; None if there is no such process.

    The name in parentheses may hold parentheses itself.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
