"""End what a worker has started when the worker has ended, wherever it is by then.

The launcher kills a worker's process group. A process that has left the group would live on, and may hold a GPU: a
child in a session of its own, or one whose parent has ended. Two things lead to it:

* The worker has a mark in its environment, and everything that it starts inherits the mark.
* The supervisor is a child subreaper (prctl(2)). If a descendant loses its parent, it becomes a child of the
  supervisor. So only the supervisor's own children are looked at, and not every process of the machine. A process whose
  parent lives is found when that parent has been ended.

Where the kernel offers no subreaper, or no list of children, all processes are looked at after each end of a worker.

A process that has removed the mark is a child of the supervisor, too. It is ended when every worker has ended that may
have started it: those that lived when the supervisor saw it first. This holds only if all children of the supervisor
must come from the supervisor itself or from its workers. It does not hold for pid 1, which gets the orphans of a whole
container, nor if a program had children before it became the supervisor. There a process without a mark is left alone.
"""

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from supervisor.workers.guard import WORKER_MARK, kill_if, value_of
from supervisor.workers.orphans import MARK
from supervisor.workers.processes import Stat, command_of, stat_of

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
