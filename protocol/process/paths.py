"""Paths: which are private, which are trusted or away, and where the sockets of a supervisor are.

Each check looks at owners and modes. Its error names the path and says what to do.
"""

import errno
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path
from typing import Final

from protocol.limits import IPC_PATH_MAX

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
    check in ``protocol.process.sockets`` keeps prompts from other users. A directory that does not exist passes.
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


# The paths of the supervisor's sockets, for the supervisor, its workers and the clients.


ENVIRONMENT_VARIABLE = "MODELCTL_RUNTIME_DIR"
PAUSED = ".paused"
"""Suffix of the name of a socket's file while the supervisor takes no new connections through the socket."""
FRONT, ADMIN, BACK = "front", "admin", "back"
"""File names of the sockets for requests, for operators and for workers."""


def default_runtime_dir() -> Path:
    """Return $MODELCTL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/modelctl, else /tmp/modelctl-UID. It may not exist."""
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "modelctl"
    return Path(f"/tmp/modelctl-{os.getuid()}")


def front_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for requests. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, FRONT)


def admin_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for operators. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, ADMIN)


def back_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for workers. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, BACK)


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint. Raises ValueError with the path, its length and the remedy if an ipc path is too long."""
    path = ipc_path(endpoint)
    if path is not None and (length := len(os.fsencode(path))) > IPC_PATH_MAX:
        raise ValueError(
            f"the socket path {path} has {length} bytes, a Unix socket takes at most {IPC_PATH_MAX}: "
            f"choose a shorter runtime directory (${ENVIRONMENT_VARIABLE})"
        )
    return endpoint


def ipc_path(endpoint: str) -> str | None:
    """Return the file of an ipc endpoint. None for other transports and for abstract sockets (``ipc://@name``)."""
    path = endpoint.removeprefix("ipc://")
    return None if path == endpoint or path.startswith("@") else path


def serve_hint(endpoint: str) -> str:
    """Return the remedy if no supervisor listens at this endpoint: the command to type."""
    path = ipc_path(endpoint)
    if path is None:
        return "start it there with `modelctl serve`"
    directory = Path(path).parent
    usual = directory == default_runtime_dir() or Path(path).name not in (
        FRONT,
        ADMIN,
    )  # serve makes no socket of another name
    option = "" if usual else f" --runtime-dir {shlex.quote(str(directory))}"
    return f"start it with `modelctl serve{option}`"


def _endpoint(runtime_dir: str | os.PathLike[str], name: str) -> str:
    return check_endpoint(f"ipc://{os.path.abspath(runtime_dir)}/{name}")


# Tell whether another user of the machine could change a file, a directory or a link.


def weakness(place: str, status: os.stat_result | None = None) -> str | None:
    """Return how another user can change a file, a directory or a link; None if nobody else can.

    status  of the place, without following a link; None to ask for it

    In a directory with the sticky bit, such as /tmp, others can add entries, but not change those that are not theirs.
    Each entry on the way is checked, so such a directory is no weakness.
    """
    if status is None:
        status = os.lstat(place)
    if status.st_uid not in trusted():
        return f"{shown(place)} belongs to another user ({status.st_uid})"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(place, status.st_gid)):
        return f"others can write to {shown(place)} (mode {stat.S_IMODE(mode):o})"
    return None


def trusted() -> tuple[int, int]:
    """Return the users who may change what a model is made of: root and this user."""
    return 0, os.geteuid()


def shown(path: object) -> str:
    """Return a path without control characters."""
    return repr(str(path))[1:-1]


def _is_private(place: str, group: int) -> bool:
    """Return whether a group that can write to a place is that of this user or of root alone.

    Many systems give each user a group of the same name. With an access control list, the group's bits in the mode
    speak for others, too.
    """
    try:
        entry = grp.getgrgid(group)
        owner = pwd.getpwnam(entry.gr_name)
        if "system.posix_acl_access" in os.listxattr(place):
            return False
    except (KeyError, OSError):
        return False
    return owner.pw_uid in trusted() and owner.pw_gid == group and set(entry.gr_mem) <= {entry.gr_name}


# Tell a model's directory that is away, since its file system is not mounted or does not answer, from a wrong one.


AWAY_ERRORS: Final = frozenset({errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN})
"""The errors of a file system that is away, such as a share of the network whose server does not answer."""


def is_absent(directory: str | Path) -> bool:
    """Return whether a directory is missing or empty, or its file system does not answer."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except OSError as e:
        return e.errno == errno.ENOENT or e.errno in AWAY_ERRORS


def is_unmounted(directory: Path) -> bool:
    """Return whether a directory is missing because a file system seems not to be mounted: the directory that should
    hold it, or the nearest above it that is there, is empty as a mount point is. Or the file system does not answer."""
    for above in (directory, *directory.parents):
        try:
            with os.scandir(above) as entries:
                return above != directory and next(entries, None) is None
        except OSError as e:
            if e.errno in AWAY_ERRORS:
                return True
            if e.errno != errno.ENOENT:
                return False
    return False
