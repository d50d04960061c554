"""The copies of model directories on a machine: where they are, who uses them, and which ones make room.

Each copy has a directory of its own, named by its content, so a copy never changes once it is complete:

    NAME-KEY/manifest   its files, sizes and checksums
    NAME-KEY/use        locked by each agent whose worker uses the copy; changed at each use
    NAME-KEY/copying    locked by the agent that fetches files
    NAME-KEY/part/N     a file that is being fetched, the number N of the manifest
    NAME-KEY/files/     the model's directory. A file gets here when its checksum was found right
    NAME-KEY/complete   made when all files are there

Locks end with their processes, so agents that were killed leave none. Nobody but the agents' user can enter.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.private_paths import check_private, make_private
from supervisor.cluster.store_messages import File, Manifest

_BLOCK: Final = 4 << 20
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._+=@-]+", re.ASCII)


class NoRoomError(Exception):
    """Copies that are in use leave no room. The message is one line for people."""


class WrongSumError(Exception):
    """A file does not have the checksum of its manifest. The message is one line for people."""


class Copies:
    """The copies below a directory. Raises OSError, and NotPrivate if others can reach the directory.

    root   the directory; it is made
    bound  the most bytes of all copies together
    """

    def __init__(self, root: Path, bound: int) -> None:
        self._root, self._bound = root, bound
        make_private(root)
        check_private(root, root.lstat(), or_roots=False)

    def claim(self, directory: str, manifest: Manifest) -> "Copy":
        """Return the copy of a directory, which may not be complete, and keep it from being removed until this process
        ends. Other copies that nobody uses make room for it, first the one that was used longest ago.

        directory  the path on the supervisor's machine, for the name of the copy

        Raises NoRoomError.
        """
        readable = _UNSAFE.sub("_", Path(directory).name)[:60].lstrip(".-") or "model"
        path = self._root / f"{readable}-{manifest.key}"
        with _locked(self._root / ".lock"):
            for left in (*self._root.glob(".new-*"), *self._root.glob(".gone-*")):
                shutil.rmtree(left)  # of an agent that was killed
            if not path.exists():
                self._make_room(manifest.size, directory)
                fresh = self._root / f".new-{os.getpid()}"
                for part in (fresh, fresh / "files", fresh / "part"):
                    part.mkdir(mode=0o700)
                (fresh / "manifest").write_bytes(pack_body({"files": manifest.packed()}))
                fresh.rename(path)
            use = os.open(path / "use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.utime(use)
            fcntl.flock(use, fcntl.LOCK_SH)
        return Copy(path, manifest, use)

    def _make_room(self, needed: int, directory: str) -> None:
        """Remove copies until there is room. A copy counts with all its bytes from its first one on."""
        found = [(path, size) for path in self._root.iterdir() if (size := _size_of(path)) is not None]
        taken = sum(size for _, size in found)
        for path, size in sorted(found, key=lambda copy: _used_at(copy[0])):
            if taken + needed <= self._bound:
                return
            if _remove_unused(path):
                taken -= size
        if taken + needed > self._bound:
            raise NoRoomError(
                f"{directory} has {needed} bytes, and copies in {self._root} may have {self._bound} in all, of which "
                f"{taken} are in use: raise cluster.model_store.size"
            )


class Copy:
    """A copy of a directory.

    files  the model's directory
    """

    def __init__(self, path: Path, manifest: Manifest, use: int) -> None:
        self._path, self.manifest, self._use = path, manifest, use
        self.files = path / "files"
        self._copying: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all files are there."""
        return (self._path / "complete").exists()

    def begin(self) -> bool:
        """Return whether this process may fetch files now. It may not while another one does."""
        if self._copying is None:
            self._copying = os.open(self._path / "copying", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._copying, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def present(self) -> int:
        """Return the bytes that are there, those of files that are not complete included."""
        return sum(_length(self.files / file.name) or 0 for file in self.manifest.files) + sum(
            _length(part) or 0 for part in (self._path / "part").iterdir()
        )

    def missing(self) -> Iterator[tuple[File, Path]]:
        """Yield the files that are not complete, and where their bytes are gathered."""
        for number, file in enumerate(self.manifest.files):
            if _length(self.files / file.name) != file.size:
                yield file, self._path / "part" / str(number)

    def accept(self, file: File, part: Path, digest: str) -> None:
        """Take a file whose bytes are all there. Raises WrongSumError, and then removes the bytes."""
        if digest != file.sha256:
            part.unlink()
            raise WrongSumError(f"{file.name} has not the checksum {file.sha256[:12]}… that the model store has told")
        _flush(part)
        target = self.files / file.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.rename(target)
        _flush(target.parent)

    def finish(self) -> None:
        """Note that all files are there, and let other processes begin."""
        (self._path / "complete").touch(mode=0o600)
        _flush(self._path)
        if self._copying is not None:
            os.close(self._copying)
            self._copying = None

    def close(self) -> None:
        """Let other agents remove the copy."""
        for descriptor in (self._use, self._copying):
            if descriptor is not None:
                os.close(descriptor)


def digest_of(part: Path) -> "hashlib._Hash":
    """Return the checksum of the bytes that are there already, to go on with."""
    found = hashlib.sha256()
    try:
        with open(part, "rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    except FileNotFoundError:
        pass
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int | None:
    """Return the bytes of a copy; None for what is none. A copy whose manifest cannot be read counts with 0 bytes."""
    if path.name.startswith("."):
        return None
    try:
        return Manifest.read(unpack_body((path / "manifest").read_bytes())["files"]).size
    except FileNotFoundError:
        return None
    except (FrameError, KeyError, OSError):
        return 0


def _used_at(path: Path) -> float:
    try:
        return (path / "use").stat().st_mtime
    except OSError:
        return 0.0


def _remove_unused(path: Path) -> bool:
    """Remove a copy unless an agent uses it. Return whether it is gone."""
    try:
        use = os.open(path / "use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.with_name(f".gone-{os.getpid()}")
        path.rename(gone)  # at once: half a copy must not look like one
        shutil.rmtree(gone)
    except OSError:  # BlockingIOError: it is in use
        return False
    finally:
        os.close(use)
    return True


def _length(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
