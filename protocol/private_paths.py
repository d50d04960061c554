"""What only our own user may reach: the one place where owners and modes of files with keys and of directories with
sockets are judged, and what is said of those that will not do."""

import os
import stat
from pathlib import Path


class NotPrivate(ValueError):
    """Others can reach it. One line that names the path and what to do."""


def check_private(path: Path, status: os.stat_result, *, or_roots: bool = True) -> None:
    """Raise NotPrivate unless a file or directory is ours (or root's), and nobody else can read, write or enter it."""
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
    """Make the directory, and what is missing above it, for our user alone. Raises OSError."""
    for place in reversed((directory, *directory.parents)):
        if not os.path.lexists(place):
            place.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def check_place(directory: Path) -> None:
    """Raise NotPrivate if everybody may put another directory in the place of this one. Raises OSError."""
    for above in directory.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotPrivate(
                f"{directory} lies in {above}, where everybody may put another in its place; run `chmod o-w {above}`"
            )


def check_runtime_dir(directory: Path) -> None:
    """For clients: raise ValueError if another user could be listening in there, and would be told what we send.

    Passes for a directory that does not exist: nobody listens.
    """
    try:
        status = os.stat(directory)
    except OSError:
        return
    if status.st_uid != os.getuid():
        raise ValueError(
            f"the runtime directory {directory} belongs to uid {status.st_uid}: whoever listens there is not your "
            "supervisor; give another --runtime-dir ($MODELCTL_RUNTIME_DIR)"
        )
