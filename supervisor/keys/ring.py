"""The allow-list of a running supervisor, as it is now.

The list is a file, and looking at it is a ``stat``: at every handshake, so that a key works from the moment that
`modelctl keys new` returns and no longer than until `keys revoke` does, and twice a second, for connections that are
there. An order over a socket would do neither where the supervisor was started from another directory, or the file
comes from elsewhere (a backup, configuration management), and would be one more thing to authorise.

A list that cannot be read, or that others could have written, admits nobody: whoever was to be kept out might be on it.
"""

import logging
from enum import Enum
from typing import Any

from supervisor.keys.allowance import Allowance
from supervisor.keys.handshakes import Handshakes
from supervisor.keys.records import KeysProblem
from supervisor.keys.rights import Identity, Right
from supervisor.keys.store import KeyStore


class Admission(Enum):
    """What becomes of a handshake."""

    ADMITTED = "admitted"
    UNKNOWN = "unknown"
    """The key is not on the list."""
    TOO_OFTEN = "too often"
    """The key has connected too often in a short time."""


MOST_NAMED = 20
"""Keys that one line of the log names."""


class KeyRing:
    """Times are monotonic seconds."""

    def __init__(self, store: KeyStore, log: logging.Logger) -> None:
        self._store = store
        self._log = log
        self._stamp: tuple[int, ...] = ()
        self._identities: dict[str, Identity] = {}
        self._allowances: dict[str, Allowance] = {}
        self._handshakes = Handshakes()

    def find(self, public_key: str) -> Identity | None:
        """Whose key it is, by the list as last read; None: nobody's."""
        return self._identities.get(public_key)

    def admit(self, public_key: str, now: float) -> Admission:
        """Whether a connection with this key may come, by the list as it is now and by the key's own budget."""
        self.refresh()
        if public_key not in self._identities:
            return Admission.UNKNOWN
        return Admission.ADMITTED if self._handshakes.admit(public_key, now) else Admission.TOO_OFTEN

    def refresh(self) -> bool:
        """Read the list again if it has changed. Whether it has."""
        stamp = self._store.stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        before = self._identities
        try:
            self._identities = self._store.clients()
        except KeysProblem as e:  # what keys have used is not forgotten for that
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
        """What is left of a key's limits; of all its connections, also those to come."""
        found = self._allowances.get(identity.public_key)
        if found is None:
            found = self._allowances[identity.public_key] = Allowance(identity, now)
        elif found.identity is not identity:
            found.adopt(identity, now)
        return found

    @property
    def refused_handshakes(self) -> int:
        """Handshakes of keys that connected too often."""
        return self._handshakes.refused

    def describe(self, connections: dict[str, int], now: float) -> list[dict[str, Any]]:
        """Each key, for people. ``connections``: by public key."""
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
