"""Find local connections that fill libzmq's memory with messages that libzmq never passes on to the supervisor.

libzmq reads a message of several parts whole before it passes any part on, however long the message grows. libzmq also
reads the messages of a client that chose the routing id of another connection, and never passes them on. Over TCP the
kernel counts the bytes of each connection (see ``tcp_listener``). For a local connection the kernel tells only how many
bytes are unread.
"""

import fcntl
import sys
from collections.abc import Callable, Collection

from protocol import limits

GROWTH = 4 * limits.SOCKET_MAX_FRAME
"""Bytes that the process must have grown by before a connection is suspected."""
GATHERED = limits.SOCKET_MAX_FRAME
"""Bytes that the process must have grown by since a connection was suspected, before that connection is ended. On a
busy machine libzmq's thread may get no processor for longer than the time between checks. Then a quick client that
sends many requests at once has a full buffer and brings no message. But libzmq's memory does not grow in that time."""
UNREAD = 32 << 10
"""Bytes that a suspected connection must have in the kernel's buffer. A flood is faster than libzmq and keeps the
buffer full. A client's request is mostly smaller."""
_FIONREAD = 0x541B


class Gathering:
    """The suspected connections of one port. This class decides which connections to end when memory grows too much.

    A connection is suspected if it has brought no message since the last check, although UNREAD of its bytes wait to
    be read. A connection is to end if each check suspects it while the process grows by GATHERED.
    """

    def __init__(self) -> None:
        self._calm: int | None = None
        """Bytes that the process had in memory when a check last found growth and suspected no connection, or at the
        first check. None before that."""
        self._suspects: dict[int, int] = {}
        """By descriptor: bytes that the process had in memory when the connection became suspected."""

    def find_abusers(self, resident: int, accepted: Collection[int], heard: Callable[[], Collection[int]]) -> set[int]:
        """Return the descriptors of the connections to end.

        resident  bytes that the process has in memory
        accepted  the descriptors of all connections
        heard     a function that returns the descriptors of connections that brought a message since its last call
        """
        if self._calm is None:
            self._calm = resident
        if resident - self._calm < GROWTH:
            self._suspects = {}
            return set()
        speaking = heard()
        self._suspects = {
            fd: min(self._suspects.get(fd, resident), resident)
            for fd in accepted
            if fd not in speaking and _has_unread(fd)
        }
        if not self._suspects:
            self._calm = resident
        return {fd for fd, before in self._suspects.items() if resident - before >= GATHERED}


def _has_unread(fd: int) -> bool:
    try:
        return int.from_bytes(fcntl.ioctl(fd, _FIONREAD, bytes(4)), sys.byteorder) >= UNREAD
    except OSError:  # closed meanwhile
        return False
