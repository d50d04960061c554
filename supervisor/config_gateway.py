"""The keys of the section ``gateway`` of models.yaml. ``supervisor.config`` interprets them."""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from protocol.process.gateway_settings import SHARE, ProgressPlace, ReasoningKey
from protocol.process.web_hosts import parse_authority, written_origin
from protocol.values import Read, Within
from supervisor.config_values import UserPath
from supervisor.spelling import parse_size

DEFAULT_PORT = 8000
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an HTTP port. ``host`` is an IP address without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> Address:
    """Return the address of ``127.0.0.1:8000``, ``[::1]:8000``, ``localhost`` or a port alone. Raises ValueError."""
    host, port = "127.0.0.1", str(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(_MUST_BE)
    if isinstance(value, str) and (match := _LISTEN.fullmatch(value)):
        host, port = match[1] or match[2], match[3] or str(DEFAULT_PORT)
        if match[2] and match[2].isdecimal() and match[3] is None:
            host, port = "127.0.0.1", match[2]
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise ValueError(_MUST_BE) from None
    if not 1 <= number <= 65535:
        raise ValueError(_MUST_BE)
    return Address(host, number)


_MUST_BE = "must be ADDRESS:PORT such as 127.0.0.1:8000, 0.0.0.0:8000 or [::1]:8000"


def parse_host(value: object) -> str:
    """Return a host name as the Host header has it, without a port. Raises ValueError."""
    found = parse_authority(value) if isinstance(value, str) else None
    if found is None or ":" in str(value):
        raise ValueError(f"must be a host name without a port, such as models.example.org{_ascii_hint(value)}")
    return found[0]


def parse_origin(value: object) -> str:
    """Return an origin as browsers send it. Raises ValueError."""
    origin = written_origin(value) if isinstance(value, str) else None
    if origin is None:
        raise ValueError(f"must be an origin such as https://chat.example.org, without a path{_ascii_hint(value)}")
    return origin


def _ascii_hint(value: object) -> str:
    return (
        "" if str(value).isascii() else "; write an international name as browsers send it, such as xn--mnchen-3ya.de"
    )


def parse_stored(value: object) -> int:
    """Return the bytes of a size, or 0. Raises ValueError."""
    return 0 if type(value) is int and value == 0 else parse_size(value)


Listen = Annotated[Address, Read(parse_address, "ADDRESS:PORT")]
HostName = Annotated[str, Read(parse_host, "host name")]
Origin = Annotated[str, Read(parse_origin, "origin")]
Size = Annotated[int, Read(parse_size, "size")]
OptionalSize = Annotated[int | None, Read(parse_size, "size")]


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The section ``gateway``. With it the supervisor starts a gateway, which serves OpenAI's API over HTTP.

    A reload applies changes: new processes take the connections, and the old processes complete their answers.
    """

    listen: Listen = field(default_factory=lambda: Address("127.0.0.1", DEFAULT_PORT))
    """Address and port of the gateway. Either may be left out.

    Example: 0.0.0.0:8000
    """
    auth: Literal["keys", "none"] = "keys"
    """Authentication of requests. ``keys``: every request needs a token (``modelctl keys new NAME --http`` makes one).
    ``none``: no request needs a token. Then everybody who can reach the port may use and stop the models. So with
    ``none`` the gateway may listen only on an address of this machine (127.0.0.1 or [::1]).

    Example: none
    """
    processes: Annotated[int, Within(1, 64)] = 1
    """Number of gateway processes that share the port. One process serves about a thousand streams.

    Example: 4
    """
    allowed_hosts: list[HostName] = field(default_factory=list)
    """Names by which clients may call the gateway, besides localhost and the address itself. A request with another
    name in its Host header is refused. So a web page cannot reach the gateway by a name of its own.

    Example: [models.example.org]
    """
    cors_origins: list[Origin] = field(default_factory=list)
    """Origins of web pages that may use the API from a browser.

    Example: [https://chat.example.org]
    """
    certificate: UserPath | None = None
    """PEM file of the certificate chain, for HTTPS: absolute, or relative to models.yaml.

    Default: plain HTTP
    Example: ~/tls/fullchain.pem
    """
    private_key: UserPath | None = None
    """PEM file of the certificate's private key: absolute, or relative to models.yaml.

    Default: plain HTTP
    Example: ~/tls/privkey.pem
    """
    max_body: Size = 16 << 20
    """Largest body of a request, in bytes or as a size.

    Example: 64MiB
    """
    body_memory: OptionalSize = None
    """Most bytes of all bodies together that one gateway process holds at one time. A body counts from its first byte
    until the supervisor has read the request, with the memory of what the gateway makes of it. One key may use a
    quarter of the bytes, so that four bodies of ``max_body`` must fit. With ``auth: none`` one body must fit.

    Default: 256MiB, or four times max_body if that is more
    Example: 1GiB
    """
    stored_items: Annotated[int | None, Read(parse_stored, "size or 0")] = None
    """Most bytes of items of /v1/responses that the gateway keeps in its memory, for clients that refer to earlier
    items and responses. They are kept for an hour at most, and never on disk. One key may use an eighth of them. 0
    keeps nothing. With several ``processes`` nothing is kept: a client's next request may reach another process.

    Default: 128MiB, or 0 with several processes
    Example: 0
    """
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    """Sign of life on a stream that was silent for ten seconds. ``comment``: a comment of server-sent events, which
    says what the request waits for. ``chunk``: a chunk without text, for clients that fail at comments. ``off``: none.

    Example: chunk
    """
    progress: ProgressPlace = "comment"
    """Where a stream of /v1/chat/completions tells of the load of its model. ``comment``: in the comments of
    ``keepalive`` only. ``reasoning``: besides, in short lines of reasoning before the answer, for chat programs that
    hide comments.

    Example: reasoning
    """
    reasoning_key: ReasoningKey = "reasoning_content"
    """Key of the reasoning in the messages and deltas of /v1/chat/completions. Most clients read
    ``reasoning_content``; clients of newer versions of vLLM and of OpenRouter read ``reasoning``.

    Example: reasoning
    """
    unknown_options: Literal["ignore", "refuse"] = "ignore"
    """What happens to options of a request that no API has. ``ignore``: they are ignored, and the header
    ``x-modelctl-ignored`` of the answer names them. ``refuse``: they are errors.

    Example: refuse
    """


def gateway_problems(config: GatewayConfig) -> list[tuple[str, str]]:
    """Return (key, message) for each combination of keys that cannot work."""
    problems: list[tuple[str, str]] = []
    if config.auth == "none" and not config.listen.is_loopback:
        reach = f"is none, and the gateway listens on {config.listen}, which other machines can reach"
        problems.append(("auth", f"{reach}: use auth: keys, or listen on 127.0.0.1"))
    bodies = 1 if config.auth == "none" else SHARE
    if config.body_memory is not None and bodies * config.max_body > config.body_memory:
        message = f"is {config.body_memory} bytes: must be at least {bodies} times max_body, {bodies * config.max_body}"
        problems.append(("body_memory", f"{message}, or max_body smaller"))
    if config.stored_items and config.processes > 1:
        message = f"is {config.stored_items} bytes with {config.processes} processes, which do not share what they keep"
        problems.append(("stored_items", f"{message}: use processes: 1, or stored_items: 0"))
    if (config.certificate is None) != (config.private_key is None):
        key, other = "certificate", "private_key"
        if config.certificate is None:
            key, other = other, key
        problems.append((key, f"needs {other}, too"))
    return problems
