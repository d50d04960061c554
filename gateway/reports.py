"""Tell the process that started this one whether the gateway serves, and hear from it how to write the log."""

import json
import socket

from protocol.process.gateway_settings import READY, TROUBLE
from protocol.process.log_style import LogStyle

_MOST_CHARACTERS = 1000


class Reports:
    """The socket to the process that started this one. Nothing is sent if nobody reads there any more."""

    def __init__(self, channel: socket.socket, unread: bytes = b"") -> None:
        """unread  what was read from the socket behind the settings"""
        self._channel = channel
        self._channel.setblocking(False)
        self._unread = unread

    def log_style(self) -> LogStyle | None:
        """Return how the log is to be written from now on; None if nothing was said about it since the last call."""
        try:
            self._unread += self._channel.recv(_MOST_CHARACTERS)
        except OSError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        return LogStyle(**json.loads(lines[-1])) if lines else None

    def serving(self) -> None:
        """Report that the gateway serves. Call this about once a second: silence counts as a hang."""
        self._send(READY)

    def trouble(self, reason: str) -> None:
        """Report why the gateway cannot serve."""
        self._send(TROUBLE + reason[:_MOST_CHARACTERS].encode())

    def _send(self, data: bytes) -> None:
        try:
            self._channel.send(data)
        except OSError:
            pass
