"""A file that blocks every process that opens it, like a file on a network file system that has lost its server."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hanging_file(file: Path) -> Iterator[None]:
    """Make ``open`` of a file block inside the context, by holding a lease on the file (fcntl(2)).

    The kernel breaks the lease after /proc/sys/fs/lease-break-time, by default 45 s. Only the main thread may call
    this, and the file must not be open in any process.
    """
    former = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel would tell us by SIGIO that a process waits
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, former)
