"""Tell the process that started this one whether the gateway serves."""

import socket

from protocol.process.gateway_settings import READY, TROUBLE

_MOST_CHARACTERS = 1000


class Reports:
    """The socket to the process that started this one. Nothing is sent if nobody reads there any more."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)

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
