"""The directories that a model store sends, with the checksums of their files."""

import hashlib
import os
import queue
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.cluster.store_messages import DEEPEST, MOST_FILES, NAME, File, Manifest

_BLOCK: Final = 4 << 20
Mark = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file: another content has another mark."""


class StoreProblem(Exception):
    """A directory cannot be sent. The message is one line for people."""


@dataclass(frozen=True)
class Listed:
    """A directory whose checksums are known. ``marks`` has the mark of each file by its name."""

    manifest: Manifest
    marks: Mapping[str, Mark]


def mark_of(status: os.stat_result) -> Mark:
    """Return the mark of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def scan(directory: Path) -> dict[str, Mark]:
    """Return the files below a directory, by name. Hidden ones are left out. Raises StoreProblem."""
    try:
        found = dict(_files(directory, "", 1))
    except OSError as e:
        raise StoreProblem(f"{e.filename or directory}: {e.strerror or e}") from None
    if not found:
        raise StoreProblem(f"{directory} has no files")
    if len(found) > MOST_FILES:
        raise StoreProblem(f"{directory} has more than {MOST_FILES} files: the model store sends no such directories")
    return dict(sorted(found.items()))


def _files(directory: Path, before: str, depth: int) -> Iterator[tuple[str, Mark]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not NAME.fullmatch(entry.name):
                raise StoreProblem(
                    f"{entry.path!r}: the model store sends names of A-Z a-z 0-9 . _ + = @ - only; rename"
                )
            if entry.is_symlink():
                raise StoreProblem(
                    f"{entry.path} is a link, and the model store sends none: copy the file it names there"
                )
            if entry.is_dir(follow_symlinks=False):
                if depth == DEEPEST:
                    raise StoreProblem(f"{entry.path}: the model store sends no directories this deep")
                yield from _files(Path(entry.path), f"{before}{entry.name}/", depth + 1)
                continue
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise StoreProblem(f"{entry.path} is no file, and the model store sends files only")
            yield before + entry.name, mark_of(status)


def open_as(path: Path, mark: Mark) -> int:
    """Return a descriptor of a file that is still the one with this mark. Raises StoreProblem."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise StoreProblem(f"{path}: {e.strerror}") from None
    if mark_of(os.fstat(file)) != mark:
        os.close(file)
        raise StoreProblem(f"{path} has changed while it was copied")
    return file


class Catalogue:
    """Makes the manifests of directories. A thread reads the files, and ``find`` never waits for it.

    A manifest is made again when a file has changed. Only files that have changed are read again.
    """

    def __init__(self) -> None:
        self._listed: dict[str, Listed] = {}
        self._sums: dict[Mark, str] = {}
        self._reading: dict[str, list[int]] = {}
        """By directory that waits or is read: the bytes that were read, and all of them."""
        self._problems: dict[str, str] = {}
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="checksums").start()

    def find(self, directory: str) -> Listed | tuple[int, int]:
        """Return a directory, or how many bytes of it were read so far, and how many there are. Raises StoreProblem."""
        if (reading := self._reading.get(directory)) is not None:
            return reading[0], reading[1]
        if (why := self._problems.pop(directory, None)) is not None:
            raise StoreProblem(why)
        marks = scan(Path(directory))
        listed = self._listed.get(directory)
        if listed is not None and listed.marks == marks:
            return listed
        self._reading[directory] = [0, sum(mark[2] for mark in marks.values())]
        self._waiting.put(directory)
        return 0, self._reading[directory][1]

    def known(self, directory: str) -> Listed | None:
        """Return a directory as ``find`` returned it last; None if it never did."""
        return self._listed.get(directory)

    def _run(self) -> None:
        while True:
            directory = self._waiting.get()
            try:
                self._listed[directory] = self._read(directory)
            except StoreProblem as e:
                self._problems[directory] = str(e)
            except OSError as e:
                self._problems[directory] = f"{directory}: {e.strerror or e}"
            del self._reading[directory]

    def _read(self, directory: str) -> Listed:
        marks, progress = scan(Path(directory)), self._reading[directory]
        files, sums = [], {}
        for name, mark in marks.items():
            if (known := self._sums.get(mark)) is None:
                known = self._sum(Path(directory) / name, mark, progress)
            else:
                progress[0] += mark[2]
            sums[mark] = known
            files.append(File(name, mark[2], known))
        before = self._listed.get(directory)
        for mark in before.marks.values() if before is not None else ():
            self._sums.pop(mark, None)
        self._sums |= sums
        return Listed(Manifest(tuple(files)), marks)

    def _sum(self, path: Path, mark: Mark, progress: list[int]) -> str:
        found, file = hashlib.sha256(), open_as(path, mark)
        try:
            while block := os.read(file, _BLOCK):
                found.update(block)
                progress[0] += len(block)
            if mark_of(os.fstat(file)) != mark:
                raise StoreProblem(f"{path} has changed while it was read")
        finally:
            os.close(file)
        return found.hexdigest()
