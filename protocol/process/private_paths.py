"""Check that only the process's own user can reach a file with a key, or a directory with sockets.

Each check looks at owners and modes. Its error names the path and says what to do.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_LINKS: Final = 40
"""Most symbolic links on the way to one directory. The kernel has the same limit."""


class NotPrivate(ValueError):
    """The error for a path that other users can reach. Its text is one line with the path and the remedy."""


def check_private(path: Path, status: os.stat_result, *, or_roots: bool = True) -> None:
    """Raise NotPrivate unless a file or directory is the user's own (or root's) and closed to all other users."""
    if status.st_uid != os.getuid() and not (or_roots and status.st_uid == 0):
        raise NotPrivate(
            f"{path} belongs to uid {status.st_uid}, not to you; make one of your own, or run as its owner"
        )
    if status.st_mode & 0o077:
        is_directory = stat.S_ISDIR(status.st_mode)
        remedy = f"run `chmod {'700' if is_directory else '600'} {path}`"
        raise NotPrivate(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others can reach it; {remedy}"
            + (", if it is for this alone" if is_directory else "")
        )


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can enter, and the missing ones above it. Raises OSError."""
    for place in reversed((directory, *directory.parents)):
        if not os.path.lexists(place):
            place.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, flags: int) -> int:
    """Open a file in a directory of the user's own or of root, and let only its owner read the file.

    Another user may have made the directory since it was used last. A link in it could lead to one of our own files,
    and this process would write to that file. The directory is held open between the check and the opening of the file,
    so that nobody can exchange it in between.

    flags  as for os.open; a file that O_CREAT makes has mode 0600

    Returns a descriptor. Raises OSError.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if (uid := os.fstat(directory).st_uid) not in _trusted():
            raise PermissionError(errno.EPERM, f"the directory belongs to uid {uid}", str(path.parent))
        file = os.open(path.name, flags | os.O_CLOEXEC, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        os.fchmod(file, 0o600)  # the file may be an old one, with another mode
    return file


def check_place(directory: Path) -> None:
    """Raise NotPrivate if another user could put another directory, or a link, in the place of this one.

    The check looks at every directory and every symbolic link on the way, from the root on. Each must belong to our
    user or to root. No directory may be writable by everybody, unless it is sticky like /tmp, where only its owner can
    move an entry. Members of a group that may write to a directory are trusted.

    Raises OSError.
    """
    trusted = _trusted()
    place, left, links = Path("/"), [*reversed(directory.absolute().parts[1:])], 0
    while left:
        name = left.pop()
        if name == "..":
            place = place.parent
            continue
        if place.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise NotPrivate(
                f"{directory} lies in {place}, where everybody may put another in its place; run `chmod o-w {place}`"
            )
        place = place / name
        status = place.lstat()
        if status.st_uid not in trusted:
            raise NotPrivate(
                f"{directory} is reached through {place}, which belongs to uid {status.st_uid}, who may put another in "
                "its place; choose a place of your own"
            )
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
            target = place.readlink()
            left.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            place = Path("/") if target.is_absolute() else place.parent


def check_runtime_dir(directory: Path) -> None:
    """Raise ValueError, with what to do, if the directory belongs to another user. For clients.

    This check only makes the error early and clear: the directory may be another one when the client connects. The
    check in ``protocol.process.peer_user`` keeps prompts from other users. A directory that does not exist passes.
    """
    try:
        status = os.stat(directory)
    except OSError:
        return
    if status.st_uid != os.getuid():
        raise ValueError(
            f"the runtime directory {directory} belongs to uid {status.st_uid}, so it is not that of your "
            "supervisor; give another --runtime-dir ($MODELCTL_RUNTIME_DIR)"
        )


def _trusted() -> set[int]:
    """Return the uids of users that have full access to the user's files in any case.

    In a user namespace, files of the real root show another uid. It is the uid of the owner of the root directory.
    """
    return {os.getuid(), 0, os.stat("/").st_uid}
