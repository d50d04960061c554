"""The file through which peers find a bound ipc socket. It can be hidden for a time, and made again if it is lost."""

import os
from contextlib import suppress

import zmq

from protocol.process.runtime_paths import PAUSED


class SocketFile:
    """Binds the socket at once. Only our own user can connect to it: the file has mode 0600."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Raises ZMQError, OSError."""
        self._socket = socket
        self._endpoint = endpoint
        self.path = endpoint.removeprefix("ipc://")
        self._hidden = False
        self._bind()

    def hide(self) -> None:
        """Let nobody connect any more. Connections that exist go on.

        The file is moved away. To unbind would not do: libzmq ends with a listener all that the listener has accepted.
        """
        self._hidden = True
        self._move(self.path, self.path + PAUSED)

    def show(self) -> None:
        """Let peers connect again."""
        self._hidden = False
        self._move(self.path + PAUSED, self.path)

    def is_lost(self) -> bool:
        """Return whether the file is gone, or is not ours any more."""
        try:
            return _identity(self._name) != self._bound
        except FileNotFoundError:
            return True

    def make_again(self) -> None:
        """Bind the socket a second time, because its file is lost. Connections that exist go on.

        The listener without a file stays open, with one descriptor, as long as the socket: to unbind would end the
        connections. Raises ZMQError, OSError.
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
