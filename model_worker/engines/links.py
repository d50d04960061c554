"""Decide where the files of a model's directory may be, and open them there. The directory may be hostile.

An entry of a directory may be a link out of it:

* Weights (``*.safetensors``) may be anywhere. The target must be a regular file of this user or of root. Nobody else
  may be able to change the target, a directory above it, or a link on the way.
* Any other file must be in a directory that ``supervisor.model_roots`` names, or in Hugging Face's cache.

An entry is opened once, without reading it (O_PATH). What is checked is that descriptor, and what is read later is the
same file, whatever the entry is by then.
"""

import grp
import os
import pwd
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from model_worker.engine import LoadError

_MOST_LINKS = 40
"""The links that Linux follows on the way to one file, at most."""
_BLOB = re.compile(r"/.*/models--[^/]+/blobs/[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""A file in the cache of Hugging Face's hub. Its name is a hash. Older versions of the hub's package made directories
of links to such files anywhere."""


@dataclass(frozen=True)
class Bounds:
    """Where the files of a model's directory may be.

    directory  real path of the directory
    roots      real paths of the directories that ``supervisor.model_roots`` names
    """

    directory: Path
    roots: tuple[Path, ...] = ()

    @classmethod
    def of(cls, directory: Path, roots: Iterable[str] = ()) -> "Bounds":
        return cls(Path(os.path.realpath(directory)), tuple(Path(os.path.realpath(root)) for root in roots))


def open_place(path: Path, bounds: Bounds) -> int:
    """Open a file or directory without reading it (O_PATH). Return the descriptor.

    Raises LoadError if it is where it may not be, OSError if it cannot be opened.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not any(target.is_relative_to(root) for root in (bounds.directory, *bounds.roots)):
            _check_outside(path, target, os.fstat(descriptor), bounds)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, bounds: Bounds) -> int:
    """Open a regular file for reading. A pipe or a device is never opened. Return the descriptor.

    Raises LoadError if it is where it may not be, OSError if it cannot be opened, ValueError if it is no regular file.
    """
    place = open_place(path, bounds)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise ValueError("it is no regular file")
        # Not O_NONBLOCK: where another process has a lease on the file, that would fail instead of waiting.
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _check_outside(path: Path, target: Path, status: os.stat_result, bounds: Bounds) -> None:
    snapshots = bounds.directory.parent
    if snapshots.name == "snapshots" and target.parent == snapshots.parent / "blobs":
        return
    if _BLOB.fullmatch(str(target)) and status.st_uid in _trusted():
        return
    what = f"{_shown(path)} is a link to {_shown(target)}, out of the model's directory"
    if path.suffix != ".safetensors":
        raise LoadError(
            f"{what}: put the file itself there, or a hard link to it, or name the directory of the target in "
            "supervisor.model_roots"
        )
    if why := _changeable(path, status):
        raise LoadError(
            f"{what}, and {why}: change that, put the file itself there, or name the directory of the target in "
            "supervisor.model_roots"
        )


def _changeable(path: Path, status: os.stat_result) -> str | None:
    """Return how another user could change the file to which a link leads; None if nobody else can.

    status  of the file that was opened
    """
    checked: set[str] = set()
    last = None
    for last in _way(path):
        for place in (last, *map(str, Path(last).parents)):
            if place not in checked and (why := _weakness(place)):
                return why
            checked.add(place)
    found = os.stat(last) if last is not None else None
    if found is None or (found.st_dev, found.st_ino) != (status.st_dev, status.st_ino):
        return "the link was exchanged while it was checked"
    return None


def _way(path: Path) -> Iterator[str]:
    """Yield every place on the way of a link: each directory, each further link, and at last the target."""
    at = os.path.realpath(path.parent)
    parts = deque([path.name])
    links = 0
    while parts:
        part = parts.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        if links:  # the entry itself is in the model's directory, which may be anyone's
            yield here
        if not os.path.islink(here):
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise LoadError(f"{_shown(path)} is a link with more than {_MOST_LINKS} links on its way: remove it")
        text = os.readlink(here)
        if text.startswith("/"):
            at = "/"
        parts.extendleft(reversed(text.split("/")))


def _weakness(place: str) -> str | None:
    """Return how another user can change a file, a directory or a link; None if nobody else can.

    In a directory with the sticky bit, such as /tmp, others can add entries, but not change those that are not theirs.
    Each entry on the way is checked, so such a directory is no weakness.
    """
    status = os.lstat(place)
    if status.st_uid not in _trusted():
        return f"{_shown(place)} belongs to another user ({status.st_uid})"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(place, status.st_gid)):
        return f"others can write to {_shown(place)} (mode {stat.S_IMODE(mode):o})"
    return None


def _trusted() -> tuple[int, int]:
    return 0, os.geteuid()


def _is_private(place: str, group: int) -> bool:
    """Return whether a group that can write to a place is that of this user or of root alone.

    Many systems give each user a group of the same name. With an access control list, the group's bits in the mode
    speak for others, too.
    """
    try:
        entry = grp.getgrgid(group)
        owner = pwd.getpwnam(entry.gr_name)
        if "system.posix_acl_access" in os.listxattr(place):
            return False
    except (KeyError, OSError):
        return False
    return owner.pw_uid in _trusted() and owner.pw_gid == group and set(entry.gr_mem) <= {entry.gr_name}


def _shown(path: object) -> str:
    return repr(str(path))[1:-1]
