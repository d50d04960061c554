"""Find local connections that fill libzmq's memory with messages that libzmq never hands over.

libzmq reads a message of several parts whole before it passes any part on, however long the message grows. It also
reads the messages of a client that chose the routing id of another connection, and never passes them on. Over TCP the
kernel counts the bytes of each connection (see ``tcp_listener``). Of a local connection it tells only how much is
unread.
"""

import fcntl
import sys
from collections.abc import Callable, Collection

from protocol import limits

GROWTH = 4 * limits.SOCKET_MAX_FRAME
"""Bytes that the process must have grown by before a connection is suspected."""
UNREAD = 32 << 10
"""Bytes that a suspected connection must have in the kernel's buffer. A flood is faster than libzmq and keeps the
buffer full. A client's request is mostly smaller. On a busy machine libzmq may leave it unread for two checks, which
are 50 ms apart: a client beside a flood lost its connection for that."""
_FIONREAD = 0x541B


class Gathering:
    """Decides which connections to end, once the memory has grown by too much.

    It ends a connection that in two checks in a row brought no message, while libzmq had UNREAD bytes of it to read.
    """

    def __init__(self) -> None:
        self._calm: int | None = None
        """Bytes that the process had in memory when no connection was suspected the last time."""
        self._suspects: set[int] = set()

    def find_abusers(self, resident: int, accepted: Collection[int], heard: Callable[[], Collection[int]]) -> set[int]:
        """Return the descriptors of the connections to end.

        resident  bytes that the process has in memory
        accepted  the descriptors of all connections
        heard     a function that returns the descriptors of connections that brought a message since its last call
        """
        if self._calm is None:
            self._calm = resident
        if resident - self._calm < GROWTH:
            self._suspects = set()
            return self._suspects
        before = self._suspects
        speaking = heard()
        self._suspects = {fd for fd in accepted if fd not in speaking and _has_unread(fd)}
        if not self._suspects:
            self._calm = resident
        return before & self._suspects


def _has_unread(fd: int) -> bool:
    try:
        return int.from_bytes(fcntl.ioctl(fd, _FIONREAD, bytes(4)), sys.byteorder) >= UNREAD
    except OSError:  # closed meanwhile
        return False
