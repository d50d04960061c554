"""Send the standard output and error of a process to its log, also after somebody has moved that file."""

import faulthandler
import io
import os
import signal
import sys
from pathlib import Path

from protocol.process.private_paths import open_private


class LogOutput:
    """Sends everything that this process and its libraries print to its log.

    While the log cannot be opened, the output is lost until ``follow`` can open the log.

    path  path of the log; the log is made with mode 0600, in a directory that exists
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not self._redirect():
            _point_output_to(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
        sys.stdout, sys.stderr = LogWriter(1), LogWriter(2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def follow(self) -> None:
        """Open the log again if another file has its name now: logrotate has moved the log, or somebody removed it.

        If the log cannot be opened, output goes on to the old file, and the next call tries again.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(1)):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        self._redirect()

    def _redirect(self) -> bool:
        try:
            fd = open_private(Path(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            return False
        _point_output_to(fd)
        return True


def _point_output_to(fd: int) -> None:
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class LogWriter(io.TextIOWrapper):
    """Writes text to a descriptor without a buffer. On a full disk lines are lost, but ``print`` raises nothing."""

    def __init__(self, descriptor: int) -> None:
        raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass
