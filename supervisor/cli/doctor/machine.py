"""Memory, descriptors, disks and shared memory: read here, judged by functions that take the facts as arguments."""

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from supervisor.cli.doctor.findings import Finding, bad, ok, warn
from supervisor.compiled_modules import loss
from supervisor.ports.descriptors import COMFORTABLE, needed
from supervisor.spelling import size

GIB: Final = 1 << 30
SCARCE_SHM: Final = 256 << 20
"""Shared memory that PyTorch may want between its processes. Docker gives a container 64 MiB."""
SCARCE_DISK: Final = GIB
SCARCE_MEMORY: Final = 4 * GIB
SUPPORTED: Final = ((3, 11), (3, 13))


def look(runtime_dir: Path, logs: Path, workers: int) -> Iterator[Finding]:
    """Yield what is found about the machine.

    workers  workers of models.yaml; 0 if there is no such file
    """
    yield python_of(platform.python_version_tuple()[:2])
    if (message := loss()) is not None:
        yield warn("compiled modules", *_halves(message))
    else:
        yield ok("compiled modules", "in use")
    yield descriptors_of(resource.getrlimit(resource.RLIMIT_NOFILE)[1], needed(workers, 3))
    yield memory_of(psutil.virtual_memory().available, _room_of_cgroup())
    yield shared_memory_of(_free("/dev/shm"))
    for place in _places(runtime_dir, logs):
        yield disk_of(place)
    yield numa_of(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def python_of(version: tuple[str, ...]) -> Finding:
    """Judge the version of Python, as ("3", "12")."""
    text, number = ".".join(version), tuple(map(int, version))
    if SUPPORTED[0] <= number <= SUPPORTED[1]:
        return ok("Python", text)
    return warn("Python", f"{text} is not tested", "use Python 3.11, 3.12 or 3.13")


def descriptors_of(hard: int, fewest: int) -> Finding:
    """Judge the hard limit of descriptors. ``fewest``: with which a supervisor can work."""
    remedy = f"raise it to {COMFORTABLE} or more: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if hard < fewest:
        return bad("descriptors", f"{hard} are allowed, and {fewest} are needed", remedy)
    if hard < COMFORTABLE:
        return warn("descriptors", f"{hard} are allowed, which limits the number of clients", remedy)
    return ok("descriptors", f"{hard} are allowed")


def memory_of(available: int, room: int | None) -> Finding:
    """Judge the memory. ``room``: bytes that this cgroup may still take; None without a limit."""
    least = available if room is None else min(available, room)
    says = f"{size(available)} free" + ("" if room is None else f", {size(room)} of them for this container or service")
    if least < SCARCE_MEMORY:
        return warn("memory", says, "a model is read through memory, and each worker takes 1 to 2 GiB: free some")
    return ok("memory", says)


def shared_memory_of(free: int | None) -> Finding:
    """Judge /dev/shm. None: there is none."""
    if free is None:
        return warn("/dev/shm", "there is none", "mount a tmpfs there: docker run --shm-size 1g")
    if free < SCARCE_SHM:
        return warn("/dev/shm", f"{size(free)} free", "give it more: docker run --shm-size 1g, or an emptyDir of 1 GiB")
    return ok("/dev/shm", f"{size(free)} free")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that something is written to.

    existing  the directory, or the nearest one above it that exists
    free      bytes; None if that cannot be read
    """

    what: str
    path: Path
    existing: Path
    writable: bool
    free: int | None


def disk_of(place: Place) -> Finding:
    """Judge a directory."""
    if not place.writable:
        return bad(
            place.what, f"{place.existing} cannot be written", f"run `ls -ld {place.existing}`, and make it yours"
        )
    if place.free is None:
        return warn(place.what, f"{place.path}: its free space cannot be read", "see `df`")
    if place.free == 0:
        return bad(place.what, f"{place.path} is on a disk that is full", "free space: see `df`")
    if place.free < SCARCE_DISK:
        return warn(place.what, f"{place.path} has {size(place.free)} left", "free space: see `df`")
    return ok(place.what, f"{place.path}, {size(place.free)} free")


def numa_of(nodes: int) -> Finding:
    """Tell the number of NUMA nodes. Workers are kept to the processors of their GPU's node by themselves."""
    kept = ": each worker is kept to that of its GPU" if nodes > 1 else ""
    return ok("NUMA", f"{max(nodes, 1)} node{'s' if nodes > 1 else ''}{kept}")


def _places(runtime_dir: Path, logs: Path) -> Iterator[Place]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton").expanduser())
    for what, path in (
        ("runtime directory", runtime_dir),
        ("logs", logs),
        ("cache of compiled CUDA code", extensions),
        ("cache of Triton's kernels", triton),
    ):
        existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
        yield Place(what, path, existing, os.access(existing, os.W_OK | os.X_OK), _free(str(existing)))


def _free(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _room_of_cgroup() -> int | None:
    """Return the bytes that the cgroup of this process may still take (version 2); None without a limit."""
    try:
        (group,) = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        directory = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (directory / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((directory / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def _halves(message: str) -> tuple[str, str]:
    """Return what a message says, and its remedy behind the last semicolon."""
    says, _, remedy = message.rpartition("; ")
    return says, remedy
