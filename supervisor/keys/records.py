"""The format of the list of keys, a file with the rights and the limits of each key. Pure.

``clients.json``: ``{"clients": [{name, public_key | token_sha256, rights, created, max_in_flight?,
requests_per_minute?, tokens_per_minute?, tokens_per_day?, keep_alive_s?, models?, expires?}]}``. A client over TCP has
a ``public_key``, a client over HTTP a ``token_sha256``. The file holds no secret. But anybody who can write to it can
admit any key.
"""

import ipaddress
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypedDict

from protocol.client.transport import KEY_NAME, is_key
from protocol.verbs import Right
from supervisor.config.spelling import seconds_of
from supervisor.keys.rights import TOKEN_ID, Identity

MAX_KEYS = 10_000
MAX_IN_FLIGHT = 100_000
MAX_RATE = 1 << 40
"""Most requests or tokens in a minute or a day that a limit may name."""
MAX_KEEP_ALIVE_S = 366 * 86_400
MAX_PATTERNS = 64
"""Most patterns of models that one key may have."""
MAX_LIFETIME_S = 10 * 366 * 86400
_REQUIRED = ("name", "rights", "created")
_IDS = ("public_key", "token_sha256")
"""Fields for the id of a key. An entry has one of them."""
_TIME = re.compile(r"^[0-9TZ:.+-]{1,40}$")
_EXPIRY = re.compile(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")
_PATTERN = re.compile(r"^[a-z0-9*?\[\]!._-]{1,64}$")
LIMITS = {
    "max_in_flight": MAX_IN_FLIGHT, "requests_per_minute": MAX_RATE, "tokens_per_minute": MAX_RATE,
    "tokens_per_day": MAX_RATE, "keep_alive_s": MAX_KEEP_ALIVE_S,
}  # fmt: skip
"""Field of a key that is a number → the most that it may be."""
_KNOWN = frozenset({*_REQUIRED, *_IDS, *LIMITS, "models", "expires"})
_HEAD, _BETWEEN, _TAIL = '{\n  "clients": [\n    {\n', "\n    },\n    {\n", "\n    }\n  ]\n}\n"
"""What ``format_clients`` writes before, between and after the entries. A text in JSON cannot hold a line break."""
_MOST_CACHED = 256
"""Texts of rights and of models that are parsed once. Most keys of a long list have the same."""


class Limits(TypedDict, total=False):
    """The limits of a key, see ``Identity``. None and a missing value are the same."""

    max_in_flight: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    keep_alive_s: int | None
    models: tuple[str, ...] | None
    expires: float | None


class KeysProblem(ValueError):
    """The keys cannot be used. The message is one line that says what to do, and holds no secret.

    field  the field of a key that is wrong, None if the fault is not in what somebody has asked for
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def check_name(name: str) -> str:
    """Return the name if it is valid for a key. Raises KeysProblem if not."""
    if not KEY_NAME.fullmatch(name):
        raise KeysProblem(
            f"{name[:64]!r} is no name of a key: use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a "
            "letter or digit",
            "name",
        )
    return name


@lru_cache(_MOST_CACHED)
def parse_rights(text: str) -> frozenset[Right]:
    """Return the rights that a text such as ``infer,status`` names. Raises KeysProblem."""
    names = [part.strip() for part in text.split(",")]
    known = ", ".join(Right)
    for name in names:
        if name not in set(Right):
            raise KeysProblem(f"{name[:32]!r} is no right: known are {known}, separated by commas")
    return frozenset(map(Right, names))


def check_limit(name: str, value: Any) -> int | None:
    """Return the limit if it is valid; None for no limit. Raises KeysProblem if it is not valid."""
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= LIMITS[name]:
        raise KeysProblem(f"{name} is {str(value)[:32]!a}: must be an integer from 1 to {LIMITS[name]}")
    return value


@lru_cache(_MOST_CACHED)
def parse_models(text: str) -> tuple[str, ...]:
    """Return the patterns of models that a text such as ``letters,qwen*`` names. Raises KeysProblem."""
    patterns = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise KeysProblem(
                f"{pattern[:64]!a} is no name or pattern of models: write names, with * and ? for any characters, "
                "separated by commas, such as letters,qwen*"
            )
    if len(patterns) > MAX_PATTERNS:
        raise KeysProblem(f"{len(patterns)} patterns of models: at most {MAX_PATTERNS}; use * and ?")
    return patterns


def parse_lifetime(text: str) -> int:
    """Return the seconds of a text such as ``30d`` or ``12h``. Raises KeysProblem."""
    seconds = None if "." in text else seconds_of(text, ("s", "m", "h", "d", "w"))
    if seconds is None or not 1 <= seconds <= MAX_LIFETIME_S:
        raise KeysProblem(f"{text[:32]!a} is no lifetime: write 12h, 30d or 8w, ten years at most")
    return int(seconds)


def parse_expiry(value: Any) -> float | None:
    """Return the end of a key in seconds since 1970; None if it has none. Raises KeysProblem."""
    if value is None:
        return None
    if isinstance(value, str) and _EXPIRY.fullmatch(value):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            pass
    raise KeysProblem("expires is no time such as 2026-01-31T12:00:00Z")


def format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 in ISO 8601, such as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_clients(text: str, known: dict[str, Identity] | None = None) -> dict[str, Identity]:
    """Return the identity of each key, by the key's id.

    known  the identity of each entry that was parsed before, by the entry's text. Its content is replaced by that of
           this list. With 10,000 keys of which one has changed, the supervisor reads the list in 12 ms, and not 77 ms

    Raises KeysProblem for a text that ``format_clients`` would not write.
    """
    if known is not None:
        try:
            entries = _split(text)
            identities = [known.get(entry) or _identity(_object(entry)) for entry in entries]
            found = _by_id(identities)
        except (ValueError, RecursionError):
            pass  # the whole list is parsed below, so errors do not depend on what was known
        else:
            known.clear()
            known.update(zip(entries, identities, strict=True))
            return found
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except KeysProblem:
        raise
    except (ValueError, RecursionError) as e:
        raise KeysProblem(
            f"is not JSON ({type(e).__name__}): `modelctl keys` writes it, edit nothing by hand"
        ) from None
    listed = content.get("clients") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise KeysProblem(f"must be an object with one list, clients, of at most {MAX_KEYS}")
    identities = []
    for number, entry in enumerate(listed):
        try:
            identities.append(_identity(entry))
        except KeysProblem as e:
            raise KeysProblem(f"entry {number + 1}: {e}") from None
    return _by_id(identities)


def _split(text: str) -> list[str]:
    """Return the text of each entry, without its braces, in a list that ``format_clients`` has written.

    Raises ValueError for a text of another form, and for too many entries. If each piece is the inside of an object,
    the pieces are the entries: the text is then these objects, with the list around them.
    """
    entries = text[len(_HEAD) : -len(_TAIL)].split(_BETWEEN)
    if not text.startswith(_HEAD) or not text.endswith(_TAIL) or len(entries) > MAX_KEYS:
        raise ValueError("not a list of clients as format_clients writes it")
    return entries


def _object(inside: str) -> Any:
    """Return the object with this text between its braces. Raises ValueError if there is none, or if a field occurs
    twice."""
    return json.loads(f"{{{inside}}}", object_pairs_hook=_once)


def _by_id(identities: Iterable[Identity]) -> dict[str, Identity]:
    """Return the identities by the id of their keys. Raises KeysProblem if an id or a name occurs twice."""
    found: dict[str, Identity] = {}
    names: set[str | None] = set()
    for number, identity in enumerate(identities):
        if identity.key_id in found or identity.name in names:
            raise KeysProblem(f"entry {number + 1}: {identity.name!r} or its key stands there twice")
        found[identity.key_id] = identity
        names.add(identity.name)
    return found


def format_clients(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"clients": entries}, indent=2) + "\n"


def described(identity: Identity) -> dict[str, Any]:
    """Return the name, the rights and the limits of a key for people. None stands for no limit."""
    return {
        "name": identity.name,
        "rights": [right for right in Right if right in identity.rights],
        "models": None if identity.models is None else list(identity.models),
        "expires": None if identity.expires is None else format_time(identity.expires),
        **{name: getattr(identity, name) for name in LIMITS},
    }


def entry_of(identity: Identity, created: str) -> dict[str, Any]:
    """Return the entry of a key in the file. ``created`` is in ISO 8601."""
    told = described(identity)
    entry = {
        "name": told["name"],
        _IDS[identity.is_http]: identity.key_id,
        "rights": told["rights"],
        "created": created,
    }
    return entry | {field: told[field] for field in (*LIMITS, "models", "expires") if told[field] is not None}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. Raises KeysProblem for a field that occurs twice, because programs differ in
    which of the two they use."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise KeysProblem("a field stands twice in one entry")
    return fields


def _identity(entry: Any) -> Identity:
    if not isinstance(entry, dict):
        raise KeysProblem("is no object")
    if unknown := entry.keys() - _KNOWN:  # if a misspelt limit passed, the key would have no limit
        raise KeysProblem(f"unknown field {min(unknown)[:32]!a}")
    for name in _REQUIRED:
        if name not in entry:
            raise KeysProblem(f"{name} is missing")
    name, rights = entry["name"], entry["rights"]
    if not isinstance(name, str):
        raise KeysProblem("name is no text")
    if not isinstance(rights, list) or not all(isinstance(right, str) for right in rights) or not rights:
        raise KeysProblem("rights must be a list that names at least one right")
    # a terminal shows this text, so it must hold no control characters
    if not isinstance(entry["created"], str) or not _TIME.fullmatch(entry["created"]):
        raise KeysProblem("created is no time such as 2026-01-31T12:00:00Z")
    key_id, own, models = _id_of(entry), parse_rights(",".join(rights)), entry.get("models")
    if "token_sha256" in entry:
        check_http_rights(own)
    if models is not None:
        if not isinstance(models, list) or not all(isinstance(pattern, str) for pattern in models):
            raise KeysProblem("models must be a list of names and patterns")
        models = parse_models(",".join(models))
    limits = {limit: check_limit(limit, entry.get(limit)) for limit in LIMITS}
    expires, created = parse_expiry(entry.get("expires")), entry["created"]
    return Identity(check_name(name), key_id, own, **limits, models=models, expires=expires, created=created)


def _id_of(entry: dict[str, Any]) -> str:
    """Return the id of the key in an entry. Raises KeysProblem."""
    if sum(field in entry for field in _IDS) != 1:
        raise KeysProblem("must have one of public_key and token_sha256")
    if "public_key" in entry:
        if not is_key(entry["public_key"]):
            raise KeysProblem("public_key is no key: 40 characters of Z85")
        return str(entry["public_key"])
    token_id = entry["token_sha256"]
    if not isinstance(token_id, str) or not TOKEN_ID.fullmatch(token_id):
        raise KeysProblem("token_sha256 is no SHA-256: 64 digits of lower-case hex")
    return token_id


def check_http_rights(rights: frozenset[Right]) -> None:
    """Raise KeysProblem if an HTTP key may not have these rights."""
    if Right.GATEWAY in rights:
        message = "an HTTP key cannot have the right gateway: it is for keys with which a gateway connects"
        raise KeysProblem(message, "rights")


# Check ``supervisor.listen``, an endpoint over TCP. Pure.


_TCP = re.compile(r"^tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):([0-9]{1,5})$")
_FORM = "must be tcp://ADDRESS:PORT, such as tcp://192.168.1.5:5570 or tcp://[::1]:5570"


def parse_listen(value: object) -> str | None:
    """Return the endpoint in the form in which it is bound; None for no endpoint. Raises ValueError with the remedy."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(_FORM)
    transport, separator, _ = value.partition("://")
    if separator and transport != "tcp":
        raise ValueError(f"{transport[:16]}:// is not offered (the sockets for this machine are made anyway): {_FORM}")
    match = _TCP.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(_FORM)
    host = match[1].strip("[]")
    if host == "*":
        raise ValueError("* is every interface: write tcp://0.0.0.0:PORT if that is meant, or one address")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        hint = "127.0.0.1" if host == "localhost" else "the address of the interface"
        raise ValueError(f"{host[:64]!r} is no address: names are not looked up; write {hint}") from None
    if address.is_multicast:
        raise ValueError(f"{host} is a multicast address; {_FORM}")
    return f"tcp://[{address}]:{int(match[2])}" if address.version == 6 else f"tcp://{address}:{int(match[2])}"
