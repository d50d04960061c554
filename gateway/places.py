"""Decide which connections may exist, and which one makes way for a newcomer.

Nobody needs a token to open a connection. So a client could hold all of them: with no TLS handshake, with half a
request, or with answers that it does not read. Therefore each connection counts from the moment at which it is
accepted, and at the limit the gateway ends the connection that it has waited for longest.
"""

import resource
from typing import Final, Protocol

MOST_CONNECTIONS: Final = 8192
"""Most connections of one process."""
SPARE: Final = 64
"""Descriptors for other things than connections: sockets to the supervisor, the log, files that are read, and
connections that make way and are not closed yet."""


class Guest(Protocol):
    """A connection, as ``Places`` knows it."""

    def make_way(self) -> None:
        """End now. Whatever was not sent is lost."""


class Places:
    """The places for the connections of a process. Pure.

    most     connections that there may be
    made_way, refused  connections that made way for newcomers, and newcomers that found no place
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.made_way = self.refused = 0
        self._taken: set[Guest] = set()
        # The ones that the gateway waits for, in the order of their last sign of life. An idle connection of a client
        # that has been served is worth more than one that never sent a whole request.
        self._strangers: dict[Guest, None] = {}
        self._waited_for: dict[Guest, None] = {}

    def enter(self, guest: Guest) -> bool:
        """Give a new connection a place, and have another make way if there is none. Return whether it has a place."""
        if len(self._taken) >= self.most:
            waiting = self._strangers or self._waited_for
            if not waiting:
                self.refused += 1
                return False
            oldest = next(iter(waiting))
            self.leave(oldest)
            self.made_way += 1
            oldest.make_way()
        self._taken.add(guest)
        self._strangers[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        """Note that a connection has ended."""
        self._taken.discard(guest)
        self._strangers.pop(guest, None)
        self._waited_for.pop(guest, None)

    def wait_for(self, guest: Guest) -> None:
        """Note that a connection showed life, and that the gateway waits for its client again."""
        if guest in self._strangers:
            self._strangers[guest] = self._strangers.pop(guest)
        elif guest in self._taken:
            self._waited_for.pop(guest, None)
            self._waited_for[guest] = None

    def serve(self, guest: Guest) -> None:
        """Note that a connection has brought a whole request, and that its client waits for the gateway."""
        self._strangers.pop(guest, None)
        self._waited_for.pop(guest, None)


def connection_limit() -> int:
    """Return the number of connections that this process may have. Raise its limit of descriptors for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - SPARE)
    return MOST_CONNECTIONS
