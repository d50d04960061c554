"""The private directory with the sockets and the lock. Only one supervisor at a time may have it."""

import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.process.paths import ADMIN, BACK, FRONT, PAUSED, NotPrivate, check_place, check_private, make_private

LOCK = "lock"
"""The file that holds the pid of the supervisor that has the directory."""
SOCKETS = (FRONT, FRONT + PAUSED, ADMIN, ADMIN + PAUSED, BACK)


class RuntimeDirError(Exception):
    """The directory cannot be used, or another supervisor uses it. The message is one line that says what to do."""


class AlreadyRunning(RuntimeDirError):
    """Another supervisor holds the lock."""


class RuntimeDir:
    """An acquired runtime directory.

    The lock comes first, because binding an ipc socket silently takes over a path that is in use. The directory is held
    open. The checks and the lock apply to the open directory, so nobody can exchange it in between.
    """

    def __init__(self, path: Path) -> None:
        """Make and lock the directory. Raises RuntimeDirError, OSError."""
        self.path = path
        self._directory = _acquire(path)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the directory that is held."""
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._directory))
        except OSError:
            return False

    def make_again(self) -> None:
        """Make and lock the directory again, because it was removed. Raises RuntimeDirError, OSError."""
        new = _acquire(self.path)
        os.close(self._directory)
        self._directory = new

    def release(self) -> None:
        """Remove the sockets and give up the directory. The lock file stays: removing it would race with the next
        supervisor."""
        _remove_sockets(self.path, self._directory)
        os.close(self._directory)


def _acquire(path: Path) -> int:
    """Make the directory if it is missing, and lock it. Returns its descriptor. Raises RuntimeDirError, OSError."""
    directory = _open_private(path)
    try:
        _lock(path, directory)
        _remove_sockets(path, directory)  # left by a killed supervisor; because of the lock nobody listens
    except BaseException:
        os.close(directory)
        raise
    return directory


def _open_private(path: Path) -> int:
    try:
        make_private(path)
    except OSError as e:
        raise RuntimeDirError(f"cannot make the runtime directory {path}: {e.strerror}; give --runtime-dir") from None
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        message = f"the runtime directory {path} is no directory; remove it or give --runtime-dir"
        raise RuntimeDirError(message) from None
    try:
        check_private(path, os.fstat(directory), or_roots=False)
        check_place(path)
    except (NotPrivate, OSError) as e:
        os.close(directory)
        raise RuntimeDirError(f"the runtime directory {e}, or give another --runtime-dir") from None
    return directory


def _lock(path: Path, directory: int) -> None:
    try:
        file = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    except OSError as e:
        message = f"cannot open {path / LOCK}: {e.strerror}; remove it or give --runtime-dir"
        raise RuntimeDirError(message) from None
    try:
        # The directory itself is locked, and not the file. Cleaners of /tmp remove a file that is not locked.
        # systemd-tmpfiles skips a directory with all its content while another process has it locked.
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        pid = os.read(file, 32).decode(errors="replace").strip()
        raise AlreadyRunning(
            f"a supervisor (pid {pid or 'unknown'}) is already running in {path}; "
            "use it, stop it with `modelctl shutdown`, or give another --runtime-dir"
        ) from None
    except OSError as e:
        message = f"cannot write {path / LOCK}: {e.strerror}; free its disk, or give another --runtime-dir"
        raise RuntimeDirError(message) from None
    finally:
        os.close(file)


def _remove_sockets(path: Path, directory: int) -> None:
    for name in SOCKETS:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        except OSError as e:
            message = f"cannot remove {path / name}: {e.strerror}; remove it, or give another --runtime-dir"
            raise RuntimeDirError(message) from None


# The file of a bound ipc socket, through which peers find the socket.
#
# The supervisor can hide the file for a time, and make it again if it is lost.


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


# Keep a running supervisor reachable when somebody removes its runtime directory, or a socket in it.


CHECK_S = 1.0
"""Seconds between two checks. A check takes four system calls."""


@dataclass(eq=False, repr=False)
class RuntimeWatch:
    """The checks whether the directory and the sockets are in their places. Missing ones are made again.

    files       the files of the sockets that are bound in the directory
    made_again  called after the directory was made again, to write the other files that belong into it
    """

    _runtime: RuntimeDir
    _files: Sequence[SocketFile]
    _made_again: Callable[[], None]
    _log: logging.Logger

    def __post_init__(self) -> None:
        self._trouble: str | None = None

    def restore_missing(self) -> None:
        """Make a missing directory or socket again, and say so in the log. The loop calls this every CHECK_S.

        A failure is logged once, and the next call tries again.
        """
        try:
            self._restore()
            self._trouble = None
        except (RuntimeDirError, OSError, zmq.ZMQError) as e:
            if self._trouble != str(e):
                self._trouble = str(e)
                self._log.error(
                    "new clients and workers cannot connect: the runtime directory or a socket in it was removed, and "
                    "cannot be made again: %s. Connections that exist go on. This is tried again every second; "
                    "`kill %d` stops this supervisor",
                    e,
                    os.getpid(),
                )

    def _restore(self) -> None:
        moved = not self._runtime.is_in_place()
        if moved:
            self._runtime.make_again()
        lost = [file for file in self._files if file.is_lost()]
        for file in lost:
            file.make_again()
        if moved:
            self._made_again()
        if lost:
            self._log.warning(
                "%s was removed by another process, and was made again; connections that exist go on",
                f"the runtime directory {self._runtime.path}" if moved else ", ".join(file.path for file in lost),
            )
