"""Speak with the process that started this one.

This process says whether it serves, and which sessions of the page people have ended. The other process says how to
write the log, and which sessions have ended at other processes of the gateway.
"""

import json
import socket

from protocol.process.gateway_settings import ENDED, READY, TROUBLE
from protocol.process.log_style import LogStyle

_MOST_CHARACTERS = 1000
_MOST_BYTES = 1 << 16


class Reports:
    """The socket to the process that started this one. Nothing is sent if nobody reads there any more."""

    def __init__(self, channel: socket.socket, unread: bytes = b"") -> None:
        """unread  what was read from the socket behind the settings"""
        self._channel = channel
        self._channel.setblocking(False)
        self._unread = unread
        self._unsent = b""

    def hear(self) -> tuple[LogStyle | None, list[str]]:
        """Return what was said since the last call: how the log is to be written from now on (None: as it is), and the
        sessions that were ended elsewhere (``Session.text``)."""
        try:
            while more := self._channel.recv(_MOST_BYTES):
                self._unread += more
        except OSError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        said = [json.loads(line) for line in lines]
        styles = [each for each in said if "ended" not in each]
        ended = [each["ended"] for each in said if "ended" in each]
        return LogStyle(**styles[-1]) if styles else None, ended

    def serving(self) -> None:
        """Report that the gateway serves. Call this about once a second: silence counts as a hang."""
        self._send(READY)

    def ended(self, session: str) -> None:
        """Report that a session of the page was ended. ``session`` is its ``text``."""
        self._send(ENDED + session.encode() + b"\n")

    def trouble(self, reason: str) -> None:
        """Report why the gateway cannot serve."""
        self._send(TROUBLE + reason[:_MOST_CHARACTERS].encode())

    def _send(self, data: bytes) -> None:
        self._unsent += data
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:  # nobody reads now: the next report sends it
            pass
        except OSError:
            self._unsent = b""
