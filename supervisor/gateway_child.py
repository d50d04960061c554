"""One process of the HTTP gateway: started with its settings, heard, and ended.

Supervisor and process share a socket, the standard input of the process. The process reads its settings there, how to
write its log, and which sessions of the page were ended at other processes. It writes ``READY`` once a second while it
serves, ``ENDED`` with a session that was ended, and ``TROUBLE`` with a reason if it cannot serve.
"""

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from protocol.process.gateway_settings import ENDED, READY, TROUBLE, GatewaySettings
from protocol.process.helper_environment import helper_environment
from protocol.process.log_style import LogStyle
from supervisor.gateway_modules import GATEWAY

HANG_S: Final = 30.0
"""Seconds without a word from a process that served before, after which the process hangs. It is killed then."""
RETIRE_S: Final = 35.0
"""Seconds in which a process that was retired completes its answers. It ends those that take longer itself, and is
killed if it does not."""
_MOST_BYTES: Final = 4096
"""Bytes that are read of what a process says."""


class GatewayChild:
    """A running process of the gateway.

    number    the number of its listening socket
    is_ready  whether it has begun to serve
    retired   whether it takes no new connections, and ends when its answers are complete
    trouble   why it cannot serve, in its own words; None if it has not said so
    """

    def __init__(self, number: int, listener: socket.socket, settings: GatewaySettings) -> None:
        """Start the process. Raises OSError if no process or descriptor is left."""
        self.number = number
        self.is_ready = self.retired = False
        self.trouble: str | None = None
        self._heard_at = 0.0
        self._dumped = False
        self._unread = self._unsent = b""
        own_log = settings.log is not None
        self.socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                GATEWAY,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL if own_log else None,
                stderr=subprocess.DEVNULL if own_log else None,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # a Ctrl-C reaches every process of a terminal's group
                cwd="/",
                env=helper_environment(),
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # no descriptor is left, and a process that nobody watches must not stay
            self._process.kill()
            self._process.wait()
            self.socket.close()
            raise
        self.socket.setblocking(False)
        try:
            self.socket.send(replace(settings, listeners=(listener.fileno(),)).to_json())
        except OSError:
            pass  # the process has ended already, and the pidfd tells that

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> tuple[bool, list[str]]:
        """Read what the process says.

        Return whether it may say more, and the sessions of the page that were ended there (``Session.text``).
        """
        try:
            said = self.socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return True, []
        except OSError:
            return False, []
        if TROUBLE in said:
            self.trouble = said.partition(TROUBLE)[2].decode(errors="replace")
            return True, []
        if READY in said:
            self.is_ready = True
            self._heard_at = time.monotonic()
        *lines, self._unread = (self._unread + said.replace(READY, b"")).split(b"\n")
        ended = [line.removeprefix(ENDED).decode() for line in lines if line.startswith(ENDED)]
        return bool(said), ended

    def check(self) -> str | None:
        """Have a process that hangs write its stacks to its log, and kill it at the next call. Return what was done."""
        self._send()
        if self.retired:
            if time.monotonic() - self._heard_at > RETIRE_S:
                self._process.kill()
            return None
        if not self.is_ready or time.monotonic() - self._heard_at < HANG_S:
            self._dumped = False
            return None
        if not self._dumped:
            self._dumped = True
            self._process.send_signal(signal.SIGUSR1)
            return None
        self._process.kill()
        self._heard_at = time.monotonic()  # do not say so at each call, in case that it does not die at once
        return f"process {self.pid} has not answered for {HANG_S:.0f} s: killed; its log has its stacks"

    def write_log(self, style: LogStyle) -> None:
        """Have the process write its log in another way. It does so within a second."""
        self._send(style.to_json())

    def end_session(self, session: str) -> None:
        """Have the process take a session of the page (``Session.text``) for ended. It does so within a second."""
        self._send(json.dumps({"ended": session}).encode() + b"\n")

    def _send(self, line: bytes = b"") -> None:
        """Send a line, and lines for which there was no room before."""
        self._unsent += line
        if self._unsent:
            with suppress(OSError):  # no room is left, or the process has ended
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def retire(self) -> None:
        """Have the process end once its answers are complete."""
        if not self.retired:
            self.retired = True
            self._heard_at = time.monotonic()
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def collect(self) -> str:
        """Collect a process that has ended. Return how it ended, for people."""
        if self.trouble is None:
            self.hear()  # its last words
        code = self._process.wait()
        os.close(self.pidfd)
        self.socket.close()
        if self.trouble:
            return self.trouble
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"process {self.pid} ended {how}"

    def end(self, within_s: float) -> None:
        """Wait for the end of a process that was retired, and kill it when the time is over."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.collect()
