"""The private directory with the sockets and the lock. Only one supervisor at a time may have it."""

import fcntl
import os
from pathlib import Path

from protocol.process.private_paths import NotPrivate, check_place, check_private, make_private
from protocol.process.runtime_paths import ADMIN, BACK, FRONT, PAUSED

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
