"""A supervisor with a TCP port and keys, for tests and benchmarks."""

import dataclasses
import shutil
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import zmq

from modelctl import Client
from protocol.client.transport import ClientKey
from supervisor.keys.records import Limits, parse_rights
from supervisor.keys.store import KeyStore
from tests.raw_client import RawClient
from tests.serving import WITHIN, Serving


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def stranger(key: ClientKey) -> ClientKey:
    """Return a key pair that the supervisor does not know."""
    public, secret = new_pair()
    return dataclasses.replace(key, name="unknown", public_key=public, secret_key=secret)


def stolen(key: ClientKey) -> ClientKey:
    """Return a known public key with the secret key of another pair."""
    return dataclasses.replace(key, name="stolen", secret_key=new_pair()[1])


def misled(key: ClientKey) -> ClientKey:
    """Return the key pair with the public key of another supervisor."""
    return dataclasses.replace(key, name="misled", server_key=new_pair()[0])


class Keyed:
    """A ``Serving`` with a TCP port. ``keys``: name → rights. A context manager."""

    def __init__(self, models: dict[str, dict[str, Any]], keys: dict[str, str], **serving: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mctl-keys-", dir="/tmp"))
        self.store = KeyStore(self.directory / "keys")
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.keys: dict[str, ClientKey] = {}
        for name, rights in keys.items():
            self.new(name, rights)
        self.serving = Serving(models, listen=self.endpoint, keys=self.store.directory, **serving)

    def new(self, name: str, rights: str = "infer", **limits: Unpack[Limits]) -> ClientKey:
        key = self.store.add(name, parse_rights(rights), self.file(name), **limits)
        self.keys[name] = key
        return key

    def new_http(self, name: str, rights: str = "infer", **limits: Unpack[Limits]) -> str:
        """Add an HTTP key. Return its token."""
        return self.store.add_token(name, parse_rights(rights), **limits)

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def client(self, key: str | ClientKey | None, **options: Any) -> Client:
        chosen = self.keys[key] if isinstance(key, str) else key
        return Client(self.endpoint, key=chosen, **{"timeout": WITHIN, **options})

    def raw(self, key: str | ClientKey | None) -> RawClient:
        return RawClient(self.endpoint, key=self.keys[key] if isinstance(key, str) else key)

    def tcp(self) -> dict[str, Any]:
        """Return the TCP section of the reply to ``status``."""
        reported: dict[str, Any] = self.serving.overview()["supervisor"]["tcp"]
        return reported

    def connections(self) -> int:
        """Return the number of connections over TCP, of all keys together."""
        return sum(key["connections"] for key in self.tcp()["keys"])

    def __enter__(self) -> Self:
        try:
            self.serving.__enter__()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: BaseException | TracebackType | None) -> None:
        try:
            self.serving.__exit__(kind, *more)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
