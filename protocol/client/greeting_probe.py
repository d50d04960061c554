"""Find out whether ZeroMQ listens at a TCP address, or another program that only takes connections.

The supervisor ends the connection of a client with a wrong key, and CURVE gives no reason. A tunnel, a proxy or a port
forwarding without a supervisor behind it also ends the connection. libzmq reports both cases in the same words. But a
libzmq that listens sends a greeting to each new connection before it knows any key. The probe looks for that greeting.
"""

import errno
import socket
import time
from typing import Final

PROBE_S: Final = 1.0
"""Seconds that the greeting may take."""
_SIGNATURE: Final = b"\xff"
"""The first byte of every greeting of ZMTP 2 and 3."""


class GreetingProbe:
    """A connection to ``tcp://HOST:PORT`` on which nothing is sent.

    Only the look-up of the host's name can block. libzmq has looked the same name up a moment before.
    """

    def __init__(self, endpoint: str) -> None:
        self._end_at = time.monotonic() + PROBE_S
        self._socket: socket.socket | None = None
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[
                0
            ]
            self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            self._socket.connect(address)
        except BlockingIOError:
            pass  # the connect goes on in the background
        except (OSError, ValueError):
            self.close()

    def greeted(self) -> bool | None:
        """Return whether the listener greets as ZeroMQ does. None while that is not known yet."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1) == _SIGNATURE
        except OSError as e:
            waiting = e.errno in (errno.EAGAIN, errno.ENOTCONN) and time.monotonic() < self._end_at
            return None if waiting else False

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
