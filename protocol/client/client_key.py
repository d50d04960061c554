"""The key with which a client connects over TCP: a file of mode 0600 that `modelctl keys new` writes.

The file is a JSON object of strings, so that a client in any language can read it. ``name`` is the name of the key.
``server_key`` is the supervisor's public key: the supervisor proves that it owns that key. ``public_key`` and
``secret_key`` are the client's pair. They are keys of CURVE (32 bytes) in Z85 (ZeroMQ RFC 32): 40 characters each. This
module does not import zmq.
"""

import json
import os
import re
import stat
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Final

from protocol.process.private_paths import check_private

KEY_NAME: Final = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
FIELDS: Final = ("name", "server_key", "public_key", "secret_key")
MAX_FILE: Final = 4096
"""Most bytes of a key file. A real one has some 300."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A client's key pair and the supervisor's public key, in Z85. The ``repr`` of a key holds no secret."""

    name: str
    server_key: str
    public_key: str
    secret_key: str = field(repr=False)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ClientKey":
        """Return the key in a file. Raises ValueError with the file, what is wrong with it, and the remedy."""
        return parse_client_key(read_private(Path(path)), f"the key file {os.fspath(path)}")

    def to_json(self) -> str:
        """Return the text of a key file. It holds the secret key."""
        return json.dumps({name: getattr(self, name) for name in FIELDS}, indent=2) + "\n"


def is_key(text: object) -> bool:
    """Return whether a text is 32 bytes in Z85. Five digits can exceed four bytes: libzmq refuses such a text."""
    if not isinstance(text, str) or len(text) != 40:
        return False
    places = [_DIGITS.find(digit) for digit in text]
    values = (reduce(lambda value, place: value * 85 + place, places[i : i + 5], 0) for i in range(0, 40, 5))
    return min(places) >= 0 and max(values) < 1 << 32


def parse_client_key(text: str, shown: str) -> ClientKey:
    """Return the key in a text. Raises ValueError, and never quotes the text, because it may be a secret."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown} is not JSON; get a new one with `modelctl keys new`") from None
    if not isinstance(given, dict) or not all(isinstance(given.get(name), str) for name in FIELDS):
        message = f"{shown} must be an object with the strings {', '.join(FIELDS)}; get one with `modelctl keys new`"
        raise ValueError(message)
    if not KEY_NAME.fullmatch(given["name"]):  # it is shown on terminals
        raise ValueError(f"{shown}: name is no name of a key; get one with `modelctl keys new`")
    for name in FIELDS[1:]:
        if not is_key(given[name]):
            raise ValueError(f"{shown}: {name} is no key: 40 characters of Z85; get one with `modelctl keys new`")
    return ClientKey(**{name: given[name] for name in FIELDS})


def read_private(path: Path, *, limit: int = MAX_FILE) -> str:
    """Return the text of a file that only the user (or root) can read or write. Raises ValueError with the remedy."""
    try:
        # Check the open file and not its name, which may mean another file by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file; give a key file")
            check_private(path, status)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(limit + 1)
        finally:
            os.close(descriptor)
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    if len(content) > limit:
        raise ValueError(f"{path} is longer than {limit} bytes; it is no key file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; it is no key file") from None
