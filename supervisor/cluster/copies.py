"""Copy model directories from the model store to this machine, in a thread of an agent.

The thread asks for the manifest of each directory, then for one chunk after another, with ``WINDOW`` requests ahead.
What is lost with a connection is asked for again. A file that was cut goes on where it stopped, also in another agent.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import zmq

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.paths import NotPrivate, check_private, make_private
from protocol.process.sockets import prove_keys
from protocol.process.worker_spec import EngineSpec, LinkKeys
from protocol.values import pack
from supervisor.cluster.messages import (
    CHUNK,
    MAX_ANSWER,
    WINDOW,
    Answer,
    AskManifest,
    Chunk,
    Copying,
    File,
    Listing,
    Manifest,
    Preparing,
    ReadPart,
    Request,
    StoreAccess,
    StoreFailure,
    read_answer,
)

# The copies of model directories on a machine: where they are, who uses them, and which ones make room.
#
# Each copy has a directory of its own, named by its content, so a copy never changes once it is complete:
#
#     NAME-KEY/manifest   its files, sizes and checksums
#     NAME-KEY/use        locked by each agent whose worker uses the copy; changed at each use
#     NAME-KEY/copying    locked by the agent that fetches files
#     NAME-KEY/part/N     a file that is being fetched, the number N of the manifest
#     NAME-KEY/files/     the model's directory. A file gets here when its checksum was found right
#     NAME-KEY/complete   made when all files are there
#
# Locks end with their processes, so agents that were killed leave none. Nobody but the agents' user can enter.


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


AGAIN_S: Final = 5.0
"""Seconds without an answer after which a request is sent again."""
SILENT_S: Final = 120.0
"""Seconds without an answer after which the store counts as gone."""
LOOK_S: Final = 0.5
RATE_S: Final = 3.0
"""Seconds over which the rate is measured."""
CHECKING, COPYING = "checking model", "copying model"


class CopyError(Exception):
    """The directories cannot be copied. The message is one line for people."""


class _StopError(Exception):
    """The agent does not want the copy any more."""


class Fetching(threading.Thread):
    """The copying of the directories of one model.

    access       where the store is, and where copies go
    keys         the keys of the worker
    directories  paths on the supervisor's machine

    When the thread has ended, ``places`` has the directories on this machine, or ``problem`` the reason why not.
    """

    def __init__(
        self, context: "zmq.Context[Any]", access: StoreAccess, keys: LinkKeys, directories: Sequence[str]
    ) -> None:
        super().__init__(daemon=True, name="copying")
        self._access, self._directories, self._context = access, directories, context
        self._keys = replace(keys, server=access.server)
        self._stopped = threading.Event()
        self.places: dict[str, str] = {}
        self.problem = ""
        self._phase, self._done, self._total = CHECKING, 0, 0
        self._before: tuple[float, int] | None = None
        self._rate = 0
        self._link: zmq.Socket[bytes] | None = None
        self._number = 0
        """The number of the next request."""
        self._copies: list[Copy] = []
        """The copies that this process uses. They stay claimed until it ends."""

    def stop(self) -> None:
        """End the thread soon. What was copied stays."""
        self._stopped.set()

    def progress(self, now: float) -> Copying:
        """Return how far the copying is. ``now`` is in monotonic seconds."""
        done = self._done
        if self._before is None or done < self._before[1]:
            self._before, self._rate = (now, done), 0
        elif now - self._before[0] >= RATE_S:
            self._rate = round((done - self._before[1]) / (now - self._before[0]))
            self._before = now, done
        return Copying(self._phase, done, self._total, self._rate)

    def run(self) -> None:
        try:
            self._connect()
            try:
                self._copy()
            finally:
                assert self._link is not None
                self._link.close(linger=0)
        except _StopError:
            self.problem = "it was stopped while the model was copied"
        except (CopyError, NoRoomError, WrongSumError, NotPrivate) as e:
            self.problem = f"model store: {e}"
        except OSError as e:
            self.problem = f"model store: {e.filename or self._access.directory}: {e.strerror or e}"
        except Exception as e:  # whatever it is, the supervisor must learn it
            self.problem = f"model store: {type(e).__name__}: {e}"

    def _connect(self) -> None:
        """Connect to the store, in place of a connection that there may be.

        libzmq does not connect again after a refusal. A store that was just started may not know the key yet.
        """
        if self._link is not None:
            self._link.close(linger=0)
        link = self._link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.SNDHWM, 4 * WINDOW)
        link.setsockopt(zmq.RCVHWM, 4 * WINDOW)
        link.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER)
        link.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        link.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        prove_keys(link, self._access.endpoint, self._keys)
        link.connect(self._access.endpoint)

    def _copy(self) -> None:
        copies = Copies(Path(self._access.directory).expanduser(), self._access.size)
        for directory in self._directories:
            self._copies.append(copies.claim(directory, self._manifest(directory)))
        self._phase, self._done, self._before = COPYING, 0, None
        self._total = sum(copy.manifest.size for copy in self._copies)
        finished = 0
        for directory, copy in zip(self._directories, self._copies, strict=True):
            while not copy.is_complete:
                if copy.begin():
                    self._fetch(directory, copy, finished)
                    copy.finish()
                else:  # another agent copies it
                    self._done = finished + copy.present()
                    self._pause()
            finished += copy.manifest.size
            self._done = finished
            self.places[directory] = str(copy.files)

    def _manifest(self, directory: str) -> Manifest:
        """Return the manifest of a directory, once the store has read its files."""
        while True:
            answer = self._ask(directory)
            if isinstance(answer, Listing):
                return Manifest.read(answer.files)
            if isinstance(answer, StoreFailure):
                raise CopyError(answer.why)
            if isinstance(answer, Preparing):
                self._done, self._total = answer.done, answer.total
                self._pause()

    def _fetch(self, directory: str, copy: Copy, before: int) -> None:
        """Fetch the files of a copy that are missing. ``before``: the bytes of copies that are done."""
        self._done = before + copy.present()
        for file, part in copy.missing():
            for again in (True, False):
                resumed = part.exists()
                digest = self._fetch_file(directory, copy.manifest.key, file, part, before, copy)
                try:
                    copy.accept(file, part, digest)
                    break
                except WrongSumError:
                    if not (resumed and again):  # what was there before may be what is wrong
                        raise

    def _fetch_file(self, directory: str, key: str, file: File, part: Path, before: int, copy: Copy) -> str:
        """Gather the bytes of a file, and return their checksum."""
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        found = digest_of(part)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb") as output:
            at = os.fstat(output.fileno()).st_size
            self._done = before + copy.present()
            while at < file.size:
                at = self._gather(directory, key, file, at, output, found)
        return found.hexdigest()

    def _gather(self, directory: str, key: str, file: File, at: int, output: Any, found: "hashlib._Hash") -> int:
        """Fetch bytes from ``at`` on, until the end of the file or a gap. Return where the bytes end."""
        asked, first = at, self._number
        heard = time.monotonic()
        while at < file.size:
            while asked < file.size and asked - at < WINDOW * CHUNK:
                size = min(CHUNK, file.size - asked)
                self._send(ReadPart(self._next(), directory, key, file.name, asked, size))
                asked += size
            got = self._receive(AGAIN_S, first)
            if time.monotonic() - heard > SILENT_S:
                raise self._silent()
            if got is None:
                self._connect()
                asked, first = at, self._number
                continue
            answer, data = got
            if isinstance(answer, StoreFailure):  # the store was started again, or the directory has changed
                if self._manifest(directory).key != key:
                    raise CopyError(f"{directory} was changed while it was copied")
                asked, first, heard = at, self._number, time.monotonic()
                continue
            if not isinstance(answer, Chunk) or (answer.key, answer.name) != (key, file.name):
                raise CopyError(f"the store answered {type(answer).__name__} to a request for {file.name}")
            if answer.offset != at:  # those between were lost with a connection
                asked, first = at, self._number
                continue
            if len(data) != min(CHUNK, file.size - at):
                raise CopyError(f"the store sent {len(data)} bytes of {file.name} at {at}")
            output.write(data)
            found.update(data)
            at += len(data)
            self._done += len(data)
            heard = time.monotonic()
        return at

    def _ask(self, directory: str) -> Answer:
        """Return the answer to a question for a manifest. Raises CopyError."""
        began, first = time.monotonic(), self._number
        while time.monotonic() - began <= SILENT_S:
            self._send(AskManifest(self._next(), directory))
            if (got := self._receive(AGAIN_S, first)) is not None:
                return got[0]
            self._connect()
        raise self._silent()

    def _silent(self) -> CopyError:
        return CopyError(f"the store at {self._access.endpoint} has not answered for {SILENT_S:g} s")

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _send(self, request: Request) -> None:
        assert self._link is not None
        try:
            self._link.send(pack(request), zmq.NOBLOCK)
        except zmq.Again:
            pass  # it is sent again when no answer comes

    def _receive(self, seconds: float, first: int) -> tuple[Answer, bytes] | None:
        """Return the next answer to a request with the number ``first`` or a later one; None if none comes in time.

        Raises CopyError for an answer that cannot be.
        """
        assert self._link is not None
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._stopped.is_set():
                raise _StopError
            if not self._link.poll(round(1000 * min(LOOK_S, left))):
                continue
            try:
                answer, data = read_answer(self._link.recv_multipart(zmq.NOBLOCK))
            except FrameError as e:
                raise CopyError(str(e)) from None
            if answer.number >= first:  # others were given up
                return answer, data
        return None

    def _pause(self) -> None:
        if self._stopped.wait(LOOK_S):
            raise _StopError


# The directories that an engine reads, on the supervisor's machine and on others. Pure.


def directories_of(engine: EngineSpec) -> list[str]:
    """Return the directories that an engine reads, each once."""
    options = engine.options
    found = [engine.model_dir, *([options["draft_model"]] if options.get("draft_model") else [])]
    return list(dict.fromkeys([*found, *(adapter["dir"] for adapter in options.get("lora") or ())]))


def moved(engine: EngineSpec, places: Mapping[str, str]) -> EngineSpec:
    """Return the specification of an engine with other places of its directories."""
    options = dict(engine.options)
    if options.get("draft_model"):
        options["draft_model"] = places[options["draft_model"]]
    if options.get("lora"):
        options["lora"] = [{**adapter, "dir": places[adapter["dir"]]} for adapter in options["lora"]]
    return replace(engine, model_dir=places[engine.model_dir], options=options)
