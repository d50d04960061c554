"""A file that hangs whoever opens it, as on a file system whose server is gone."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hanging_file(file: Path) -> Iterator[None]:
    """Opening ``file`` blocks meanwhile: a lease (fcntl(2)) that nobody gives back. The kernel takes it away after
    /proc/sys/fs/lease-break-time, 45 s. For the main thread; the file may be open nowhere."""
    former = signal.signal(signal.SIGIO, signal.SIG_IGN)  # which tells the holder that somebody waits
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, former)
