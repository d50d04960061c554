"""Decide when a models.yaml that was changed is read again (``serve --watch``). Pure, except ``signature_of``."""

import os
from pathlib import Path

LOOK_S = 0.5
"""Seconds between two looks at the file. A look is one system call."""
SETTLE_S = 1.0
"""Seconds without a change after which the file is read. Editors and copies write a file in parts."""

Signature = tuple[int, int, int, int]
"""Time of the last change in nanoseconds, size, inode and device: an editor may put another file in its place."""


def signature_of(file: Path) -> Signature | None:
    """Return what tells the file's present content from another; None if there is no file."""
    try:
        return signature(os.stat(file))
    except OSError:
        return None


def signature(found: os.stat_result) -> Signature:
    """Return the signature of a file by the kernel's answer about it."""
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


class ConfigWatch:
    """What was seen of a file.

    read  the signature of the content that was read last
    """

    def __init__(self, read: Signature | None) -> None:
        self._read = self._seen = read
        self._since = 0.0

    def due(self, signature: Signature | None, now: float) -> bool:
        """Return whether the file is to be read now. Each change is read once, also if the file has faults.

        A file that is missing is not read: an editor may be about to put the new one in its place.
        """
        if signature != self._seen:
            self._seen, self._since = signature, now
            return False
        if signature is None or signature == self._read or now - self._since < SETTLE_S:
            return False
        self._read = signature
        return True
