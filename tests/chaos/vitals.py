"""The resources of a supervisor, measured from outside and compared with those before the episode."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.invariants import Violation
from tests.chaos.machines import agent_of, driver_of
from tests.chaos.plan import SECRET
from tests.serving import Serving, describe, is_helper, opened

MEMORY_MIB = 24
"""MiB by which a supervisor may grow over a block."""
LAZY_DESCRIPTORS = 6
"""Additional descriptors that each worker of a lazy model may take."""


@dataclass(frozen=True)
class Vitals:
    """Resource counts of one supervisor at rest. ``connections`` are those of clients, ``threads`` include libzmq's,
    ``beats`` are mapped heartbeat pages, ``rss`` is in bytes."""

    connections: int
    descriptors: int
    sockets: int
    beats: int
    threads: int
    zombies: int
    rss: int


def take(serving: Serving) -> Vitals:
    pid = serving.pid
    connections = serving.overview()["supervisor"]["connections"]
    links = opened(pid)
    maps = Path(f"/proc/{pid}/maps").read_text()
    process = psutil.Process(pid)
    return Vitals(
        connections,
        len(links),
        sum(link.startswith("socket:") for link in links),
        maps.count("/memfd:beat"),
        process.num_threads(),
        sum(map(_is_zombie, process.children())),
        process.memory_info().rss,
    )


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False  # reaped meanwhile


def waited_s(pid: int) -> float:
    """Return the seconds for which a process was ready to run but had to wait, since its start; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def strangers(serving: Serving, workers: list[int]) -> str:
    """Describe the processes of a supervisor that are neither itself nor its guard, usage writer, resource tracker,
    workers, or, with a cluster, its driver and the agents of its workers."""
    helpers = [driver_of(serving.pid), *map(agent_of, workers)]
    known = {serving.pid, *workers, *(process.pid for process in helpers if process is not None)}
    extra = []
    for process in serving.processes():
        try:
            helps = is_helper(process, "guard", "guard.py") or is_helper(process, "usage writer", "usage.writer")
            of_the_supervisor = helps or "resource_tracker" in str(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if process.pid not in known and not of_the_supervisor:
            extra.append(process)
    return describe(extra)


def compare(before: Vitals, now: Vitals, workers: int, lazy: int) -> list[str]:
    """Return a line for each resource that has grown.

    workers  number of workers of this machine
    lazy     number of lazy models' workers that run now
    """
    parts = []
    slack = LAZY_DESCRIPTORS * lazy + now.connections - before.connections
    if now.descriptors > before.descriptors + slack:
        parts.append(f"{now.descriptors} descriptors, {before.descriptors} before")
    if now.sockets > before.sockets + slack:
        parts.append(f"{now.sockets} sockets, {before.sockets} before")
    if now.beats != workers:
        parts.append(f"{now.beats} pages of {workers} workers")
    if now.threads > before.threads:
        parts.append(f"{now.threads} threads, {before.threads} before")
    if now.zombies:
        parts.append(f"{now.zombies} zombies")
    return parts


class Logs:
    """All logs of a runtime directory. Each look reads only what was written since the last one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._at: dict[Path, int] = {}

    def look(self) -> list[Violation]:
        """Return a violation for each log in which a prompt was written since the last look."""
        found = []
        for path in self._directory.iterdir():
            if path.is_symlink() or not path.is_file():
                continue
            with open(path, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                at = self._at.get(path, 0)
                f.seek(at if at <= size else 0)
                written = f.read()
                self._at[path] = f.tell()
            if SECRET.encode() in written:
                line = next(line for line in written.splitlines() if SECRET.encode() in line)
                found.append(Violation("no log holds a prompt", f"{path.name}: {line.decode(errors='replace')}"))
        return found
