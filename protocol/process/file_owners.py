"""Tell whether another user of the machine could change a file, a directory or a link."""

import grp
import os
import pwd
import stat


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
