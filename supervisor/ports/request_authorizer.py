"""Check every message that comes over TCP against the rights and limits of its key, before the loop handles it.

This module also ends the connections of a key that was revoked. ``supervisor.keys`` decides. This module looks things
up and carries the decisions out.
"""

import logging
import time
from typing import Any

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import Events, Generate, Message
from supervisor.keys.rights import check_right
from supervisor.keys.ring import KeyRing
from supervisor.keys.unfinished import Unfinished
from supervisor.ports.client_port import ClientPort
from supervisor.ports.connections import ClientConnection, next_channel
from supervisor.requests.effect_queue import EndConnection, QueuedEffect
from supervisor.requests.model_queue import BYTES_PER_TOKEN
from supervisor.requests.refusals import number_of, refusal
from supervisor.requests.scheduler import Scheduler

REVOKE_S = 0.5
"""Seconds between two checks whether the keys of connected clients are still on the list."""


class RequestAuthorizer:
    """Admits or refuses the messages of connections that have a key."""

    def __init__(
        self,
        port: ClientPort,
        ring: KeyRing,
        scheduler: Scheduler,
        log: logging.Logger,
    ) -> None:
        self.port = port
        self._ring = ring
        self._scheduler = scheduler
        self._log = log
        self._unfinished: dict[str, Unfinished] = {}
        """By public key, the unfinished requests of each key that has a limit."""
        self._parties: dict[str, int] = {}
        """By public key, the number by which workers know the key."""
        self.forbidden = 0

    def party(self, connection: ClientConnection) -> int:
        """Return the number by which workers know the key of a connection. All connections of a key have one number."""
        public_key = connection.identity.public_key
        if public_key not in self._parties:
            self._parties[public_key] = next_channel()
        return self._parties[public_key]

    def admits(self, connection: ClientConnection, message: Message) -> bool:
        """Return whether this message may go on. If not, tell its sender why."""
        try:
            check_right(connection.identity, message)
        except WireError as e:
            self.forbidden += 1
            return self._refuse(connection, message, e)
        if not isinstance(message, Generate):
            return True
        identity, now = connection.identity, time.monotonic()
        try:
            in_flight = self._in_flight(identity.public_key, identity.max_in_flight)
            self._ring.allowance(identity, now).check(in_flight, now)
        except WireError as e:
            return self._refuse(connection, message, e)
        return True

    def note(self, connection: ClientConnection, message: Generate) -> None:
        """Count a request against its key's limits, if the scheduler has accepted it."""
        key = connection.channel, message.request
        if self._scheduler.holds(*key):
            identity = connection.identity
            if identity.max_in_flight is not None:
                if (own := self._unfinished.get(identity.public_key)) is None:
                    own = self._unfinished[identity.public_key] = Unfinished(self._scheduler.holds)
                own.add(*key)
            now = time.monotonic()
            self._ring.allowance(identity, now).charge(1 + len(message.body) // BYTES_PER_TOKEN, now)

    def charge(self, message: Events) -> None:
        """Charge the key of the connection that a frame is for with the tokens in this frame."""
        connection = self.port.connections_by_channel.get(message.channel)
        if connection is not None and connection.identity.tokens_per_minute is not None:
            now = time.monotonic()
            tokens = sum(entry[3] for entry in message.index)
            self._ring.allowance(connection.identity, now).charge(tokens, now)

    def charge_party(self, party: int, tokens: int) -> None:
        """Charge a key for a constraint that a worker compiled, even if the key's connection has ended meanwhile."""
        public_key = next((key for key, number in self._parties.items() if number == party), None)
        if public_key is not None and (identity := self._ring.find(public_key)) is not None:
            now = time.monotonic()
            self._ring.allowance(identity, now).charge(tokens, now)

    def refresh(self) -> list[QueuedEffect]:
        """Apply the present list of keys to the connections. Return the effects that end those with a revoked key.

        The requests of such a connection end first, so that its client reads their errors.
        """
        effects: list[QueuedEffect] = []
        if self._ring.refresh():
            self._unfinished = {key: own for key, own in self._unfinished.items() if self._ring.find(key) is not None}
            self._parties = {key: party for key, party in self._parties.items() if self._ring.find(key) is not None}
        for connection in self.port.connections_by_channel.values():
            identity = connection.identity
            found = self._ring.find(identity.public_key)
            if found is identity:
                continue
            if found is not None:
                connection.identity = found
                continue
            self._log.info("key %r was revoked: its connection %d is ended", identity.name, connection.channel)
            error = WireError(ErrorCode.UNAUTHORIZED, f"key {identity.name!r} was revoked")
            effects += self._scheduler.reject(connection.channel, error, time.monotonic())
            effects.append(EndConnection(connection.channel, error))
        return effects

    def describe(self) -> dict[str, Any]:
        """Return the port and its keys as ``status`` shows them."""
        connections: dict[str, int] = {}
        for connection in self.port.connections_by_channel.values():
            public_key = connection.identity.public_key
            connections[public_key] = connections.get(public_key, 0) + 1
        return {
            "listen": self.port.endpoint,
            "keys": self._ring.describe(connections, time.monotonic()),
            "forbidden": self.forbidden,
            "connected_too_often": self._ring.refused_handshakes,
            "cut_off": self.port.counters.cut_off,
        }

    def _in_flight(self, public_key: str, limit: int | None) -> int:
        unfinished = self._unfinished.get(public_key)
        return 0 if unfinished is None or limit is None else unfinished.count(limit)

    def _refuse(self, connection: ClientConnection, message: Message, error: WireError) -> bool:
        number = number_of(message)
        runs = self._scheduler.holds(connection.channel, number)
        frame = encode(refusal(error, message.kind, number, runs=runs))
        self.port.send(connection.channel, frame)
        return False
