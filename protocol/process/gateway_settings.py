"""The settings that the supervisor, or the command ``modelctl gateway``, gives a gateway process at its start."""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from protocol.process.log_style import DEFAULT_STYLE, LogStyle

MIB = 1 << 20
ReasoningKey = Literal["reasoning_content", "reasoning"]
ProgressPlace = Literal["comment", "reasoning"]
SHARE: Final = 4
"""One key may use the fourth part of ``body_memory``."""
STORED_ITEMS: Final = 128 * MIB
"""Bytes of responses' items that one gateway process keeps, unless models.yaml says it."""
READY: Final = b"+"
"""The record that a gateway process sends about once a second while it serves."""
TROUBLE: Final = b"!"
"""How the record begins that says why the process cannot serve."""
ENDED: Final = b"-"
"""How the record begins that names a session of the page that was ended (``Session.text``). The other processes get it
as JSON with the key ``ended``."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of one gateway process. They cross to the process as JSON, so paths are text.

    runtime_dir    directory of the supervisor's sockets; None with ``connect``
    connect        TCP endpoint of a supervisor on another machine; None with ``runtime_dir``
    key_file       the key for ``connect``. It needs the right ``gateway``
    listeners      descriptors of the sockets that the process accepts connections from
    host, port     the address of these sockets
    auth           "keys": every request needs a token (``modelctl keys new NAME --http``). "none": no request needs
                   one, on loopback only
    allowed_hosts  names that a request's Host header may have, besides localhost and the address itself
    cors_origins   origins whose pages may use the API from a browser
    certificate    PEM file of the certificate chain; None for HTTP without TLS
    private_key    PEM file of its private key
    certificate_files  what tells the present content of these files from another, as ``config_watch.Signature``
    max_body       most bytes of a request's body
    body_memory    most bytes of all bodies together that the process holds at one time; None for 256 MiB, or room for
                   four of the largest bodies if that is more
    body_s         seconds in which a whole body must come
    body_pace_s    seconds in which each 160 KiB of a body must come, unless the body ends
    keepalive      what keeps a silent stream open: an SSE "comment", an empty "chunk", or "off"
    keepalive_s    seconds of silence after which that is sent
    progress       where a streamed chat tells of the load of its model: in an SSE "comment" only, or in its "reasoning"
    reasoning_key  the key of a chat's reasoning in messages and deltas
    unknown_options  "ignore": options that nobody knows are ignored, and the answer says so. "refuse": they are errors
    stored_items   most bytes of responses' items that the process keeps in memory; 0 keeps none
    seal_secret    secret that encrypts the reasoning of responses, 32 bytes in hex; the same for all
                   gateways of one supervisor
    cookie_secret  secret of the cookies' signatures, in hex; processes that share a port share it
    ended_sessions  the sessions of the page that were ended before the process began (``EndedSessions.texts``)
    parent         pid of the process that started this one, and with which it ends; None to live on
    masks          texts that the process must not show → what it shows in their place (``masking``)
    log            path of the process's log; None to write to standard error
    log_style      how the log is written at first. Records of ``LogStyle.to_json`` after the settings change it
    """

    runtime_dir: str | None = None
    connect: str | None = None
    key_file: str | None = None
    listeners: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    auth: Literal["keys", "none"] = "keys"
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    certificate: str | None = None
    private_key: str | None = None
    certificate_files: tuple[tuple[int, int, int, int] | None, ...] = ()
    max_body: int = 16 * MIB
    body_memory: int | None = None
    body_s: float = 60.0
    body_pace_s: float = 10.0
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    keepalive_s: float = 10.0
    progress: ProgressPlace = "comment"
    reasoning_key: ReasoningKey = "reasoning_content"
    unknown_options: Literal["ignore", "refuse"] = "ignore"
    stored_items: int = STORED_ITEMS
    seal_secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    cookie_secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    ended_sessions: tuple[str, ...] = ()
    parent: int | None = None
    masks: dict[str, str] = field(default_factory=dict, compare=False)
    log: str | None = None
    log_style: LogStyle = DEFAULT_STYLE

    def to_json(self) -> bytes:
        """Return the settings as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "GatewaySettings":
        """Return the settings in JSON that ``to_json`` made."""
        given: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**(given | lists | {"log_style": LogStyle(**given["log_style"])}))
