"""The format of the allow-list, a file with public keys, their rights and their limits. Pure.

``clients.json``: ``{"clients": [{name, public_key, rights, max_in_flight?, tokens_per_minute?, created}]}``. The file
holds no secret. But anybody who can write to it can admit any key.
"""

import json
import re
from typing import Any

from protocol.client.client_key import KEY_NAME, is_key
from supervisor.keys.rights import Identity, Right

MAX_KEYS = 10_000
MAX_IN_FLIGHT = 100_000
MAX_TOKENS_PER_MINUTE = 1 << 40
_REQUIRED = ("name", "public_key", "rights", "created")
_TIME = re.compile(r"^[0-9TZ:.+-]{1,40}$")
_LIMITS = {"max_in_flight": MAX_IN_FLIGHT, "tokens_per_minute": MAX_TOKENS_PER_MINUTE}


class KeysProblem(ValueError):
    """The keys cannot be used. The message is one line that says what to do, and holds no secret."""


def check_name(name: str) -> str:
    """Return the name if it is valid for a key. Raises KeysProblem if not."""
    if not KEY_NAME.fullmatch(name):
        raise KeysProblem(
            f"{name[:64]!r} is no name of a key: use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a "
            "letter or digit"
        )
    return name


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
    if type(value) is not int or not 1 <= value <= _LIMITS[name]:
        raise KeysProblem(f"{name} is {str(value)[:32]!a}: must be an integer from 1 to {_LIMITS[name]}")
    return value


def parse_clients(text: str) -> dict[str, Identity]:
    """Return the identity of each public key. Raises KeysProblem for a text that ``format_clients`` would not write."""
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except KeysProblem:
        raise
    except (ValueError, RecursionError) as e:
        raise KeysProblem(
            f"is not JSON ({type(e).__name__}): `modelctl keys` writes it, edit nothing by hand"
        ) from None
    entries = content.get("clients") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise KeysProblem(f"must be an object with one list, clients, of at most {MAX_KEYS}")
    found: dict[str, Identity] = {}
    names: set[str | None] = set()
    for number, entry in enumerate(entries):
        try:
            identity = _identity(entry)
        except KeysProblem as e:
            raise KeysProblem(f"entry {number + 1}: {e}") from None
        if identity.public_key in found or identity.name in names:
            raise KeysProblem(f"entry {number + 1}: {identity.name!r} or its public key stands there twice")
        found[identity.public_key] = identity
        names.add(identity.name)
    return found


def format_clients(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"clients": entries}, indent=2) + "\n"


def entry_of(identity: Identity, created: str) -> dict[str, Any]:
    """Return the entry of a key in the file. ``created`` is in ISO 8601."""
    entry: dict[str, Any] = {
        "name": identity.name,
        "public_key": identity.public_key,
        "rights": [right for right in Right if right in identity.rights],
        "created": created,
    }
    for name in _LIMITS:
        if (value := getattr(identity, name)) is not None:
            entry[name] = value
    return entry


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
    for name in entry:
        if name not in _REQUIRED and name not in _LIMITS:  # if a misspelt limit passed, the key would have no limit
            raise KeysProblem(f"unknown field {name[:32]!a}")
    for name in _REQUIRED:
        if name not in entry:
            raise KeysProblem(f"{name} is missing")
    name, public_key, rights = entry["name"], entry["public_key"], entry["rights"]
    if not isinstance(name, str):
        raise KeysProblem("name is no text")
    if not is_key(public_key):
        raise KeysProblem("public_key is no key: 40 characters of Z85")
    if not isinstance(rights, list) or not all(isinstance(right, str) for right in rights) or not rights:
        raise KeysProblem("rights must be a list that names at least one right")
    # a terminal shows this text, so it must hold no control characters
    if not isinstance(entry["created"], str) or not _TIME.fullmatch(entry["created"]):
        raise KeysProblem("created is no time such as 2026-01-31T12:00:00Z")
    limits = {limit: check_limit(limit, entry.get(limit)) for limit in _LIMITS}
    return Identity(check_name(name), public_key, parse_rights(",".join(rights)), **limits)
