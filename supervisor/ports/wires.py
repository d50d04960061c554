"""End one connection of a libzmq socket, for which libzmq has no call.

The socket's monitor and SRCFD tell the descriptor of a connection. ``shutdown(2)`` on that descriptor looks to libzmq
like a peer that has left. The system uses descriptors again. So this module notes the kernel's socket behind a
descriptor when libzmq accepts the connection, and compares it before each action.
"""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

LAST_WORD_S = 0.5
"""Seconds between the ERROR that tells a client why, and the end of its connection."""
MOST_AFTER_LAST_WORD = 4096
"""Frames that a connection may send during LAST_WORD_S. A connection that sends more is ended at once."""

WRITE_S = 0.02
"""Seconds for libzmq to write the ERROR before the supervisor stops it from reading more of the connection. When
libzmq sees the end of a connection, it drops what it has not written, and the client would not learn why."""

T = TypeVar("T")
KernelSocket = tuple[int, int]
"""Device and inode number. No two sockets that exist at the same time have the same."""


@dataclass(slots=True)
class Wire:
    """An accepted descriptor.

    socket  the kernel's socket behind the descriptor; None if that was closed before the supervisor asked
    read    bytes received up to the check that last found a complete message
    silent  how many checks of the limits have found that no message came since the descriptor was accepted
    """

    socket: KernelSocket | None
    read: int = 0
    silent: int = 0


@dataclass(slots=True)
class _Ending:
    at: float
    fd: int
    wire: Wire
    hears: bool
    frames: int = 0


class Endings:
    """Connections, by routing id, whose clients were told why they end. They are shut down LAST_WORD_S later."""

    def __init__(self) -> None:
        self._endings: dict[bytes, _Ending] = {}

    def add(self, routing_id: bytes, fd: int, wire: Wire, now: float, *, hears: bool) -> None:
        """Shut this connection down LAST_WORD_S after ``now``.

        hears  False if libzmq is to read no more of the connection once it has had WRITE_S to write the ERROR
        """
        self._endings[routing_id] = _Ending(now + LAST_WORD_S, fd, wire, hears)

    def count(self, routing_id: bytes) -> None:
        """Count a dropped frame of an ended connection. Shut the connection down now if it goes on sending."""
        ending = self._endings.get(routing_id)
        if ending is not None:
            ending.frames += 1
            if ending.frames > MOST_AFTER_LAST_WORD:
                del self._endings[routing_id]
                shut_down(ending.fd, ending.wire)

    def end_overdue(self, now: float) -> None:
        """Shut down the connections whose time has come."""
        for routing_id, ending in list(self._endings.items()):
            if ending.at <= now:
                del self._endings[routing_id]
                shut_down(ending.fd, ending.wire)
            elif not ending.hears and ending.at - LAST_WORD_S + WRITE_S <= now:
                ending.hears = True  # once is enough
                stop_reading(ending.fd, ending.wire)


def socket_behind(fd: int) -> KernelSocket | None:
    """Return the kernel's socket of which this is a descriptor now; None if the descriptor is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def process_of(fd: int) -> int:
    """Return the pid of a local client; 0 if it is not known, as over TCP."""
    credentials = borrow(fd, lambda borrowed: borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return 0 if credentials is None else int.from_bytes(credentials[:4], sys.byteorder, signed=True)


def shut_down(fd: int, wire: Wire) -> None:
    """End the connection, unless it has ended by itself and the descriptor is another connection's by now."""
    if wire.socket is not None and socket_behind(fd) == wire.socket:
        borrow(fd, lambda borrowed: borrowed.shutdown(socket.SHUT_RDWR))


def stop_reading(fd: int, wire: Wire) -> None:
    """Let libzmq read what the kernel has already received on this connection, and no more.

    Over ipc the client can send nothing more. libzmq reads the rest, some 200 KB, and then sees the end of the
    connection. libzmq should have written the ERROR that tells the client why before it sees that end, see WRITE_S.
    Over TCP the client's kernel goes on sending, and the connection ends at ``shut_down``.
    """
    if wire.socket is not None and socket_behind(fd) == wire.socket:
        borrow(fd, lambda borrowed: borrowed.shutdown(socket.SHUT_RD))


def borrow(fd: int, act: Callable[[socket.socket], T]) -> T | None:
    """Call ``act`` with libzmq's descriptor as a socket, and return the result. Return None if the descriptor is closed
    or the peer has left."""
    try:
        # Python asks the kernel for fewer properties if the kind is given. The family may be wrong, so ``act`` must not
        # ask for addresses.
        borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        return act(borrowed)
    except OSError:
        return None
    finally:
        borrowed.detach()
