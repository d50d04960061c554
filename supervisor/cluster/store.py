"""The model store: a process beside the supervisor that sends the directories of models to agents on other machines.

It listens on a TCP port of its own with CURVE. The supervisor tells it which keys may connect, and which directories
each of them may read. A process of its own reads disks, hashes and sends, so that none of that holds up tokens.

The supervisor talks to it through a ``helper_link``. The store ends with the supervisor.
"""

import hashlib
import logging
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

from protocol.codec import pack_body, unpack_body
from protocol.errors import FrameError
from protocol.process.birth import helper_environment
from protocol.process.helper_link import HelperLink, become_helper
from protocol.process.helper_process import HelperProcess
from protocol.values import pack
from supervisor.cluster.messages import (
    DEEPEST,
    MAX_REQUEST,
    MOST_FILES,
    NAME,
    REQUESTS,
    WINDOW,
    Answer,
    AskManifest,
    Chunk,
    File,
    Listing,
    Manifest,
    Preparing,
    ReadPart,
    StoreAccess,
    StoreFailure,
)
from supervisor.helper import Helper, HelperWatch
from supervisor.logs.events import EventKind, noted
from supervisor.ports.sockets import Restarts, admit_keys_only
from supervisor.ports.zap import REMOTE_DOMAIN, ZapHandler

# The directories that a model store sends, with the checksums of their files.


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


BUSY: Final = 64
"""Requests that are answered before the supervisor's orders are read again."""


class StoreServer:
    """The port, and what each key may read.

    link      the connection to the supervisor
    endpoint  tcp://IP:PORT to listen on
    secret    the port's secret key, as Z85 text

    Raises zmq.ZMQError if the port cannot be bound.
    """

    def __init__(self, link: HelperLink, endpoint: str, secret: str) -> None:
        self._link = link
        self._may: dict[str, frozenset[str]] = {}
        """The directories that each key may read."""
        self._catalogue = Catalogue()
        context = zmq.Context()
        self._zap = ZapHandler(context, os.getuid(), worker_keys=self._may)
        self._router = router = context.socket(zmq.ROUTER)
        admit_keys_only(router, endpoint, secret.encode(), REMOTE_DOMAIN)
        router.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an agent that does not read gets nothing, instead of all memory
        router.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        router.setsockopt(zmq.RCVHWM, BUSY)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)

    def run(self) -> None:
        """Serve until the supervisor ends the connection."""
        poller = zmq.Poller()
        for source in (self._link.descriptor, self._zap.socket, self._router):
            poller.register(source, zmq.POLLIN)
        while True:
            poller.poll()
            try:
                self._take_orders()
            except EOFError:
                return
            self._zap.handle()
            for _ in range(BUSY):
                if not self._serve():
                    break

    def _take_orders(self) -> None:
        """Do what the supervisor has ordered. Raises EOFError if it is gone."""
        while (record := self._link.receive()) is not None:
            order = unpack_body(record)
            if "admit" in order:
                self._may[order["admit"]] = frozenset(order["directories"])
            else:
                self._may.pop(order["revoke"], None)

    def _serve(self) -> bool:
        """Answer one request. Return false if there is none."""
        try:
            parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            key = str(parts[-1].get("User-Id"))
            request = REQUESTS.read(parts[1].bytes) if len(parts) == 2 else None
        except (FrameError, zmq.ZMQError):
            return True
        if request is None or request.directory not in self._may.get(key, ()):
            return True  # a key that was revoked, or a directory that is not for it
        try:
            answer, data = self._answer(request)
        except StoreProblem as e:
            answer, data = StoreFailure(request.number, str(e)), None
        frames: list[Any] = [parts[0].bytes, pack(answer), *([] if data is None else [data])]
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # the agent is gone, or does not read; one that lives asks again
        return True

    def _answer(self, request: AskManifest | ReadPart) -> tuple[Answer, bytes | None]:
        if isinstance(request, AskManifest):
            found = self._catalogue.find(request.directory)
            if isinstance(found, Listed):
                return Listing(request.number, found.manifest.packed()), None
            return Preparing(request.number, *found), None
        listed = self._catalogue.known(request.directory)
        if listed is None or listed.manifest.key != request.key:
            raise StoreProblem(f"{request.directory} has changed, or the model store was started again: ask anew")
        if (mark := listed.marks.get(request.name)) is None:
            raise StoreProblem(f"{request.directory} has no file {request.name[:80]!r}")
        file = open_as(Path(request.directory) / request.name, mark)
        try:
            data = os.pread(file, request.size, request.offset)
        except OSError as e:
            raise StoreProblem(f"{request.directory}/{request.name}: {e.strerror}") from None
        finally:
            os.close(file)
        return Chunk(request.number, request.key, request.name, request.offset), data


def main() -> None:
    """Serve the supervisor at standard input. Its first packet says where to listen."""
    link = become_helper("model store")
    first = unpack_body(link.receive(None) or b"")
    try:
        server = StoreServer(link, first["listen"], first["secret"])
    except zmq.ZMQError as e:
        why = os.strerror(e.errno or 0)
        link.send(pack_body({"trouble": f"cannot listen on {first['listen']} (cluster.model_store.listen): {why}"}))
        return
    link.send(pack_body({"trouble": ""}))
    server.run()


if __name__ == "__main__":
    main()


# The supervisor's end of the model store: starts its process, and tells it which keys may read which directories.


_COMMAND: Final = (sys.executable, "-P", "-m", "supervisor.cluster.store")
AGAIN_S: Final = 2.0
"""Seconds between two starts of the store."""


class ModelStore:
    """The store's process. Raises OSError if it cannot be started.

    endpoint   tcp://IP:PORT where it listens
    directory  where machines keep copies
    size       the most bytes of all copies on a machine
    trouble    why nothing can be copied, for people; "" if it can
    """

    def __init__(self, endpoint: str, directory: str, size: int, log: logging.Logger) -> None:
        public, secret = zmq.curve_keypair()  # one for all its processes, so that agents find the next one
        self.access = StoreAccess(endpoint, public.decode(), directory, size)
        self._secret, self._log = secret.decode(), log
        self._may: dict[str, Sequence[str]] = {}
        self.trouble = ""
        self._watch = HelperWatch()
        self._helper = Helper(self._watch, self._start, self._take, self._ended, Restarts(AGAIN_S, AGAIN_S))
        self._helper.check(time.monotonic())

    def _start(self) -> HelperProcess:
        process = HelperProcess(_COMMAND, helper_environment())
        process.send(pack_body({"listen": self.access.endpoint, "secret": self._secret}))
        for key in self._may:
            process.send(self._admission(key))
        return process

    def admit(self, key: str, directories: Sequence[str]) -> None:
        """Let a key read these directories."""
        self._may[key] = directories
        self._helper.send(self._admission(key))

    def revoke(self, key: str) -> None:
        """Let a key read nothing any more."""
        if self._may.pop(key, None) is not None:
            self._helper.send(pack_body({"revoke": key}))

    def _admission(self, key: str) -> bytes:
        return pack_body({"admit": key, "directories": list(self._may[key])})

    def check(self, now: float) -> None:
        """Start the store again if it has ended. Call this several times a second. ``now`` is in monotonic seconds."""
        self._watch.hear()
        try:
            self._helper.check(now)
        except OSError as e:
            self.trouble = f"its process cannot be started: {e.strerror or e}"

    def _take(self, record: bytes) -> None:
        with suppress(FrameError, KeyError):
            trouble = str(unpack_body(record)["trouble"])
            if trouble and trouble != self.trouble:
                self._log.error("model store: %s", trouble, extra=noted(EventKind.CLUSTER))
            self.trouble = trouble

    def _ended(self, process: HelperProcess) -> None:
        if not self.trouble:
            message = f"its process has ended ({process.code}); another one is started"
            self._log.warning("model store: %s", message, extra=noted(EventKind.CLUSTER))

    def close(self) -> None:
        """End the store."""
        self._helper.end()
