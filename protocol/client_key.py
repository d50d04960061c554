"""The key with which a client connects over TCP: a file of mode 0600 that `modelctl keys new` writes. Needs no zmq.

The file is JSON, all values strings, so that a client in any language can read it: ``name``; ``server_key``, the public
key that the supervisor proves to be its own; ``public_key`` and ``secret_key``, the client's. Keys are CURVE's (32
bytes) in Z85 (ZeroMQ RFC 32): 40 characters.
"""

import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

Z85_KEY: Final = re.compile(r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")
FIELDS: Final = ("name", "server_key", "public_key", "secret_key")
MAX_FILE: Final = 4096
"""Bytes of a key file; a real one has some 300."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A key pair and the supervisor's public key, Z85. Its ``repr`` holds no secret."""

    name: str
    server_key: str
    public_key: str
    secret_key: str = field(repr=False)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ClientKey":
        """The key in a file. Raises ValueError naming the file, what is wrong with it, and the remedy."""
        return parse_client_key(read_private(Path(path)), f"the key file {os.fspath(path)}")

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in FIELDS}, indent=2) + "\n"


def parse_client_key(text: str, shown: str) -> ClientKey:
    """Raises ValueError. No message holds a part of the text: it may be a secret."""
    try:
        given = json.loads(text)
    except ValueError:
        raise ValueError(f"{shown} is not JSON; get a new one with `modelctl keys new`") from None
    if not isinstance(given, dict) or not all(isinstance(given.get(name), str) for name in FIELDS):
        told = f"{shown} must be an object with the strings {', '.join(FIELDS)}; get one with `modelctl keys new`"
        raise ValueError(told)
    for name in FIELDS[1:]:
        if not Z85_KEY.fullmatch(given[name]):
            raise ValueError(f"{shown}: {name} is no key: 40 characters of Z85; get one with `modelctl keys new`")
    return ClientKey(**{name: given[name] for name in FIELDS})


def read_private(path: Path, *, limit: int = MAX_FILE) -> str:
    """The text of a file that nobody but our user (or root) can read or write. Raises ValueError saying what to do."""
    try:
        # what is checked is what is read: the name may come to mean another file meanwhile
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file; give a key file")
        if status.st_uid not in (os.getuid(), 0):
            raise ValueError(f"{path} belongs to uid {status.st_uid}, not to you; copy it, or run as its owner")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"{path} has mode {mode:04o}, so others can reach its keys; run `chmod 600 {path}`")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is longer than {limit} bytes; it is no key file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; it is no key file") from None
