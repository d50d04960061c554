"""What a model store and the agents that copy from it tell each other.

An agent sends one frame, a msgpack map, and gets one answer with the same ``number``: a map, and behind a ``Chunk`` a
second frame with the bytes. Neither side trusts the other: every value is checked, and a name becomes part of a path
only if it matches ``NAME``.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

from protocol import values
from protocol.records import Kinds
from protocol.values import Unfit, Within, reader

CHUNK: Final = 2 << 20
"""The most bytes of a file in one answer."""
WINDOW: Final = 4
"""Chunks that an agent may have asked for and not received yet."""
MAX_REQUEST: Final = 16 << 10
MAX_ANSWER: Final = 4 << 20
MOST_FILES: Final = 2000
"""Files of one directory, its subdirectories included."""
DEEPEST: Final = 4
"""Parts of a file's name: subdirectories, and the file."""
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}", re.ASCII)
"""A part of a file's name. It cannot be hidden, and cannot lead to another directory."""
_SUM: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
MOST_BYTES: Final = 1 << 50
Bytes = Annotated[int, Within(0, MOST_BYTES)]


def is_safe(name: str) -> bool:
    """Return whether a file's name may become part of a path."""
    parts = name.split("/")
    return len(parts) <= DEEPEST and all(NAME.fullmatch(part) for part in parts)


@dataclass(frozen=True)
class File:
    """A file of a directory that is copied.

    name    its path in the directory, with "/" between the parts
    size    bytes
    sha256  checksum, in hex
    """

    name: str
    size: int
    sha256: str


def _file(entry: Any) -> File:
    """Return the file of an entry [name, size, sum] of a manifest. Raises ValueError for what cannot be."""
    match entry:
        case [str(name), _, str(_)] if not is_safe(name):
            raise ValueError(f"a file with the name {name[:80]!r}")
        case [str(name), size, str(sha256)] if _SUM.fullmatch(sha256):
            return File(name, reader(Bytes)(size, False), sha256)
    raise ValueError("must be the name, the size and the checksum of a file")


_FILES = list[Annotated[Any, values.ReadWith(_file)]]


@dataclass(frozen=True)
class Manifest:
    """All files of a directory, in the order of their names."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """A text of 32 characters that only a directory with the same content has."""
        lines = "".join(f"{file.sha256} {file.size} {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()[:32]

    def packed(self) -> list[list[Any]]:
        """Return the manifest as a list for a message."""
        return [[file.name, file.size, file.sha256] for file in self.files]

    @staticmethod
    def read(listed: Any) -> "Manifest":
        """Return the manifest that ``packed`` has made. Raises FrameError for names that are not safe, and for all else
        that cannot be."""
        try:
            files: list[File] = reader(_FILES)(listed, False)
        except Unfit as e:
            raise _ANSWERS.wrong(f"a manifest: {e}") from None
        names = [file.name for file in files]
        if not files or len(files) > MOST_FILES or names != sorted(set(names)):
            raise _ANSWERS.wrong(f"a manifest of {len(files)} files, or with names that are not in order")
        above = {name[:at] for name in names for at in range(len(name)) if name[at] == "/"}
        if above & set(names):
            raise _ANSWERS.wrong("a manifest in which a name is a file and a directory")
        return Manifest(tuple(files))


@dataclass(frozen=True)
class AskManifest:
    """Ask for the manifest of a directory."""

    number: int
    directory: str


@dataclass(frozen=True)
class ReadPart:
    """Ask for bytes of a file of the manifest ``key``."""

    number: int
    directory: str
    key: str
    name: str
    offset: Bytes
    size: Annotated[int, Within(1, CHUNK)]


@dataclass(frozen=True)
class Preparing:
    """The manifest is not ready: so many bytes of the directory were read for its checksums."""

    number: int
    done: int
    total: int


@dataclass(frozen=True)
class Listing:
    """The manifest, packed."""

    number: int
    files: list[Any]


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file, in the frame behind this one."""

    number: int
    key: str
    name: str
    offset: int


@dataclass(frozen=True)
class StoreFailure:
    """A request cannot be fulfilled. ``why`` is one line for people."""

    number: int
    why: str


Request = AskManifest | ReadPart
Answer = Preparing | Listing | Chunk | StoreFailure
REQUESTS: Final = Kinds[Request]("a model store and an agent", *get_args(Request))
_ANSWERS: Final = Kinds[Answer]("a model store and an agent", *get_args(Answer))


def read_answer(frames: Sequence[bytes]) -> tuple[Answer, bytes]:
    """Return the message in an answer of a store, and the bytes of a chunk. Raises FrameError."""
    message = _ANSWERS.read(frames[0])
    if len(frames) != 1 + isinstance(message, Chunk):
        raise _ANSWERS.wrong(f"an answer of {len(frames)} frames")
    return message, frames[1] if isinstance(message, Chunk) else b""
