"""Tell a model's directory that is away, since its file system is not mounted or does not answer, from a wrong one."""

import errno
import os
from pathlib import Path
from typing import Final

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
