"""The directory of keys: ``server.json`` (the supervisor's own pair) and ``clients.json`` (the allow-list).

The directory holds no secret keys of clients. A new file is written completely beside the old one and then renamed, so
every reader sees either the old or the new content.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.client.client_key import ClientKey, is_key, read_private
from protocol.process.private_paths import NotPrivate, check_place, check_private, make_private
from supervisor.keys.records import KeysProblem, check_name, entry_of, format_clients, parse_clients
from supervisor.keys.rights import Identity, Right

SERVER, CLIENTS = "server.json", "clients.json"
MAX_LIST = 8 << 20
ENVIRONMENT_VARIABLE = "MODELCTL_KEYS"


def default_keys_dir() -> Path:
    """Return ``$MODELCTL_KEYS``, else ``$XDG_CONFIG_HOME/modelctl/keys``, else ``~/.config/modelctl/keys``.

    Raises KeysProblem for a user without a home directory.
    """
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen).absolute()
    if chosen := os.environ.get("XDG_CONFIG_HOME"):
        return Path(chosen).absolute() / "modelctl" / "keys"
    try:
        return Path.home() / ".config" / "modelctl" / "keys"
    except RuntimeError:  # in some containers $HOME is not set and the uid is not in passwd
        raise KeysProblem(f"there is no home directory for keys: set ${ENVIRONMENT_VARIABLE}") from None


class KeyStore:
    """The keys in one directory.

    Methods that read or write the files raise KeysProblem, with a remedy, if the files cannot or must not be used.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    # --- what the supervisor reads ------------------------------------------------------------------------------

    def server_pair(self) -> tuple[str, str]:
        """Return the public and the secret key of the supervisor, in Z85."""
        self._check_directory()
        path = self.directory / SERVER
        text = _read(path)
        try:
            content = json.loads(text)
            pair = content["public_key"], content["secret_key"]
        except (ValueError, KeyError, TypeError, RecursionError):
            pair = "", ""
        if not all(map(is_key, pair)) or _public_of(pair[1]) != pair[0]:
            raise KeysProblem(f"{path} is no key pair; remove it, and give every client a new key")
        return pair

    def clients(self) -> dict[str, Identity]:
        """Return the identity of each public key on the list."""
        self._check_directory()
        path = self.directory / CLIENTS
        text = _read(path)
        try:
            return parse_clients(text)
        except KeysProblem as e:
            raise KeysProblem(f"{path}: {e}") from None

    def stamp(self) -> tuple[int, ...]:
        """Return a value that changes whenever the list may have changed, or may have become unsafe to use."""
        try:
            directory, file = os.stat(self.directory), os.stat(self.directory / CLIENTS)
        except OSError as e:
            return (e.errno or 0,)
        own = (file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        return (*own, directory.st_ino, directory.st_mode, directory.st_uid)

    # --- what `modelctl keys` does ------------------------------------------------------------------------------

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of ``clients.json``; an empty list if the file does not exist yet."""
        if not (self.directory / CLIENTS).exists():
            return []
        self.clients()
        entries: list[dict[str, Any]] = json.loads(_read(self.directory / CLIENTS))["clients"]
        return entries

    def add(
        self,
        name: str,
        rights: frozenset[Right],
        out: Path,
        *,
        max_in_flight: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> ClientKey:
        """Make a key, write it to ``out`` with mode 0600, and put it on the list. The file ``out`` must not exist."""
        check_name(name)
        with self._locked():
            public, _ = self._server_pair_made()
            entries = self.entries()
            if any(entry["name"] == name for entry in entries):
                raise KeysProblem(f"there is a key {name!r} already; revoke it first, or choose another name")
            # these files may not exist yet
            if out.absolute() in (self.directory / CLIENTS, self.directory / SERVER):
                raise KeysProblem(f"{out} is the supervisor's own file; give another --out")
            own_public, own_secret = _new_pair()
            key = ClientKey(name, public, own_public, own_secret)
            identity = Identity(name, own_public, rights, max_in_flight, tokens_per_minute)
            entries.append(entry_of(identity, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())))
            _write_new(out, key.to_json())
            try:
                _replace(self.directory / CLIENTS, format_clients(entries))
            except BaseException:
                out.unlink(missing_ok=True)  # the key was not admitted
                raise
        return key

    def revoke(self, name: str) -> None:
        check_name(name)
        if not self.directory.is_dir():
            raise KeysProblem(f"there is no key {name!r}: {self.directory} does not exist")
        with self._locked():
            entries = self.entries()
            left = [entry for entry in entries if entry["name"] != name]
            if len(left) == len(entries):
                known = ", ".join(entry["name"] for entry in entries) or "none"
                raise KeysProblem(f"there is no key {name!r} in {self.directory}: there is {known}")
            _replace(self.directory / CLIENTS, format_clients(left))

    # --- steps --------------------------------------------------------------------------------------------------

    def _server_pair_made(self) -> tuple[str, str]:
        if not (self.directory / SERVER).exists():
            public, secret = _new_pair()
            _replace(self.directory / SERVER, json.dumps({"public_key": public, "secret_key": secret}) + "\n")
        return self.server_pair()

    def _check_directory(self) -> None:
        directory = self.directory
        try:
            status = os.stat(directory)
        except OSError as e:
            raise KeysProblem(
                f"the keys' directory {directory}: {e.strerror}; make it with `modelctl keys new`"
            ) from None
        if not stat.S_ISDIR(status.st_mode):
            raise KeysProblem(f"the keys' directory {directory} is no directory; move that file away")
        try:
            check_private(directory, status)
            check_place(directory)
        except (NotPrivate, OSError) as e:
            raise KeysProblem(f"the keys' directory {e}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory, so that only one command at a time reads, changes and writes."""
        try:
            make_private(self.directory)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise KeysProblem(f"the keys' directory {self.directory}: {e.strerror}") from None
        try:
            self._check_directory()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _new_pair() -> tuple[str, str]:
    import zmq  # here, so that `keys list` does not import it

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _public_of(secret: str) -> str:
    import zmq

    return zmq.curve_public(secret.encode()).decode()


def _read(path: Path) -> str:
    try:
        return read_private(path, limit=MAX_LIST)
    except ValueError as e:
        message = "" if os.path.lexists(path) else "; put it back, or make a key with `modelctl keys new NAME`"
        raise KeysProblem(f"{e}{message}") from None


def _write_new(path: Path, text: str) -> None:
    """Write a new file. Raises KeysProblem if the file exists already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise KeysProblem(f"{path} exists, and keys are not written over; give another --out") from None
    except OSError as e:
        raise KeysProblem(f"cannot write {path}: {e.strerror}; give another --out") from None
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as e:
        path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise KeysProblem(f"cannot write {path}: {e.strerror}") from None
        raise


def _replace(path: Path, text: str) -> None:
    """Replace a file completely or not at all. A crash of the machine afterwards does not lose the new content."""
    beside = path.with_name(f".{path.name}.new")  # if it exists, a killed command left it: the directory is locked
    beside.unlink(missing_ok=True)
    _write_new(beside, text)
    try:
        os.replace(beside, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as e:
        beside.unlink(missing_ok=True)
        raise KeysProblem(f"cannot write {path}: {e.strerror}") from None
