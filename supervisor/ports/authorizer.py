"""Decide for whom a message is sent, and check it against the rights and limits of that key.

A connection over TCP has a key. Every connection that has the right ``gateway``, and those over ipc have all rights,
may send a request or a call for an HTTP key. This module also ends what revoked and expired keys still have.
``supervisor.keys`` decides. This module looks things up and carries the decisions out.

A connection over ipc that asks for no key costs nothing here, since no message of it comes here.
"""

import logging
import time
from itertools import chain, islice
from typing import Any

from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Generate, Message
from supervisor.keys.rights import (
    Identity,
    Nearest,
    Unfinished,
    check_model,
    check_models_of_call,
    check_on_behalf_of,
    check_right,
    check_stay,
)
from supervisor.keys.ring import KeyRing
from supervisor.ports.client_port import ClientPort
from supervisor.ports.connections import next_channel
from supervisor.requests.queue import BYTES_PER_TOKEN
from supervisor.requests.request import EndConnection, InFlight, QueuedEffect, stay_of
from supervisor.requests.scheduler import Scheduler

REVOKE_S = 0.5
"""Seconds between two checks whether the keys in use are still on the list."""
MOST_SHOWN = 100
"""HTTP keys that ``status`` describes."""


class RequestAuthorizer:
    """Admits or refuses what is sent with a key, or for one.

    tcp  the port over TCP; None if there is none
    """

    def __init__(self, ring: KeyRing, scheduler: Scheduler, tcp: ClientPort | None, log: logging.Logger) -> None:
        self._ring = ring
        self._scheduler = scheduler
        self._tcp = tcp
        self._log = log
        self._unfinished: dict[str, Unfinished[InFlight]] = {}
        """By key id, the unfinished requests of each key that has a limit."""
        self._parties: dict[str, int] = {}
        """By key id, the number by which queues and workers know a key that has asked for something."""
        self._keys_of_parties: dict[int, Identity] = {}
        """By that number, the key as it was when it last asked."""
        self._version = ring.version
        self.forbidden = 0

    # --- messages -------------------------------------------------------------------------------------------------

    def caller(self, identity: Identity, key_id: object, field: str) -> Identity:
        """Return the HTTP key for which a connection asks.

        identity  the connection's own
        key_id    ``on_behalf_of``, as the connection has sent it
        field     its place in the message

        Raises WireError: FORBIDDEN if the connection may not ask for keys, UNAUTHORIZED if no such key is admitted. An
        id that is not on the list leaves nothing behind here.
        """
        try:
            wanted = check_on_behalf_of(identity, key_id, field)
        except WireError as e:
            self.forbidden += e.code is ErrorCode.FORBIDDEN
            raise
        self._ring.refresh()
        found = self._ring.find(wanted)
        if found is None:
            message = "this token is not on the list of keys: it is wrong, was revoked, or has expired"
            raise WireError(
                ErrorCode.UNAUTHORIZED, f"{message}; `modelctl keys new NAME --http` makes one", field=field
            )
        return found

    def check(self, caller: Identity, message: Message) -> None:
        """Raise WireError (FORBIDDEN) if a key lacks the right to send this message."""
        try:
            check_right(caller, message)
        except WireError:
            self.forbidden += 1
            raise

    def check_call(self, caller: Identity, message: Call, params: dict[str, Any], nearest: Nearest) -> None:
        """Raise WireError if a key may not send this call, or not about its model."""
        self.check(caller, message)
        check_models_of_call(caller, message.verb, params, nearest)
        self._ring.note_use(caller)

    def check_request(self, caller: Identity, message: Generate, now: float, nearest: Nearest) -> int:
        """Return the number by which queues and workers know a key. Raises WireError if the key may not send this
        request now."""
        self.check(caller, message)
        check_model(caller, message.model, nearest)
        if (stay := stay_of(message.route)) is not None:
            check_stay(caller, *stay)
        unfinished = self._unfinished.get(caller.key_id)
        if unfinished is not None and caller.counts_tokens:
            self._ring.allowance(caller, now).charge(unfinished.take_tokens(), now)
        in_flight = 0
        if unfinished is not None and caller.max_in_flight is not None:
            in_flight = unfinished.count(caller.max_in_flight)
        self._ring.allowance(caller, now).check(in_flight, now)
        self._ring.note_use(caller)
        return self.party(caller)

    def party(self, caller: Identity) -> int:
        """Return the number by which queues and workers know a key."""
        if (party := self._parties.get(caller.key_id)) is None:
            party = self._parties[caller.key_id] = next_channel()
        self._keys_of_parties[party] = caller
        return party

    def note(self, caller: Identity, channel: int, message: Generate, now: float) -> None:
        """Count a request against its key's limits, if the scheduler has accepted it."""
        request = self._scheduler.find(channel, message.request)
        if request is None or not caller.is_limited:
            return
        if (own := self._unfinished.get(caller.key_id)) is None:
            own = self._unfinished[caller.key_id] = Unfinished(self._is_unfinished)
        own.add(request)
        allowance = self._ring.allowance(caller, now)
        allowance.count_request(now)
        allowance.charge(1 + len(message.body) // BYTES_PER_TOKEN, now)

    def charge_party(self, party: int, tokens: int) -> None:
        """Charge a key for a constraint that a worker compiled, even if the connection that asked for it has ended."""
        known = self._keys_of_parties.get(party)
        if known is not None and (identity := self._ring.find(known.key_id)) is not None:
            now = time.monotonic()
            self._ring.allowance(identity, now).charge(tokens, now)

    def _is_unfinished(self, request: InFlight) -> bool:
        return self._scheduler.find(*request.key) is request

    # --- twice a second -------------------------------------------------------------------------------------------

    def refresh(self) -> list[QueuedEffect]:
        """Apply the present list of keys. Return the effects that end what revoked and expired keys have.

        The requests of a key end before its connections, so that its clients read their errors.
        """
        if self._tcp is None and not self._parties:
            return []  # no key is in use, so the list does not matter
        self._charge_answers()
        self._ring.refresh()
        if self._version == self._ring.version:
            return []
        self._version = self._ring.version
        effects: list[QueuedEffect] = []
        for key_id, party in list(self._parties.items()):
            if self._ring.find(key_id) is None:
                del self._parties[key_id]
                self._unfinished.pop(key_id, None)
                effects += self._scheduler.reject_party(
                    party, self._ended(self._keys_of_parties.pop(party)), time.monotonic()
                )
        return effects + self._end_connections()

    def _charge_answers(self) -> None:
        """Charge the keys that have a limit for the tokens that have come for them."""
        now = time.monotonic()
        for key_id, unfinished in list(self._unfinished.items()):
            tokens = unfinished.take_tokens()
            if tokens and (identity := self._ring.find(key_id)) is not None:
                self._ring.allowance(identity, now).charge(tokens, now)
            if not len(unfinished):
                del self._unfinished[key_id]

    def _end_connections(self) -> list[QueuedEffect]:
        effects: list[QueuedEffect] = []
        for connection in () if self._tcp is None else self._tcp.connections_by_channel.values():
            identity = connection.identity
            found = self._ring.find(identity.key_id)
            if found is not None:
                connection.identity = found
                continue
            error = self._ended(identity)
            self._log.info("%s: its connection %d is ended", error.message, connection.channel)
            effects += self._scheduler.reject(connection.channel, error, time.monotonic())
            effects.append(EndConnection(connection.channel, error))
        return effects

    def _ended(self, identity: Identity) -> WireError:
        message = f"key {identity.name!r} {self._ring.ended(identity.key_id)}"
        # The field tells a gateway that a client's key has ended and not its own.
        return WireError(ErrorCode.UNAUTHORIZED, message, field="route.on_behalf_of" if identity.is_http else None)

    # --- for people -----------------------------------------------------------------------------------------------

    def describe_tcp(self) -> dict[str, Any] | None:
        """Return the port over TCP and its keys as ``status`` shows them; None if there is no port."""
        if self._tcp is None:
            return None
        connections: dict[str, int] = {}
        for connection in self._tcp.connections_by_channel.values():
            key_id = connection.identity.key_id
            connections[key_id] = connections.get(key_id, 0) + 1
        self._charge_answers()
        now = time.monotonic()
        keys = [
            {**self._ring.describe(key_id, now), "connections": connections.get(key_id, 0)}
            for key_id in self._ring.tcp_ids
        ]
        return {
            "listen": self._tcp.endpoint,
            "problem": self._tcp.listener.problem,
            "keys": keys,
            "forbidden": self.forbidden,
            "connected_too_often": self._ring.refused_handshakes,
            "cut_off": self._tcp.counters.cut_off,
        }

    def describe_http(self) -> dict[str, Any]:
        """Return the HTTP keys as ``status`` shows them: first those that have sent requests."""
        self._ring.refresh()
        self._charge_answers()
        now, ids = time.monotonic(), self._ring.http_ids
        used = (key_id for key_id in self._parties if key_id in ids)
        others = (key_id for key_id in ids if key_id not in self._parties)
        counts = self._scheduler.unfinished.count_by_party() if ids else {}
        keys = [
            {**self._ring.describe(key_id, now), "unfinished": counts.get(self._parties.get(key_id, 0), 0)}
            for key_id in islice(chain(used, others), MOST_SHOWN)
        ]
        return {"listed": len(ids), "keys": keys}
