"""Keep a running supervisor reachable when somebody removes its runtime directory, or a socket in it."""

import logging
import os
from collections.abc import Callable, Sequence

import zmq

from supervisor.ports.socket_file import SocketFile
from supervisor.runtime_dir import RuntimeDir, RuntimeDirError

CHECK_S = 1.0
"""Seconds between two checks. A check takes four system calls."""


class RuntimeWatch:
    """The checks whether the directory and the sockets are in their places. Missing ones are made again.

    files       the files of the sockets that are bound in the directory
    made_again  called after the directory was made again, to write the other files that belong into it
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        files: Sequence[SocketFile],
        made_again: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._runtime = runtime
        self._files = files
        self._made_again = made_again
        self._log = log
        self._trouble: str | None = None

    def restore_missing(self) -> None:
        """Make a missing directory or socket again, and say so in the log. The loop calls this every CHECK_S.

        A failure is logged once, and the next call tries again.
        """
        try:
            self._restore()
            self._trouble = None
        except (RuntimeDirError, OSError, zmq.ZMQError) as e:
            if self._trouble != str(e):
                self._trouble = str(e)
                self._log.error(
                    "new clients and workers cannot connect: the runtime directory or a socket in it was removed, and "
                    "cannot be made again: %s. Connections that exist go on. This is tried again every second; "
                    "`kill %d` stops this supervisor",
                    e,
                    os.getpid(),
                )

    def _restore(self) -> None:
        moved = not self._runtime.is_in_place()
        if moved:
            self._runtime.make_again()
        lost = [file for file in self._files if file.is_lost()]
        for file in lost:
            file.make_again()
        if moved:
            self._made_again()
        if lost:
            self._log.warning(
                "%s was removed by another process, and was made again; connections that exist go on",
                f"the runtime directory {self._runtime.path}" if moved else ", ".join(file.path for file in lost),
            )
