"""Start a helper: a process beside this one that may hang, die, or read what is hostile. See ``helper_link``."""

import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from signal import Signals
from typing import Final

from protocol.process.helper_link import MOST, HelperLink

ROOM: Final = 1 << 20
"""Bytes that the socket takes while its reader is slow. The kernel may allow less."""


class HelperProcess(HelperLink):
    """A process, and this end of the link to it. Raises OSError if no process or descriptor is left.

    pid    of the process
    pidfd  a descriptor that is readable when the process has ended; -1 when it was collected
    code   the exit code of a process that was collected, negative for a signal; None before

    command  the program and its arguments
    passed   descriptors that the process gets, too
    apart    whether the process has a session of its own, so that neither a Ctrl-C nor a signal to this process's group
             reaches it, and "/" as its current directory
    errors   where it writes standard error; None for that of this process
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        passed: Sequence[int] = (),
        apart: bool = True,
        errors: int | None = subprocess.DEVNULL,
        most: int = MOST,
    ) -> None:
        with ExitStack() as undone:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undone.callback(ours.close)
            with theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
                # Popen uses vfork where it can, and so does not copy the page tables of a process with much memory.
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors, pass_fds=passed, env=env,
                    start_new_session=apart, cwd="/" if apart else None,
                )  # fmt: skip
            undone.callback(self._process.wait)
            undone.callback(self._process.kill)
            self.pidfd = os.pidfd_open(self._process.pid)
            undone.pop_all()
        ours.setblocking(False)
        super().__init__(ours.detach(), most)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.returncode

    @property
    def how(self) -> str:
        """How a process that was collected has ended, for people."""
        code = self.code or 0
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def send_signal(self, number: Signals) -> None:
        """Send a signal to the process. Do nothing if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process. It may take its time to die: it may hang in the kernel, at a disk or a driver."""
        self._process.kill()

    def wait(self, within_s: float | None = None) -> bool:
        """Wait for the end of the process, and collect it. Return whether it has ended in time."""
        if self.pidfd >= 0:
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            if not ended.poll(None if within_s is None else max(0.0, within_s) * 1000):
                return False
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1
            self.close()
        return True

    def finish(self, within_s: float) -> bool:
        """Send what is unsent, close the link, and wait for the end of the process. Return whether that was in time."""
        deadline = time.monotonic() + within_s
        self.leave()
        while self._poll(0, deadline):
            self.flush()
        self.close()
        return self.wait(deadline - time.monotonic())

    def __del__(self) -> None:
        """Close the descriptors of a process that was not waited for, because it did not die."""
        if getattr(self, "pidfd", -1) >= 0:
            os.close(self.pidfd)
        if hasattr(self, "descriptor"):
            self.close()
