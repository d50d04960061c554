"""The allow-list of a running supervisor, always up to date.

The list is a file. The supervisor looks for changes with ``stat`` at every handshake. So a key works as soon as
`modelctl keys new` returns, and no new connection is possible with it as soon as `keys revoke` returns. The supervisor
also looks twice a second, and ends existing connections whose key was revoked.

The commands do not send an order over a socket instead. Such an order would not reach a supervisor that was started
from another directory. It would miss a file that comes from elsewhere (a backup, configuration management). And it
would be one more order to authorise.

If the list cannot be read, or others could have written it, nobody is admitted, because it might admit an intruder.
"""

import logging
from enum import Enum
from typing import Any

from supervisor.keys.allowance import Allowance
from supervisor.keys.handshakes import Handshakes
from supervisor.keys.records import KeysProblem
from supervisor.keys.rights import Identity, Right
from supervisor.keys.store import KeyStore


class HandshakeDecision(Enum):
    """The decision about a handshake."""

    ADMITTED = "admitted"
    UNKNOWN = "unknown"
    """The key is not on the list."""
    TOO_OFTEN = "too often"
    """The key has connected too often in a short time."""


MOST_NAMED = 20
"""The most keys that one line of the log names."""


class KeyRing:
    """The keys that are admitted, and what each of them has used. Times are monotonic seconds."""

    def __init__(self, store: KeyStore, log: logging.Logger) -> None:
        self._store = store
        self._log = log
        self._stamp: tuple[int, ...] = ()
        self._identities: dict[str, Identity] = {}
        self._allowances: dict[str, Allowance] = {}
        self._handshakes = Handshakes()

    def find(self, public_key: str) -> Identity | None:
        """Return the owner of a key, by the list as last read; None if the key is not on it."""
        return self._identities.get(public_key)

    def admit(self, public_key: str, now: float) -> HandshakeDecision:
        """Decide about a connection with this key, by the present list and by the key's own budget."""
        self.refresh()
        if public_key not in self._identities:
            return HandshakeDecision.UNKNOWN
        return HandshakeDecision.ADMITTED if self._handshakes.admit(public_key, now) else HandshakeDecision.TOO_OFTEN

    def refresh(self) -> bool:
        """Read the list again if it has changed. Return whether it has."""
        stamp = self._store.stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        before = self._identities
        try:
            self._identities = self._store.clients()
        except KeysProblem as e:  # the allowances stay, so a repaired list does not give keys their tokens again
            self._identities = {}
            self._log.error("no key is admitted: %s", e)
            return bool(before)
        if self._identities == before:
            return False
        came = [identity.name for key, identity in self._identities.items() if before.get(key) != identity]
        left = [identity.name for key, identity in before.items() if key not in self._identities]
        self._log.info(
            "keys: %d are admitted; new or changed: %s; gone: %s", len(self._identities), _few(came), _few(left)
        )
        for public_key in self._allowances.keys() - self._identities.keys():
            del self._allowances[public_key]
        for public_key in before.keys() - self._identities.keys():
            self._handshakes.forget(public_key)
        return True

    def allowance(self, identity: Identity, now: float) -> Allowance:
        """Return what a key may still use, over all its present and later connections."""
        found = self._allowances.get(identity.public_key)
        if found is None:
            found = self._allowances[identity.public_key] = Allowance(identity, now)
        elif found.identity is not identity:
            found.adopt(identity, now)
        return found

    @property
    def refused_handshakes(self) -> int:
        """Return the number of handshakes that were refused because the key connected too often."""
        return self._handshakes.refused

    def describe(self, connections: dict[str, int], now: float) -> list[dict[str, Any]]:
        """Describe each key for people. ``connections`` is by public key."""
        described = []
        for public_key, identity in self._identities.items():
            allowance = self._allowances.get(public_key)
            described.append(
                {
                    "name": identity.name,
                    "rights": [right for right in Right if right in identity.rights],
                    "connections": connections.get(public_key, 0),
                    "max_in_flight": identity.max_in_flight,
                    "tokens_per_minute": identity.tokens_per_minute,
                    "tokens_left": None if allowance is None else allowance.tokens_left(now),
                    "rate_limited": 0 if allowance is None else allowance.refused,
                }
            )
        return described


def _few(names: list[str | None]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(str, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "none"
