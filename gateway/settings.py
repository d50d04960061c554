"""What a gateway process is told at its start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one gateway process.

    runtime_dir    directory of the supervisor's sockets; None with ``connect``
    connect        TCP endpoint of a supervisor on another machine; None with ``runtime_dir``
    key_file       the key for ``connect``. It needs the right ``gateway``
    host, port     address that the gateway listens on
    auth           "keys": every request needs a token (``modelctl keys new NAME --http``). "none": no request needs
                   one, on loopback only
    allowed_hosts  names that a request's Host header may have, besides localhost and the address itself
    cors_origins   origins whose pages may use the API from a browser
    certificate    PEM file of the certificate chain; None for HTTP without TLS
    private_key    PEM file of its private key
    max_body       most bytes of a request's body
    keepalive      what keeps a silent stream open: an SSE "comment", an empty "chunk", or "off"
    keepalive_s    seconds of silence after which that is sent
    """

    runtime_dir: Path | None = None
    connect: str | None = None
    key_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    auth: Literal["keys", "none"] = "keys"
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    certificate: Path | None = None
    private_key: Path | None = None
    max_body: int = 16 * MIB
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    keepalive_s: float = 10.0
