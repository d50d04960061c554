"""Copy model directories from the model store to this machine, in a thread of an agent.

The thread asks for the manifest of each directory, then for one chunk after another, with ``WINDOW`` requests ahead.
What is lost with a connection is asked for again. A file that was cut goes on where it stopped, also in another agent.
"""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import zmq

from protocol.errors import FrameError
from protocol.process.private_paths import NotPrivate
from protocol.process.silent_links import prove_keys
from protocol.process.worker_spec import LinkKeys
from supervisor.cluster.agent_messages import Copying, StoreAccess
from supervisor.cluster.store_copies import Copies, Copy, NoRoomError, WrongSumError, digest_of
from supervisor.cluster.store_messages import (
    CHUNK,
    MAX_ANSWER,
    WINDOW,
    Answer,
    Ask,
    Chunk,
    File,
    Listing,
    Manifest,
    Preparing,
    Problem,
    Read,
    Request,
    pack,
    read_answer,
)

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
            if isinstance(answer, Problem):
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
                self._send(Read(self._next(), directory, key, file.name, asked, size))
                asked += size
            got = self._receive(AGAIN_S, first)
            if time.monotonic() - heard > SILENT_S:
                raise self._silent()
            if got is None:
                self._connect()
                asked, first = at, self._number
                continue
            answer, data = got
            if isinstance(answer, Problem):  # the store was started again, or the directory has changed
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
            self._send(Ask(self._next(), directory))
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
