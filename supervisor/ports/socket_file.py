"""The file of a bound ipc socket, through which peers find the socket.

The supervisor can hide the file for a time, and make it again if it is lost.
"""

import os
from contextlib import suppress

import zmq

from protocol.process.runtime_paths import PAUSED


class SocketFile:
    """The file of one socket. It has mode 0600, so only the supervisor's own user can connect."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind the socket. Raises ZMQError, OSError."""
        self._socket = socket
        self._endpoint = endpoint
        self.path = endpoint.removeprefix("ipc://")
        self._hidden = False
        self._bind()

    def hide(self) -> None:
        """Let nobody connect any more. Connections that exist go on.

        The file is moved away. The socket must stay bound: when libzmq unbinds a listener, it also ends all connections
        that the listener has accepted.
        """
        self._hidden = True
        self._move(self.path, self.path + PAUSED)

    def show(self) -> None:
        """Let peers connect again."""
        self._hidden = False
        self._move(self.path + PAUSED, self.path)

    def is_lost(self) -> bool:
        """Return whether the file is gone, or another file has its name."""
        try:
            return _identity(self._name) != self._bound
        except FileNotFoundError:
            return True

    def make_again(self) -> None:
        """Bind the socket a second time, because its file is lost. Connections that exist go on.

        The listener without a file stays open as long as the socket, and uses one descriptor: to unbind it would end
        the connections. Raises ZMQError, OSError.
        """
        self._bind()
        if self._hidden:
            self.hide()

    @property
    def _name(self) -> str:
        return self.path + PAUSED if self._hidden else self.path

    def _bind(self) -> None:
        previous = os.umask(0o177)
        try:
            self._socket.bind(self._endpoint)
        finally:
            os.umask(previous)
        os.chmod(self.path, 0o600)
        self._bound = _identity(self.path)

    def _move(self, old: str, new: str) -> None:
        with suppress(FileNotFoundError):  # it is lost, and will be made again under the right name
            os.rename(old, new)


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
