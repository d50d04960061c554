"""Find orphans: processes that a killed supervisor left behind. The next supervisor names them in its log, and ends
those that surely belonged to the killed supervisor.

The kernel (PR_SET_PDEATHSIG) and the guard end the workers together with their supervisor. Two kinds of processes
escape both: one that a worker started and that has left the worker's group, and one that does not die at once. Such a
process may hold a GPU. Then the next worker would fail for want of memory, and the reason would be hard to find.

``workers.json`` in the runtime directory names the workers. The processes that they start have a mark in their
environment. Only processes of the same user can read it.
"""

import ctypes
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from protocol.process.paths import open_private
from supervisor.workers.guard import SUPERVISOR_MARK, WORKER_MARK, kill_if, value_of

# Read the processes of this machine, with their sessions and start times, from /proc, see proc(5).


_PROC = Path("/proc")
COMMAND_LENGTH = 120


@dataclass(frozen=True, slots=True)
class Living:
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


def processes_with(variable: str) -> Iterator[Living]:
    """Return every process that is neither dead nor a zombie.

    variable  the environment variable that is read as ``Living.mark``
    """
    for pid in all_processes():
        stat = stat_of(pid)
        if stat is None or stat.is_zombie:
            continue
        try:
            uid = (_PROC / str(pid)).stat().st_uid
        except OSError:
            continue  # gone meanwhile
        mark = value_of(pid, variable) or None
        yield Living(pid, stat.parent, stat.session, stat.started, uid, mark, command_of(pid))


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


FILE = "workers.json"
MARK = SUPERVISOR_MARK
DYING_S = 0.5
"""Seconds that processes may take to die with their supervisor, before they count as orphans."""
ENDING_S = 2.0
"""Seconds to wait for the end of orphans that were killed."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Recorded:
    """A worker in the record. ``started``, in clock ticks from boot, tells it from a later process with its pid."""

    pid: int
    started: int
    model: str


@dataclass(frozen=True, slots=True)
class WorkersRecord:
    """The record of one supervisor's workers, as ``workers.json`` holds it."""

    boot: str
    marks: tuple[str, ...]
    workers: tuple[Recorded, ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process that is left. If it is not ``ours``, it is in the session of a former worker, and is left alone."""

    pid: int
    started: int
    model: str
    command: str
    ours: bool


def left_behind(
    record: WorkersRecord, boot: str, seen: Iterable[Living], uid: int, spare: Collection[int]
) -> list[Orphan]:
    """Return the processes that are a former supervisor's workers, or that such workers have started.

    A process of this user is surely ours in three cases: it has a mark of the record, it is a worker by pid and start
    time, or it is in the session of such a worker. After the worker has ended, another program may get the number of
    its session. So a process in that session without the mark is named only. Records of another boot are ignored.

    boot   id of the present boot
    spare  pids to leave out: this process and its ancestors
    """
    if record.boot != boot:
        return []
    seen = list(seen)
    recorded = {worker.pid: worker for worker in record.workers}
    starts = {process.pid: process.started for process in seen if process.pid in recorded}
    found = []
    for process in seen:
        if process.uid != uid or process.pid in spare:
            continue
        worker = recorded.get(process.session) or recorded.get(process.pid)
        if worker is not None and starts.get(worker.pid, worker.started) != worker.started:
            worker = None  # the pid belongs to another process now
        if worker is not None and process.started < worker.started:
            worker = None  # older than the worker, so not its child
        ours = process.mark in record.marks or (worker is not None and worker.pid in starts)
        if ours or worker is not None:
            model = worker.model if worker is not None else "-"
            found.append(Orphan(process.pid, process.started, model, process.command, ours))
    return found


class Orphans:
    """The record of workers in a runtime directory that this supervisor has locked. If it cannot be written, for
    example to a full disk, the supervisor logs that and goes on."""

    def __init__(self, directory: Path, log: logging.Logger) -> None:
        self._path = directory / FILE
        self._log = log
        self._boot = boot_id()
        self._workers: dict[int, Recorded] = {}
        self._failed = False
        self._former = self._read()
        self.mark = os.urandom(16).hex()
        self._marks: tuple[str, ...] = (self.mark,)
        os.environ[MARK] = self.mark  # inherited by everything that this process starts from now on
        os.environ.pop(WORKER_MARK, None)  # of a worker that has started this program

    def record(self, pid: int, model: str) -> None:
        """Add a worker that was started to the record."""
        if (started := start_of(pid)) is not None:
            self._workers[pid] = Recorded(pid, started, model)
            self.write()

    def forget(self, pid: int) -> None:
        """Take a worker that was reaped out of the record."""
        if self._workers.pop(pid, None) is not None:
            self.write()

    def sweep(self, holds: Mapping[int, str]) -> list[Orphan]:
        """End the orphans of former supervisors, name them in the log, and return them. Call this once, before the
        first worker is started.

        This takes no time if nothing is left, and at most ``DYING_S`` + ``ENDING_S``.

        holds  pid → the memory of GPUs that this process holds, in words. Processes that are not ours are named in the
               log as well
        """
        former, found = self._former, list[Orphan]()
        if former is not None:
            self._wait_for_the_end(former, DYING_S)
            found = self._find(former)
        for left in found:
            what = f"pid {left.pid} ({left.command})"
            if left.pid in holds:
                what += f", which holds {holds[left.pid]}"
            if left.ours:
                self._log.warning("%s: a former supervisor left %s behind: killing it", left.model, what)
                _kill(left)
            else:
                self._log.warning(
                    "%s: %s is in the session of a worker of a former supervisor, but may be another's: left alone; "
                    "if it is not, end it with `kill %d`", left.model, what, left.pid,
                )  # fmt: skip
        for pid in sorted(holds.keys() - {left.pid for left in found}):
            self._log.info("pid %d (%s) holds %s, and is none of ours: left alone", pid, command_of(pid), holds[pid])
        if former is not None and any(left.ours for left in found):
            for left in self._wait_for_the_end(former, ENDING_S):
                self._log.error("pid %d was killed %.0f s ago, and is still there", left.pid, ENDING_S)
                self._marks = tuple(dict.fromkeys(self._marks + former.marks))  # for the next start
        self._former = None
        self.write()  # so the mark is in the record before any process has it
        return found

    def _find(self, former: WorkersRecord) -> list[Orphan]:
        seen = list(processes_with(MARK))
        return left_behind(former, self._boot, seen, os.getuid(), lineage(os.getpid(), seen))

    def _wait_for_the_end(self, former: WorkersRecord, seconds: float) -> list[Orphan]:
        """Wait until no orphan that is surely ours is left, or the time is over. Return those that are left."""
        deadline = time.monotonic() + seconds
        while (left := [each for each in self._find(former) if each.ours]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def _read(self) -> WorkersRecord | None:
        try:
            stored: dict[str, Any] = json.loads(self._path.read_bytes())
            workers = tuple(Recorded(int(w["pid"]), int(w["started"]), str(w["model"])) for w in stored["workers"])
            return WorkersRecord(str(stored["boot"]), tuple(map(str, stored["marks"])), workers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            self._log.warning("%s cannot be read (%s): nothing of former workers is looked for", self._path, e)
            return None

    def write(self) -> None:
        """Write the record whole or not at all. If this process is killed meanwhile, the former record stays."""
        new = self._path.with_name(FILE + ".new")
        stored = {"boot": self._boot, "marks": self._marks, "workers": [asdict(w) for w in self._workers.values()]}
        try:
            with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                json.dump(stored, file)
            new.replace(self._path)
            self._failed = False
        except OSError as e:
            if not self._failed:
                self._log.warning("%s cannot be written: %s", self._path, e.strerror)
            self._failed = True


def lineage(pid: int, seen: Iterable[Living]) -> set[int]:
    """Return a process and its ancestors."""
    found, parents = set[int](), {process.pid: process.parent for process in seen}
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _kill(left: Orphan) -> None:
    kill_if(left.pid, lambda: start_of(left.pid) == left.started)


# End what a worker has started when the worker has ended, wherever it is by then.
#
# The launcher kills a worker's process group. A process that has left the group would live on, and may hold a GPU: a
# child in a session of its own, or one whose parent has ended. Two things lead to it:
#
# * The worker has a mark in its environment, and everything that it starts inherits the mark.
# * The supervisor is a child subreaper (prctl(2)). If a descendant loses its parent, it becomes a child of the
#   supervisor. So only the supervisor's own children are looked at, and not every process of the machine. A process
#   whose parent lives is found when that parent has been ended.
#
# Where the kernel offers no subreaper, or no list of children, all processes are looked at after each end of a worker.
#
# A process that has removed the mark is a child of the supervisor, too. It is ended when every worker has ended that
# may have started it: those that lived when the supervisor saw it first. This holds only if all children of the
# supervisor must come from the supervisor itself or from its workers. It does not hold for pid 1, which gets the
# orphans of a whole container, nor if a program had children before it became the supervisor. There a process without
# a mark is left alone.


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
SLICE = 20
"""Processes that one call of ``look`` sees. The loop waits for it. A look at a process takes 50 to 150 µs."""
LOOK_S = 1.0
"""Seconds between two looks while nothing happens."""
NEXT_S = 0.001
"""Seconds until the next slice. Other work of the loop comes between."""
SETTLED_S = 0.5
"""Seconds for which a child must have no mark. A process that was just forked has the environment of its parent's
program until its own program begins."""
SOON_S = 0.01
"""Seconds until the next look after one that has killed something, doubled while the same processes do not die."""
FORGOTTEN_S = 10.0
"""Seconds after which a child that has ended and that nobody has collected is collected here, if it may be the
supervisor's own. The parts of the supervisor collect their own children within seconds."""
END_S = 2.0
"""Seconds that ``end_all`` waits for the end of what it has killed."""
_NAMED = 5
"""Processes that one line of the log names."""


def become_subreaper() -> None:
    """Make this process the parent of all descendants that lose their own parents. Do nothing where the kernel
    refuses."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(slots=True)
class _Child:
    """A child of this process.

    started   clock ticks from boot
    seen_at   monotonic seconds at which it was first seen
    worker    the mark of the worker that has started it; "" if this process has started it; None if it has no mark
    suspects  without a mark: the marks of the workers that may have started it
    ended_at  monotonic seconds at which it was first seen as a zombie
    """

    started: int
    seen_at: float
    worker: str | None = ""
    suspects: frozenset[str] = frozenset()
    ended_at: float | None = None
    told: bool = False


@dataclass(slots=True)
class _Round:
    """One look at all processes, slice by slice."""

    pids: Iterator[int]
    seen: set[int] = field(default_factory=set)
    found: int = 0


class Descendants:
    """The processes that the workers of one launcher have started.

    prefix  the mark of this supervisor, with which the marks of its workers begin
    """

    def __init__(self, prefix: str, log: logging.Logger) -> None:
        self._prefix = f"{prefix}-"
        self._log = log
        self._numbers = count(1)
        self._living: dict[str, tuple[int, str]] = {}
        """Mark of each worker that was not collected yet → its pid and its name."""
        self._names: dict[str, str] = {}
        """Mark of each worker whose descendants are being ended → its name."""
        self._children: dict[int, _Child] = {}
        self._killed: set[tuple[int, int]] = set()
        """Pid and start of what was killed and has not ended yet, so that it is logged once."""
        self._round: _Round | None = None
        self._pause_s = SOON_S
        children = own_children()
        self._adopts = children is not None and is_subreaper()
        self._alone = self._adopts and not children and os.getpid() != 1

    def new_mark(self) -> str:
        """Return the mark of the next worker, for the variable ``WORKER_MARK`` of its environment."""
        return f"{self._prefix}{next(self._numbers)}"

    def began(self, mark: str, pid: int, name: str) -> None:
        """Take note of a worker that was started, or that has got another name."""
        self._living[mark] = pid, name

    def ended(self, mark: str) -> None:
        """Take note of the end of a worker. Call ``look`` then."""
        _, self._names[mark] = self._living.pop(mark, (0, "-"))
        self._round, self._pause_s = None, SOON_S

    def look(self, now: float) -> float | None:
        """Kill what ended workers have left, and collect children that nobody else collects, in a slice of all
        processes. Return the seconds until the next call; None if it is due only after the end of a worker.

        now  monotonic seconds
        """
        if (found := self._look(now)) is None:
            return NEXT_S
        if not found:
            return LOOK_S if self._adopts else None
        pause, self._pause_s = self._pause_s, min(LOOK_S, 2 * self._pause_s)
        return pause

    def end_all(self) -> None:
        """Kill what all workers have left. Return when nothing is left, or after ``END_S``.

        Call this when no worker lives any more.
        """
        for mark in list(self._living):
            self.ended(mark)
        deadline, self._round = time.monotonic() + END_S, None
        while (found := self._look(time.monotonic(), settled_s=0.0)) != 0 and time.monotonic() < deadline:
            if found is not None:
                time.sleep(SOON_S)

    def _look(self, now: float, settled_s: float = SETTLED_S) -> int | None:
        """Look at the next slice. After the last one, return how many processes of ended workers there were."""
        current = self._round
        if current is None:
            candidates = own_children() or [] if self._adopts else all_processes()
            current = self._round = _Round(iter(candidates))
        killed: dict[str, list[str]] = {}
        sliced = list(islice(current.pids, SLICE))
        for pid in sliced:
            stat = stat_of(pid)
            if stat is None:
                continue
            current.seen.add(pid)
            mark = self._left_by(pid, stat, now, settled_s) if self._adopts else self._marked_by(pid)
            if mark is None or stat.is_zombie:
                continue
            current.found += 1
            command = command_of(pid)
            if self._kill(pid, stat, mark) and (pid, stat.started) not in self._killed:
                self._killed.add((pid, stat.started))
                killed.setdefault(self._names.get(mark, "-"), []).append(f"pid {pid} ({command})")
        for name, those in killed.items():
            more = f", and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
            what = ", ".join(those[:_NAMED])
            self._log.warning("%s: killing what has outlived its worker: %s%s", name, what, more)
        if len(sliced) == SLICE:
            return None
        self._round = None
        self._children = {pid: child for pid, child in self._children.items() if pid in current.seen}
        if not current.found:
            self._names.clear()
            self._killed.clear()
        return current.found

    def _left_by(self, pid: int, stat: Stat, now: float, settled_s: float) -> str | None:
        """Return the mark of the ended worker that has left this child of ours, "" if it has none; else None."""
        if stat.parent != os.getpid() or any(pid == worker for worker, _ in self._living.values()):
            return None
        child = self._children.get(pid)
        if child is None or child.started != stat.started:
            # What the supervisor starts itself is in its session, or leads one. A zombie in another session is adopted.
            own = stat.is_zombie and stat.session in (os.getsid(0), pid)
            child = self._children[pid] = _Child(stat.started, now, "" if own else None)
            child.suspects = frozenset(self._living)
        if stat.is_zombie:
            child.ended_at = now if child.ended_at is None else child.ended_at
            if child.worker != "" or now - child.ended_at >= FORGOTTEN_S:
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
            return None
        if child.worker is None:
            child.worker = self._marked_by(pid, living=True) or ("" if value_of(pid, MARK) else None)
        if child.worker is None:
            return "" if now - child.seen_at >= settled_s and self._may_end(pid, child) else None
        return child.worker if child.worker and child.worker not in self._living else None

    def _marked_by(self, pid: int, *, living: bool = False) -> str | None:
        """Return the mark of the worker that has started a process; None if it has none of our marks.

        living  whether marks of workers that live count
        """
        mark = value_of(pid, WORKER_MARK)
        return mark if mark.startswith(self._prefix) and (living or mark not in self._living) else None

    def _may_end(self, pid: int, child: _Child) -> bool:
        """Return whether a child without a mark must be what an ended worker has left."""
        if not self._alone:
            return False
        left = sorted(self._living[mark][1] for mark in child.suspects & self._living.keys())
        if left and not child.told:
            child.told = True
            self._log.info(
                "pid %d (%s) was started by a worker, and its environment does not say by which: it is killed when the "
                "workers of %s have ended", pid, command_of(pid), ", ".join(left),
            )  # fmt: skip
        return not left

    def _kill(self, pid: int, stat: Stat, mark: str) -> bool:
        """Kill a process if it is still the one that was looked at."""

        def is_same() -> bool:
            if self._adopts:  # the pid of our child is not given to another process before we have collected the child
                now = stat_of(pid)
                return now is not None and (now.started, now.parent) == (stat.started, stat.parent)
            return value_of(pid, WORKER_MARK) == mark

        return kill_if(pid, is_same)


def is_subreaper() -> bool:
    """Return whether this process is a child subreaper."""
    answer = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def own_children() -> list[int] | None:
    """Return the pids of this process's children, zombies among them; None if the kernel does not list them."""
    found: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # the thread has ended
                found += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
    except OSError:
        return None
    return found


def all_processes() -> list[int]:
    """Return the pids of all processes of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
