"""Make, bind and clear the ROUTER sockets of the supervisor."""

import ctypes
import logging
import os
from collections.abc import Mapping
from typing import Any

import zmq

from protocol import limits
from supervisor.attempts import ListenAttempts
from supervisor.ports.socket_file import SocketFile
from supervisor.ports.zap import ZAP_DOMAIN

PARTS_LIMIT = 2048
"""Parts of one message that are read and dropped per turn of the loop. A message may have millions of parts."""

Context = zmq.Context[zmq.Socket[bytes]]


def skip_parts(socket: zmq.Socket[bytes]) -> bool:
    """Read and drop up to PARTS_LIMIT parts of a message. Return whether none is left. The first part has been read."""
    for _ in range(PARTS_LIMIT):
        if not socket.getsockopt(zmq.RCVMORE):
            return True
        socket.recv(zmq.NOBLOCK)
    return not socket.getsockopt(zmq.RCVMORE)


def router(context: Context) -> zmq.Socket[bytes]:
    """Return a ROUTER that reports when a peer is gone, and ends connections that send frames beyond 16 MiB.

    No peer receives the frames of another peer, and no peer can guess a routing id. libzmq numbers its connections,
    beginning with a number that the C library draws. The number is the same in each process unless the generator is
    seeded. A peer that chose the next number as its routing id would make libzmq abort the process.
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

    backlog  connections that the kernel may have ready for the supervisor
    """
    socket = router(context)
    # Credit limits how many events of a stream are on the way. This mark is only the last protection.
    socket.setsockopt(zmq.SNDHWM, 100_000)
    # No receive mark: at the mark libzmq 4.3.5 stops reading a client. If that client then leaves, libzmq aborts the
    # process (an assertion on _io_error) when it finds a PING of ZMTP in its buffer, or when a heartbeat is due. To
    # limit memory, the supervisor ends connections that send too fast, see ``arrivals``.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.BACKLOG, backlog)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    return socket


def try_bind(
    socket: zmq.Socket[bytes],
    attempts: ListenAttempts,
    now: float,
    log: logging.Logger,
    extra: Mapping[str, Any] | None = None,
) -> bool:
    """Bind a socket over TCP, if an attempt is due. Return whether that succeeded; ``attempts`` knows why not.

    attempts  those for this socket. Their address is the endpoint
    extra     of the log record that says why not
    """
    if not attempts.due(now):
        return False
    try:
        socket.bind(attempts.address)
    except zmq.ZMQError as e:
        if (line := attempts.failed(e.errno or 0)) is not None:
            log.error("%s", line, extra=extra)
        return False
    attempts.succeeded()
    return True


def admit_keys_only(socket: zmq.Socket[bytes], endpoint: str, secret_key: bytes, domain: bytes) -> None:
    """Have a socket over TCP, which is not bound yet, admit only peers with a key that ``ZapHandler`` knows (CURVE).

    secret_key  the socket's own, as Z85 text
    domain      as for ``bind_private``
    """
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def bind_private(socket: zmq.Socket[bytes], endpoint: str, domain: bytes = ZAP_DOMAIN) -> SocketFile:
    """Bind an ipc socket to which only processes of the supervisor's user can connect, and return its file.

    domain  the ZAP domain, by which ``ZapHandler`` decides about a connection
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return SocketFile(socket, endpoint)
