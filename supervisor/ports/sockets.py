"""What all ROUTERs of the supervisor have in common."""

import ctypes
import os

import zmq

from protocol import limits
from supervisor.ports.socket_file import SocketFile
from supervisor.ports.zap import ZAP_DOMAIN

PARTS_LIMIT = 2048
"""Parts of a message of several that are read and dropped per turn of the loop: one may have millions."""

Context = zmq.Context[zmq.Socket[bytes]]


def skip_parts(socket: zmq.Socket[bytes]) -> bool:
    """Read and drop what is left of a message of several parts; whether that was all. Its first part has been read."""
    for _ in range(PARTS_LIMIT):
        if not socket.getsockopt(zmq.RCVMORE):
            return True
        socket.recv(zmq.NOBLOCK)
    return not socket.getsockopt(zmq.RCVMORE)


def router(context: Context) -> zmq.Socket[bytes]:
    """A ROUTER that says when a peer is gone, gives no peer another's frames, and cuts off frames beyond 16 MiB.

    Nobody can know its routing ids. libzmq numbers connections, from a number that the C library draws and that is the
    same in each process unless the generator is seeded. A peer that chose the next number for its routing id would make
    libzmq abort the process.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.SOCKET_MAX_FRAME)
    return socket


def client_router(context: Context, backlog: int) -> zmq.Socket[bytes]:
    """Return a ROUTER for clients, which is not bound yet.

    backlog  connections that the kernel may have ready for us
    """
    socket = router(context)
    # Credit bounds what a stream can have on the way; the mark is only the last fuse.
    socket.setsockopt(zmq.SNDHWM, 100_000)
    # No mark: at the mark libzmq 4.3.5 stops reading. If such a client then goes away, and libzmq comes to a PING of
    # ZMTP in what it had buffered, or a heartbeat is due, it aborts the process (an assertion on _io_error). The memory
    # is bounded by ending connections that send too fast, see ``arrivals``.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.BACKLOG, backlog)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    return socket


def bind_private(socket: zmq.Socket[bytes], endpoint: str, domain: bytes = ZAP_DOMAIN) -> SocketFile:
    """Bind an ipc socket that only our own user can connect to: mode 0600, and the ZAP domain that says who may."""
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return SocketFile(socket, endpoint)
