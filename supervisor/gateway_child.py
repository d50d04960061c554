"""One process of the HTTP gateway: started with its settings, heard, and ended.

The process reads its settings from the link (``helper_link``), how to write its log, and which sessions of the page
were ended at other processes. It says ``READY`` once a second while it serves, ``ENDED`` with a session that was ended,
and ``TROUBLE`` with a reason if it cannot serve.
"""

import json
import signal
import socket
import subprocess
import time
from dataclasses import replace
from typing import Final

from protocol.process.gateway_settings import ENDED, READY, TROUBLE, GatewaySettings
from protocol.process.helper_environment import helper_environment
from protocol.process.helper_process import HelperProcess
from protocol.process.log_style import LogStyle
from supervisor.gateway_modules import GATEWAY

HANG_S: Final = 30.0
"""Seconds without a word from a process that served before, after which the process hangs. It is killed then."""
RETIRE_S: Final = 35.0
"""Seconds in which a process that was retired completes its answers. It ends those that take longer itself, and is
killed if it does not."""


class GatewayChild(HelperProcess):
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
        errors = None if settings.log is None else subprocess.DEVNULL
        super().__init__(GATEWAY, helper_environment(), passed=(listener.fileno(),), errors=errors)
        self.send(replace(settings, listeners=(listener.fileno(),)).to_json())

    def take(self, record: bytes) -> str | None:
        """Take in what the process says. Return the session of the page that was ended there (``Session.text``)."""
        if record == READY:
            self.is_ready = True
            self._heard_at = time.monotonic()
        elif record.startswith(TROUBLE):
            self.trouble = record.removeprefix(TROUBLE).decode(errors="replace")
        elif record.startswith(ENDED):
            return record.removeprefix(ENDED).decode()
        return None

    def check(self) -> str | None:
        """Have a process that hangs write its stacks to its log, and kill it at the next call. Return what was done."""
        if self.retired:
            if time.monotonic() - self._heard_at > RETIRE_S:
                self.kill()
            return None
        if not self.is_ready or time.monotonic() - self._heard_at < HANG_S:
            self._dumped = False
            return None
        if not self._dumped:
            self._dumped = True
            self.send_signal(signal.SIGUSR1)
            return None
        self.kill()
        self._heard_at = time.monotonic()  # do not say so at each call, in case that it does not die at once
        return f"process {self.pid} has not answered for {HANG_S:.0f} s: killed; its log has its stacks"

    def write_log(self, style: LogStyle) -> None:
        """Have the process write its log in another way. It does so within a second."""
        self.send(style.to_json())

    def end_session(self, session: str) -> None:
        """Have the process take a session of the page (``Session.text``) for ended. It does so within a second."""
        self.send(json.dumps({"ended": session}).encode())

    def retire(self) -> None:
        """Have the process end once its answers are complete."""
        if not self.retired:
            self.retired = True
            self._heard_at = time.monotonic()
            self.send_signal(signal.SIGTERM)

    @property
    def end(self) -> str:
        """How the process has ended, for people."""
        if self.trouble:
            return self.trouble
        code = self.code or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"process {self.pid} ended {how}"
