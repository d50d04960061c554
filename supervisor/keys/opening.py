"""Decide whether the TCP port in models.yaml may be opened. The error for an unsafe port says what to do."""

from dataclasses import dataclass, field
from pathlib import Path

from supervisor.keys.records import KeysProblem
from supervisor.keys.store import KeyStore

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
