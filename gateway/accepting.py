"""Accept connections, a few in each turn of the loop, and count them from then on.

uvloop's own server reports a connection with TLS only after the handshake. It also accepts everything that the kernel
has ready before it closes anything, so a burst would use up every descriptor.
"""

import asyncio
import logging
import socket
from collections import deque
from contextlib import suppress
from typing import Final

import uvicorn

from gateway.connection import LINGER_S, Connection, error_answer
from gateway.http.errors import ApiError
from gateway.places import Places

AT_ONCE: Final = 8
"""Connections that are accepted in one turn of the loop. A connection that makes way is closed two turns later, so
there may be three times as many above the limit. ``SPARE`` is more than that."""
REFUSED: Final = 16
"""Most connections that were refused and are not closed yet. They also take of ``SPARE``."""
HANDSHAKE_S: Final = 5.0
"""Seconds in which the TLS handshake must come."""
RETRY_S: Final = 0.2
"""Seconds until the next try, if the system has no descriptor or no memory for a connection."""
NEWS_S: Final = 60.0
"""Least seconds between two lines of the log about connections that made way or found no place."""

_log = logging.getLogger(__name__)


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, with connections that are accepted here.

    places  the places for its connections
    """

    def __init__(self, config: uvicorn.Config, places: Places) -> None:
        super().__init__(config)
        self.places = places
        self._listeners: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: deque[socket.socket] = deque()
        self._told = (0, 0)
        self._told_at = -NEWS_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections from these sockets."""
        await super().startup(sockets=[])
        self._listeners = list(sockets or [])
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._watch(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and complete the answers."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._listeners = []
        for task in self._opening:
            task.cancel()
        while self._refused:
            self._refused.pop().close()
        await super().shutdown(sockets)

    def tell_news(self, now: float) -> None:
        """Log how many connections made way or found no place, at most once in ``NEWS_S``. ``now``: monotonic."""
        known = self.places.made_way, self.places.refused
        if known == self._told or now - self._told_at < NEWS_S:
            return
        made_way, refused = (new - old for new, old in zip(known, self._told, strict=True))
        _log.warning(
            "all %d places for connections were taken: %d connections that waited for their clients made way for new "
            "ones, and %d new ones were refused; raise gateway.processes or the limit of descriptors (ulimit -n) if "
            "these clients are welcome",
            self.places.most, made_way, refused,
        )  # fmt: skip
        self._told, self._told_at = known, now

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                client, _address = listener.accept()
            except BlockingIOError:  # another process may have been faster
                return
            except ConnectionError:  # the client has left already
                continue
            except OSError as e:
                _log.warning("no connection can be accepted for %g s: %s", RETRY_S, e.strerror)
                loop.remove_reader(listener)
                loop.call_later(RETRY_S, self._watch, listener)
                return
            client.setblocking(False)
            connection = Connection(self.config, self.server_state, self.lifespan.state, self.places)
            if self.places.enter(connection):
                connection.opening = loop.create_task(self._open(connection, client))
                self._opening.add(connection.opening)
                connection.opening.add_done_callback(self._opening.discard)
            else:
                self._refuse(client)

    async def _open(self, connection: Connection, client: socket.socket) -> None:
        """Make a connection of an accepted socket, after the TLS handshake if there is one."""
        tls, loop = self.config.ssl, asyncio.get_running_loop()
        handshake_s = None if tls is None else HANDSHAKE_S
        try:
            with suppress(OSError):  # also an error of OpenSSL, and a handshake that took too long
                await loop.connect_accepted_socket(
                    lambda: connection, client, ssl=tls, ssl_handshake_timeout=handshake_s
                )
        finally:
            if not connection.made:
                self.places.leave(connection)

    def _refuse(self, client: socket.socket) -> None:
        """Close the socket of a client that finds no place. Without TLS tell it why, and give it time to read that."""
        if self.config.ssl is not None:
            client.close()
            return
        what = f"this process of the gateway has {self.places.most} connections, which is its limit"
        error = ApiError(503, f"{what}: try again, or raise gateway.processes", code="overloaded")
        with suppress(OSError):
            client.send(error_answer(error))
            client.shutdown(socket.SHUT_WR)
        self._refused.append(client)
        if len(self._refused) > REFUSED:
            self._refused.popleft().close()
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, client)

    def _forget(self, client: socket.socket) -> None:
        if client in self._refused:
            self._refused.remove(client)
            client.close()
