"""The host memory of models that sleep: the bound, and who has to leave. Sizes are in bytes. All but ``free_bytes`` is
pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.5
"""The share of the free host memory that models may take by default."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The host memory of one worker.

    since  monotonic seconds since which the worker sleeps; None if it is awake and keeps a copy of its weights
    """

    worker: str
    bytes: int
    since: float | None


def room(copies: Sequence[HostCopy], bound: int) -> int:
    """Return the bytes that workers may take that fall asleep now, if all that sleep are unloaded."""
    return max(0, bound - sum(copy.bytes for copy in copies if copy.since is None))


def to_unload(size: int, copies: Sequence[HostCopy], bound: int) -> tuple[str, ...] | None:
    """Return the workers to unload before another one may sleep with ``size`` bytes: those that have slept longest.
    Return None if that is not enough."""
    excess = sum(copy.bytes for copy in copies) + size - bound
    asleep = sorted((copy for copy in copies if copy.since is not None), key=lambda copy: copy.since or 0.0)
    leave: list[str] = []
    for copy in asleep:
        if excess <= 0:
            break
        leave.append(copy.worker)
        excess -= copy.bytes
    return tuple(leave) if excess <= 0 else None


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the machine and this process's cgroup have free. 0 if that cannot be read."""
    try:
        facts = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
        own = next(line for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, KeyError, ValueError, StopIteration):
        return 0
    group = cgroups / own.removeprefix("0::").lstrip("/")
    for place in (group, *group.parents):  # a limit of any group above counts, too
        if not place.is_relative_to(cgroups):
            break
        try:
            limit, used = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    return free
