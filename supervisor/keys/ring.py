"""The allow-list of a running supervisor, always up to date.

The list is a file. The supervisor looks for changes with ``stat`` at every handshake, and at every message that is sent
for an HTTP key. So a key works as soon as `modelctl keys new` returns, and nothing new is possible with it as soon as
`keys revoke` returns. The supervisor also looks twice a second, and ends what revoked and expired keys still have.

The commands do not send an order over a socket instead. Such an order would not reach a supervisor that was started
from another directory. It would miss a file that comes from elsewhere (a backup, configuration management). And it
would be one more order to authorise.

If the list cannot be read, or others could have written it, nobody is admitted, because it might admit an intruder.
"""

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from supervisor.keys.records import KeysProblem, described, format_time
from supervisor.keys.rights import Allowance, Identity, TokenBucket
from supervisor.keys.store import MOST_NAMED, KeyStore
from supervisor.logs.events import EventKind, noted

# A limit on how often each key may connect over TCP. Pure: times are arguments.
#
# Every connection that completes its handshake gets libzmq's next routing number. A peer that guesses a number before
# it is given out makes libzmq abort the process (see ``supervisor.ports.listeners``). So handshakes are limited.
# Each key has a budget of its own, so a key that connects again and again does not keep other keys out.


AT_ONCE: Final = 256
"""Handshakes of one key that may come together: as many as the key may have connections."""
PER_S: Final = 20.0
"""Further handshakes of one key per second."""


class Handshakes:
    """The budget of each public key. ``refused`` counts the handshakes that exceeded a budget."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self.refused = 0

    def admit(self, public_key: str, now: float) -> bool:
        """Return whether this key may connect now. If so, take one handshake from its budget."""
        bucket = self._buckets.setdefault(public_key, TokenBucket(AT_ONCE, AT_ONCE / PER_S, AT_ONCE, now))
        bucket.refill(now)
        enough = bucket.left >= 1
        bucket.left -= enough
        self.refused += not enough
        return enough

    def forget(self, public_key: str) -> None:
        """Forget a key that is no longer on the list."""
        self._buckets.pop(public_key, None)


class HandshakeDecision(Enum):
    """The decision about a handshake."""

    ADMITTED = "admitted"
    UNKNOWN = "unknown"
    """The key is not on the list."""
    TOO_OFTEN = "too often"
    """The key has connected too often in a short time."""


class KeyRing:
    """The keys that are admitted, by id, and what each of them has used. ``now`` is in monotonic seconds.

    store    where the list is; None if there cannot be one, because this user has no home directory
    wall     returns the seconds since 1970, by which keys expire
    version  changes whenever the keys that are admitted change
    """

    def __init__(self, store: KeyStore | None, log: logging.Logger, wall: Callable[[], float] = time.time) -> None:
        self.version = 0
        self._store = store
        self._log = log
        self._wall = wall
        self._stamp: tuple[int, ...] = ()
        self._listed: dict[str, Identity] = {}
        """The keys on the list, expired ones included."""
        self._identities: dict[str, Identity] = {}
        self._http: dict[str, Identity] = {}
        """Those of them that are HTTP keys."""
        self._next_expiry: float | None = None
        """When the next key expires, in seconds since 1970."""
        self._judged_at = 0.0
        """When it was last decided which keys have expired."""
        self._allowances: dict[str, Allowance] = {}
        self._used: dict[str, float] = {}
        """When a key was last used, in seconds since 1970."""
        self._handshakes = Handshakes()
        self.trouble: str | None = None
        """Why no key is admitted, for people. None while the list can be read."""

    def find(self, key_id: str) -> Identity | None:
        """Return the owner of a key, by the list as last read; None if the key is not on it, or has expired."""
        identity = self._identities.get(key_id)
        if identity is None or (identity.expires is not None and self._wall() >= identity.expires):
            return None
        return identity

    def ended(self, key_id: str) -> str:
        """Say what became of a key that ``find`` does not find: "has expired" or "was revoked"."""
        return "has expired" if key_id in self._listed else "was revoked"

    def admit(self, public_key: str, now: float) -> HandshakeDecision:
        """Decide about a connection with this key, by the present list and by the key's own budget."""
        self.refresh()
        if self.find(public_key) is None:
            return HandshakeDecision.UNKNOWN
        return HandshakeDecision.ADMITTED if self._handshakes.admit(public_key, now) else HandshakeDecision.TOO_OFTEN

    def refresh(self) -> None:
        """Read the list again if it has changed, and drop the keys that have expired."""
        at = self._wall()
        is_settled = at >= self._judged_at and (self._next_expiry is None or at < self._next_expiry)
        if not self._read_again() and is_settled:
            return
        before, self._judged_at = self._identities, at  # after a clock was set back, expired keys may be valid again
        admitted = {i: key for i, key in self._listed.items() if key.expires is None or at < key.expires}
        self._next_expiry = min((key.expires for key in admitted.values() if key.expires is not None), default=None)
        if admitted == before:
            return
        self._identities = admitted
        self._http = {key_id: key for key_id, key in admitted.items() if key.is_http}
        self.version += 1
        came = [key.name for key_id, key in admitted.items() if (old := before.get(key_id)) is not key and old != key]
        left = [key.name for key_id, key in before.items() if key_id not in admitted]
        self._log.info(
            "keys: %d are admitted; new or changed: %s; gone: %s", len(admitted), _few(came), _few(left),
            extra=noted(EventKind.KEYS),
        )  # fmt: skip
        if self._listed:  # a list that cannot be read, and is repaired, does not give keys their tokens again
            for key_id in self._allowances.keys() - self._listed.keys():
                del self._allowances[key_id]
            for key_id in self._used.keys() - self._listed.keys():
                del self._used[key_id]
        for key_id in before.keys() - admitted.keys():
            self._handshakes.forget(key_id)

    def _read_again(self) -> bool:
        """Read the list if it may have changed. Return whether it was read."""
        if self._store is None or (stamp := self._store.stamp()) == self._stamp:
            return False
        never, self._stamp = self._stamp == (), stamp
        if never and stamp == (errno.ENOENT,):  # nobody has made a key yet
            return False
        try:
            self._listed, self.trouble = self._store.clients(), None
        except KeysProblem as e:
            self._listed, self.trouble = {}, f"no key is admitted: {e}"
            self._log.error("%s", self.trouble, extra=noted(EventKind.KEYS))
        return True

    def allowance(self, identity: Identity, now: float) -> Allowance:
        """Return what a key may still use, over all its present and later connections."""
        found = self._allowances.get(identity.key_id)
        if found is None:
            found = self._allowances[identity.key_id] = Allowance(identity, now)
        elif found.identity is not identity:
            found.adopt(identity, now)
        return found

    def note_use(self, identity: Identity) -> None:
        """Take note that a key has asked for something now."""
        self._used[identity.key_id] = self._wall()

    def note_earlier_use(self, days: Mapping[str, str]) -> None:
        """Take note of the days on which keys were last used before the supervisor's start, by key id."""
        for key_id, day in days.items():
            self._used.setdefault(key_id, datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())

    @property
    def store(self) -> KeyStore:
        """The place of the list. Raises KeysProblem if there cannot be one."""
        if self._store is None:
            raise KeysProblem("this user has no home directory for keys: set supervisor.keys in models.yaml")
        return self._store

    def listed(self, after: str, limit: int, caller: Identity) -> tuple[list[dict[str, Any]], bool]:
        """Describe keys on the list, expired ones included, by name. Return them, and whether there are further ones.

        after   only keys whose names come after this one
        limit   the most keys
        caller  who asks: its own key is marked

        Raises KeysProblem if the list cannot be read.
        """
        self.refresh()
        if self.trouble is not None:
            raise KeysProblem(self.trouble)
        found = {key.name: key for key in self._listed.values() if key.name is not None and key.name > after}
        names = sorted(found)
        return [self._described(found[name], caller) for name in names[:limit]], len(names) > limit

    def listed_as(self, name: str, caller: Identity) -> dict[str, Any] | None:
        """Describe the key of this name as ``listed`` does; None if there is none."""
        self.refresh()
        found = next((key for key in self._listed.values() if key.name == name), None)
        return None if found is None else self._described(found, caller)

    def _described(self, identity: Identity, caller: Identity) -> dict[str, Any]:
        used = self._used.get(identity.key_id)
        return {
            **described(identity),
            "http": identity.is_http,
            "created": identity.created,
            "last_used": None if used is None else format_time(used),
            "own": identity.key_id == caller.key_id,
        }

    @property
    def refused_handshakes(self) -> int:
        """Return the number of handshakes that were refused because the key connected too often."""
        return self._handshakes.refused

    @property
    def http_ids(self) -> Collection[str]:
        """The ids of the HTTP keys that are admitted."""
        return self._http.keys()

    @property
    def tcp_ids(self) -> Iterator[str]:
        """The ids of the other keys that are admitted."""
        return (key_id for key_id in self._identities if key_id not in self._http)

    def describe(self, key_id: str, now: float) -> dict[str, Any]:
        """Describe a key that is admitted, for people."""
        identity, allowance = self._identities[key_id], self._allowances.get(key_id)
        return {
            **described(identity),
            "requests_left": None if allowance is None else allowance.left("requests_per_minute", now),
            "tokens_left": None if allowance is None else allowance.left("tokens_per_minute", now),
            "tokens_left_of_day": None if allowance is None else allowance.left("tokens_per_day", now),
            "rate_limited": 0 if allowance is None else allowance.refused,
        }


def _few(names: list[str | None]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(str, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "") or "none"
