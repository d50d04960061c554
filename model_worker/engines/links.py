"""Decide where the files of a model's directory may be, and open them there. The directory may be hostile.

An entry of a directory may be a link out of it:

* Weights (``*.safetensors``) may be anywhere. The target must be a regular file of this user or of root. Nobody else
  may be able to change the target, a directory above it, or a link on the way.
* Any other file must be in a directory that ``supervisor.model_roots`` names, or in Hugging Face's cache.

An entry is opened once, without reading it (O_PATH). What is checked is that descriptor, and what is read later is the
same file, whatever the entry is by then.
"""

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from model_worker.engine import LoadError
from protocol.process.file_owners import shown, trusted, weakness

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
    if _BLOB.fullmatch(str(target)) and status.st_uid in trusted():
        return
    what = f"{shown(path)} is a link to {shown(target)}, out of the model's directory"
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
            if place not in checked and (why := weakness(place)):
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
            raise LoadError(f"{shown(path)} is a link with more than {_MOST_LINKS} links on its way: remove it")
        text = os.readlink(here)
        if text.startswith("/"):
            at = "/"
        parts.extendleft(reversed(text.split("/")))
