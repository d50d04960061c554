"""Make, bind and clear the ROUTER sockets of the supervisor."""

import ctypes
import errno
import logging
import os
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

import zmq

from protocol import limits
from supervisor.ports.zap import ZAP_DOMAIN
from supervisor.runtime import SocketFile

# Decide when something that has failed is tried again: the start of a process, or to listen on an address. Pure.


RESTART_S, RESTART_MAX_S = 5.0, 300.0
"""Least and greatest pause in seconds between two starts of a process. The pause doubles with each start that follows
closely on the last, for example because the process that asks the GPU driver ends whenever it opens the driver."""
RETRY_S, RETRY_MAX_S = 0.5, 30.0
"""Least and greatest pause between two attempts to listen, in seconds."""
_PASSING: Final = {
    errno.EADDRNOTAVAIL: "bring the address up on this machine, or give another one",
    errno.EADDRINUSE: "end the program that has the port (`ss -ltnp` shows it), or give another port",
    errno.ENETDOWN: "bring the network up",
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOBUFS: "free memory of the machine",
    errno.ENOMEM: "free memory of the machine",
}
"""The errors that may pass without a change of models.yaml, each with its remedy."""


class Restarts:
    """Decides when a process that may end again and again is started again. The first start is at once.

    first_s  least seconds between two starts
    most_s   greatest pause in seconds; the pause doubles each time while the process ends again soon
    """

    def __init__(self, first_s: float = RESTART_S, most_s: float = RESTART_MAX_S) -> None:
        self._last: float | None = None
        self._first_s, self._most_s = first_s, most_s
        self._pause_s = first_s

    def next(self, now: float) -> bool:
        """Return whether to start the process now."""
        since = None if self._last is None else now - self._last
        if since is not None and since < self._pause_s:
            return False
        follows = since is not None and since < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, self._most_s) if follows else self._first_s
        self._last = now
        return True

    def forget(self) -> None:
        """Have the next start be at once."""
        self._last, self._pause_s = None, self._first_s


class ListenError(Exception):
    """The port can never be opened. The message is one line that says why, and what to do."""


class ListenAttempts:
    """The attempts to listen on one address.

    When a machine starts, an address from DHCP or of a VPN may come minutes after the supervisor. Another program may
    have the port for a while. So ports over TCP, such as ``gateway.listen`` and ``supervisor.listen``, wait for their
    address here.

    address  as people read it
    key      the key of models.yaml that has the address
    problem  why nothing listens there, with the number of attempts; None while it is not known that nothing does
    may_pass  whether the last error may pass without a change of models.yaml
    """

    def __init__(self, address: str, key: str) -> None:
        self.address, self._key = address, key
        self._restarts = Restarts(RETRY_S, RETRY_MAX_S)
        self._reason: str | None = None
        self._remedy = ""
        self._tries = 0
        self.may_pass = True

    def due(self, now: float) -> bool:
        """Return whether to try now. The first attempt is due at once. ``now`` is in monotonic seconds."""
        return self._restarts.next(now)

    def failed(self, error: int) -> str | None:
        """Note that an attempt failed with this errno. Return a line for the log; None if it would say nothing new."""
        self._tries += 1
        before, self._reason = self._reason, os.strerror(error)
        self.may_pass = error in _PASSING
        self._remedy = _PASSING.get(error, "give another port, or an address of this machine")
        if self._reason == before:
            return None
        return f"{self._says()}; it is tried again, at last each {RETRY_MAX_S:.0f} s: {self._remedy}"

    def succeeded(self) -> None:
        """Note that an attempt succeeded."""
        self._reason = None

    @property
    def problem(self) -> str | None:
        if self._reason is None:
            return None
        return f"{self._says()}, tried {self._tries} time{'s' * (self._tries != 1)}; {self._remedy}"

    def _says(self) -> str:
        return f"cannot listen on {self.address} ({self._key}): {self._reason}"


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
    # limit memory, the supervisor ends connections that send too fast, see ``floods``.
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
    """Bind a socket over TCP, if an attempt is due. Return whether that succeeded; the attempts know why not.

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


# Open the monitor of a listening socket so that libzmq cannot get far ahead of the supervisor.
#
# libzmq's own thread takes connections as they come, whether the supervisor's thread runs or not. libzmq aborts the
# process if it finds no descriptor for a connection over ipc. But libzmq's thread waits while the events of its
# monitor are not read. libzmq's end of the monitor's pipe holds 1,000 events, and the supervisor's end as many as its
# mark allows. So libzmq never takes more connections than that before the supervisor has read their events.


UNSEEN = 1000 + 1
"""The most connections that libzmq takes before their events are read: its default mark plus ``_OUR_MARK``."""
_OUR_MARK = 1
_numbers = count(1)
"""Numbers for addresses. An address becomes free only some time after its socket was closed, so none is used twice."""


def open_monitor(context: Context, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return the socket from which the events of ``socket`` can be read.

    events  the events to report, as bits

    Close the returned socket, and do not call ``disable_monitor``: it waits for libzmq's thread, which may be waiting
    for the supervisor to read events. The context's ``term`` wakes that thread and removes the rest of the monitor.
    """
    endpoint = f"inproc://monitor-{next(_numbers)}"
    socket.monitor(endpoint, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, _OUR_MARK)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor
