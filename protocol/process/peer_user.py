"""Check who listens at the other end of an ipc connection. The kernel answers, so nobody can forge the answer.

A client checks only after libzmq has connected. The name of a socket proves nothing: another user may put a socket of
their own in its place between a check of the name and the connect. The connection itself cannot be exchanged.

Only our own user is accepted. Root is refused, too, for two reasons. A supervisor admits its own user only, so other
users cannot use a supervisor of root. And the kernel records the user that called listen(): systemd, as root, calls it
for sockets that it then hands to services of other users.
"""

import os
import socket
import struct

_PEER = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


def check_listener(descriptor: int) -> int:
    """Return the pid of the process that listens at the other end. Raise PermissionError, with the uid, unless the
    process is one of our own user.

    descriptor  a connected Unix socket

    The pid is that of our own PID namespace, and 0 if the process is not visible there.

    Raises another OSError if the descriptor is no Unix socket: libzmq may have closed it, and its number may be in use
    again. The check may pass if that number is another Unix socket by now. That is harmless: the connection has ended,
    and the caller has told libzmq not to reconnect, so nothing can be sent over it.
    """
    # fromfd duplicates the descriptor: closing the duplicate, whenever that happens, leaves libzmq its own.
    with socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        family = connection.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if family != socket.AF_UNIX:
            raise OSError(f"descriptor {descriptor} is a socket of family {family}")
        pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise PermissionError(f"a process of uid {uid}, and not of yours ({os.getuid()}), listens there")
    return int(pid)
