"""The directory of keys: ``server.json`` (the supervisor's own pair) and ``clients.json`` (the allow-list).

The directory holds no secret keys of clients. A new file is written completely beside the old one and then renamed, so
every reader sees either the old or the new content.
"""

import base64
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from protocol.client.transport import ClientKey, is_key, read_private
from protocol.process.paths import NotPrivate, check_place, check_private, make_private
from protocol.verbs import Right
from supervisor.keys.records import (
    MAX_KEYS,
    KeysProblem,
    Limits,
    check_http_rights,
    check_name,
    entry_of,
    format_clients,
    format_time,
    parse_clients,
)
from supervisor.keys.rights import Identity

SERVER, CLIENTS = "server.json", "clients.json"
MAX_LIST = 8 << 20
MOST_NAMED = 20
"""The most keys that one line of the log, or one error, names."""
ENVIRONMENT_VARIABLE = "MODELCTL_KEYS"
Check = Callable[[Mapping[str, Identity], Identity | None, Identity | None], None]
"""Raises an error if a change of the list is not allowed. Its arguments are the list by the keys' ids, the key as it is
(None: it is new), and the key as it would be (None: it is revoked). It is called while nobody else changes the list."""
TOKEN_PREFIX = "mctl_"
"""Programs that search files for secrets find a token by this prefix."""
_LEAST_TOKEN, _MOST_TOKEN = 20, 256
_TOKEN = re.compile(rf"[!-~]{{{_LEAST_TOKEN},{_MOST_TOKEN}}}")


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
        self._known: dict[str, Identity] = {}
        """The entries of the list as it was read last, see ``parse_clients``."""

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
        """Return the identity of each key on the list, by the key's id."""
        self._check_directory()
        path = self.directory / CLIENTS
        text = _read(path)
        try:
            return parse_clients(text, self._known)
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

    def add(self, name: str, rights: frozenset[Right], out: Path, **limits: Unpack[Limits]) -> ClientKey:
        """Make a key, write it to ``out`` with mode 0600, and put it on the list. The file ``out`` must not exist."""
        with self._locked():
            entries = self._entries_without(name)
            public, _ = self._server_pair_made()
            # these files may not exist yet
            if out.absolute() in (self.directory / CLIENTS, self.directory / SERVER):
                raise KeysProblem(f"{out} is the supervisor's own file; give another --out")
            own_public, own_secret = _new_pair()
            key = ClientKey(name, public, own_public, own_secret)
            text = _with(entries, Identity(name, own_public, rights, **limits))
            _write_new(out, key.to_json())
            try:
                _replace(self.directory / CLIENTS, text)
            except BaseException:
                out.unlink(missing_ok=True)  # the key was not admitted
                raise
        return key

    def add_token(
        self,
        name: str,
        rights: frozenset[Right],
        *,
        given: str | None = None,
        check: Check | None = None,
        **limits: Unpack[Limits],
    ) -> str:
        """Put the SHA-256 of a token for an HTTP client on the list, and return the token. It is kept nowhere.

        given  the token, see ``read_token``; None makes one
        """
        check_http_rights(rights)
        with self._locked():
            entries = self._entries_without(name)
            token = given or TOKEN_PREFIX + base64.urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
            if any(entry.get("token_sha256") == token_id(token) for entry in entries):
                raise KeysProblem("the token belongs to another key of the list: give another one")
            identity = Identity(name, token_id(token), rights, **limits)
            if check is not None:
                check(self.clients(), None, identity)
            _replace(self.directory / CLIENTS, _with(entries, identity))
        return token

    def change(self, name: str, changes: Mapping[str, Any], check: Check | None = None) -> dict[str, Any]:
        """Change rights and limits of a key, and return its new entry.

        changes  fields of ``Identity``; None takes a limit away
        """
        with self._entries_with(name) as entries:
            number = next(number for number, entry in enumerate(entries) if entry["name"] == name)
            listed = self.clients()
            before = next(found for found in listed.values() if found.name == name)
            identity = replace(before, **changes)
            if identity.is_http:
                check_http_rights(identity.rights)
            if check is not None:
                check(listed, before, identity)
            entries[number] = entry_of(identity, entries[number]["created"])
            _replace(self.directory / CLIENTS, _checked(entries))
            return entries[number]

    def revoke(self, name: str, check: Check | None = None) -> None:
        with self._entries_with(name) as entries:
            if check is not None:
                listed = self.clients()
                check(listed, next(found for found in listed.values() if found.name == name), None)
            left = [entry for entry in entries if entry["name"] != name]
            _replace(self.directory / CLIENTS, format_clients(left))

    # --- steps --------------------------------------------------------------------------------------------------

    @contextmanager
    def _entries_with(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """Return the entries, with the directory locked. Raises KeysProblem if no key of this name is among them."""
        check_name(name)
        if not self.directory.is_dir():
            raise KeysProblem(f"there is no key {name!r}: {self.directory} does not exist", "name")
        with self._locked():
            entries = self.entries()
            if not any(entry["name"] == name for entry in entries):
                known = ", ".join(entry["name"] for entry in entries[:MOST_NAMED]) or "none"
                known += f" and {more} more" if (more := len(entries) - MOST_NAMED) > 0 else ""
                raise KeysProblem(f"there is no key {name!r} in {self.directory}: there is {known}", "name")
            yield entries

    def _entries_without(self, name: str) -> list[dict[str, Any]]:
        """Return the entries. Raises KeysProblem if a key of this name is among them, or if the list is full."""
        check_name(name)
        entries = self.entries()
        if any(entry["name"] == name for entry in entries):
            raise KeysProblem(f"there is a key {name!r} already; revoke it first, or choose another name", "name")
        if len(entries) >= MAX_KEYS:
            raise KeysProblem(f"the list in {self.directory} has {MAX_KEYS} keys, the most it may have; revoke some")
        return entries

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


def token_id(token: str) -> str:
    """Return the id of an HTTP key: the SHA-256 of its token, in hex."""
    import hashlib  # here, because it loads OpenSSL, which takes 3.5 MB of the supervisor's memory

    return hashlib.sha256(token.encode()).hexdigest()


def read_token(path: Path) -> str:
    """Return the token in a file, which is the user's own with mode 0600. Raises KeysProblem.

    A token has 20 to 256 printable characters of ASCII, without spaces: what a header can hold, and nobody guesses.
    """
    try:
        text = read_private(path, limit=_MOST_TOKEN + 2).removesuffix("\n").removesuffix("\r")
    except ValueError as e:
        raise KeysProblem(f"{e}: the token's file must be your own, with mode 0600") from None
    if not _TOKEN.fullmatch(text):
        rule = f"a token has {_LEAST_TOKEN} to {_MOST_TOKEN} printable characters of ASCII without spaces"
        raise KeysProblem(f"{path} holds no token: {rule}, and this has {len(text)} characters")
    return text


def _with(entries: list[dict[str, Any]], identity: Identity) -> str:
    """Return the text of the list with one key more. Raises KeysProblem as ``_checked`` does."""
    return _checked([*entries, entry_of(identity, format_time(time.time()))])


def _checked(entries: list[dict[str, Any]]) -> str:
    """Return the text of a list. Raises KeysProblem if the supervisor would not read this text."""
    text = format_clients(entries)
    if len(text) > MAX_LIST:
        raise KeysProblem(f"the list of keys would have {len(text)} bytes, and may have {MAX_LIST}; revoke some keys")
    return text


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


# Decide whether the TCP port in models.yaml may be opened. The error for an unsafe port says what to do.


_TRY = "make one with `modelctl keys new NAME`, or remove supervisor.listen"


@dataclass(frozen=True, slots=True)
class Opening:
    """A port that may be opened."""

    endpoint: str
    secret_key: str = field(repr=False)


def check_opening(endpoint: str, directory: Path) -> Opening:
    """Return the port with its keys. Raises KeysProblem if there are no keys, or they cannot be used."""
    store = KeyStore(directory)
    if not directory.exists():
        raise KeysProblem(f"listens on {endpoint}, and there are no keys in {directory}: {_TRY}")
    _, secret = store.server_pair()
    if all(identity.is_http for identity in store.clients().values()):
        raise KeysProblem(f"listens on {endpoint}, and no key is on the list in {directory}: {_TRY}")
    return Opening(endpoint, secret)
