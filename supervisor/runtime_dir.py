"""The directory with the sockets and the lock: private, and one supervisor's at a time."""

import fcntl
import os
import stat
from pathlib import Path

from protocol.private_paths import NotPrivate, check_place, check_private, make_private


class RuntimeDirError(Exception):
    """The directory cannot be used, or somebody else uses it. One line that says what to do."""


class AlreadyRunning(RuntimeDirError):
    """Another supervisor holds the lock."""


class RuntimeDir:
    """An acquired runtime directory. Binding an ipc socket silently takes over a path in use, hence the lock first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._make_private(path)
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            told = f"cannot open {path / 'lock'}: {e.strerror}; remove it or give --runtime-dir"
            raise RuntimeDirError(told) from None
        try:
            # The directory itself is locked: a file in it may be removed under us by whoever tidies /tmp up.
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._lock_fd, 32).decode(errors="replace").strip()
            raise AlreadyRunning(
                f"a supervisor (pid {pid or 'unknown'}) is already running in {path}; "
                "use it, stop it with `modelctl shutdown`, or give another --runtime-dir"
            ) from None
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as e:
            told = f"cannot write {path / 'lock'}: {e.strerror}; free its disk, or give another --runtime-dir"
            raise RuntimeDirError(told) from None
        self._remove_sockets()  # left by a killed supervisor; the lock says that nobody listens

    @staticmethod
    def _make_private(path: Path) -> None:
        try:
            make_private(path)
            status = path.lstat()
        except OSError as e:
            raise RuntimeDirError(
                f"cannot make the runtime directory {path}: {e.strerror}; give --runtime-dir"
            ) from None
        if not stat.S_ISDIR(status.st_mode):
            raise RuntimeDirError(f"the runtime directory {path} is no directory; remove it or give --runtime-dir")
        try:
            check_private(path, status, or_roots=False)
            check_place(path)
        except (NotPrivate, OSError) as e:
            raise RuntimeDirError(f"the runtime directory {e}, or give another --runtime-dir") from None

    def release(self) -> None:
        """Remove the sockets and give the directory up. The lock file stays: removing it would race with the next."""
        self._remove_sockets()
        os.close(self._lock_fd)
        os.close(self._directory)

    def _remove_sockets(self) -> None:
        for name in ("front", "front.paused", "admin", "admin.paused", "back"):
            (self.path / name).unlink(missing_ok=True)
