"""Find orphans: processes that a killed supervisor left behind. The next supervisor names them in its log, and ends
those that surely belonged to the killed supervisor.

The kernel (PR_SET_PDEATHSIG) and the guard end the workers together with their supervisor. Two kinds of processes
escape both: one that a worker started and that has left the worker's group, and one that does not die at once. Such a
process may hold a GPU. Then the next worker would fail for want of memory, and the reason would be hard to find.

``workers.json`` in the runtime directory names the workers. The processes that they start have a mark in their
environment. Only processes of the same user can read it.
"""

import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.process.private_paths import open_private
from supervisor.workers.guard import SUPERVISOR_MARK, WORKER_MARK, kill_if
from supervisor.workers.processes import Seen, boot_id, command_of, processes_with, start_of

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
class Record:
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


def left_behind(record: Record, boot: str, seen: Iterable[Seen], uid: int, spare: Collection[int]) -> list[Orphan]:
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
        mark = os.urandom(16).hex()
        self._marks: tuple[str, ...] = (mark,)
        self.mark = mark
        os.environ[MARK] = mark  # inherited by everything that this process starts from now on
        os.environ.pop(WORKER_MARK, None)  # of a worker that has started this program

    def record(self, pid: int, model: str) -> None:
        """Add a worker that was started to the record."""
        started = start_of(pid)
        if started is not None:
            self._workers[pid] = Recorded(pid, started, model)
            self._write()

    def forget(self, pid: int) -> None:
        """Take a worker that was reaped out of the record."""
        if self._workers.pop(pid, None) is not None:
            self._write()

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
            self._expect_the_end(former)
        self._former = None
        self._write()  # so the mark is in the record before any process has it
        return found

    def write_again(self) -> None:
        """Write the record into a runtime directory that was made again."""
        self._write()

    def _expect_the_end(self, former: Record) -> None:
        for left in self._wait_for_the_end(former, ENDING_S):
            self._log.error("pid %d was killed %.0f s ago, and is still there", left.pid, ENDING_S)
            self._marks = tuple(dict.fromkeys(self._marks + former.marks))  # for the next start

    def _find(self, former: Record) -> list[Orphan]:
        seen = list(processes_with(MARK))
        return left_behind(former, self._boot, seen, os.getuid(), lineage(os.getpid(), seen))

    def _wait_for_the_end(self, former: Record, seconds: float) -> list[Orphan]:
        """Wait until no orphan that is surely ours is left, or the time is over. Return those that are left."""
        deadline = time.monotonic() + seconds
        while (left := [each for each in self._find(former) if each.ours]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def _read(self) -> Record | None:
        try:
            stored: dict[str, Any] = json.loads(self._path.read_bytes())
            workers = tuple(Recorded(int(w["pid"]), int(w["started"]), str(w["model"])) for w in stored["workers"])
            return Record(str(stored["boot"]), tuple(map(str, stored["marks"])), workers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            self._log.warning("%s cannot be read (%s): nothing of former workers is looked for", self._path, e)
            return None

    def _write(self) -> None:
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


def lineage(pid: int, seen: Iterable[Seen]) -> set[int]:
    """Return a process and its ancestors."""
    found, parents = set[int](), {process.pid: process.parent for process in seen}
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _kill(left: Orphan) -> None:
    kill_if(left.pid, lambda: start_of(left.pid) == left.started)
