"""The HTTP gateway's processes: started with the supervisor, watched, and started again when they end.

The supervisor opens the listening sockets and hands them on. While a gateway process is being started again, the kernel
keeps new connections waiting, and clients are not refused.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.limits import GATEWAY_NAME
from protocol.process.engine_packages import missing_for_gateway
from protocol.process.gateway_settings import GatewaySettings
from protocol.process.helper_environment import helper_environment
from supervisor.config import Config
from supervisor.config_gateway import Address, GatewayConfig
from supervisor.event_history import EventKind, noted
from supervisor.gateway_modules import GATEWAY
from supervisor.logs import log_path, prepare
from supervisor.placement.circuit_breaker import Restarts

CHECK_S = 0.25
"""Seconds between two checks whether a process, or the port, is missing."""
RESTART_S, RESTART_MAX_S = 0.5, 30.0
"""Pauses between starts of a process that ends again and again. The first restart is at once."""
LEAVE_S = 3.0
"""Seconds that processes may take to end at the supervisor's end, before they are killed."""
BACKLOG = 4096
NOTED = noted(EventKind.GATEWAY)


class GatewayProcesses:
    """The gateway of one supervisor. Without a section ``gateway`` in models.yaml it does nothing."""

    def __init__(self, config: Config, runtime_dir: Path, log: logging.Logger) -> None:
        self._config = config.gateway
        self._log = log
        self._log_path = log_path(runtime_dir, GATEWAY_NAME)
        self._sockets: list[socket.socket] = []
        self._processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        """(number of its socket, process) of each running process, by pidfd."""
        self._epoll = select.epoll()
        self._opening = Restarts(1.0, RESTART_MAX_S)
        self._starts: list[Restarts] = []
        self._count = 0
        self.problem: str | None = None
        """Why no gateway answers, for people. None while one does, and without a section ``gateway``."""
        if self._config is not None:
            self._settings = _settings_of(config, self._config, runtime_dir, str(self._log_path))

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a process has ended: call ``reap`` then."""
        return self._epoll.fileno()

    def start_missing(self) -> None:
        """Open the port if it is not open, and start each process that does not run, unless it ended a moment ago."""
        if self._config is None:
            return
        if not self._sockets and (not self._opening.next(time.monotonic()) or not self._open(self._config)):
            return
        running = {number for number, _ in self._processes.values()}
        for number, restarts in enumerate(self._starts):
            if number not in running and restarts.next(time.monotonic()):
                self._start(number)

    def reap(self) -> None:
        """Collect the processes that have ended, and start others in their places."""
        for pidfd, _ in self._epoll.poll(0):
            _, process = self._processes.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            code = process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self.problem = f"process {process.pid} ended {how}: {self._log_path} may say why"
            self._log.warning("gateway: %s", self.problem, extra=NOTED)
        self.start_missing()

    def close(self) -> None:
        """End the processes, and wait for that."""
        for _, process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + LEAVE_S
        for pidfd, (_, process) in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(pidfd)
        self._processes.clear()
        for opened in self._sockets:
            opened.close()
        self._epoll.close()

    def describe(self) -> dict[str, Any] | None:
        """Return the gateway as ``status`` shows it; None if there is none."""
        if self._config is None:
            return None
        return {
            "listen": str(self._config.listen),
            "auth": self._config.auth,
            "tls": self._config.certificate is not None,
            "pids": [process.pid for _, process in self._processes.values()],
            "restarts": max(0, self._count - len(self._starts)),
            "problem": self.problem,
            "log": str(self._log_path),
        }

    def _open(self, config: GatewayConfig) -> bool:
        """Open the listening sockets. Return whether that was possible; ``problem`` says why not."""
        before, self.problem = self.problem, missing_for_gateway()
        if self.problem is None:
            try:
                self._sockets = open_sockets(config.listen, config.processes)
            except OSError as e:
                self.problem = (
                    f"cannot listen on {config.listen}: {e.strerror or e}. Give another address or port at "
                    "gateway.listen, or end the program that has it"
                )
        if self.problem is not None:
            if self.problem != before:
                self._log.error("no gateway: %s", self.problem, extra=NOTED)
            return False
        self._starts = [Restarts(RESTART_S, RESTART_MAX_S) for _ in self._sockets]
        scheme = "http" if config.certificate is None else "https"
        self._log.info("gateway: listening on %s://%s", scheme, config.listen, extra=NOTED)
        if config.auth == "none":
            self._log.warning("gateway: auth is none: everybody on this machine may use, start and stop the models")
        return True

    def _start(self, number: int) -> None:
        opened = self._sockets[number]
        prepare(self._log_path)
        text = replace(self._settings, listeners=(opened.fileno(),)).to_json()
        try:
            process = subprocess.Popen(
                GATEWAY,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the process opens its log itself
                pass_fds=(opened.fileno(),),
                start_new_session=True,  # a Ctrl-C reaches every process of a terminal's group
                cwd="/",
                env=helper_environment(),
            )
            assert process.stdin is not None
            with process.stdin as pipe:
                pipe.write(text)
            pidfd = os.pidfd_open(process.pid)
        except OSError as e:  # no process or descriptor is left, or the process has ended already
            self.problem = f"cannot be started: {e.strerror or e}"
            self._log.error("gateway: %s", self.problem, extra=NOTED)
            return
        self._count += 1
        self._processes[pidfd] = number, process
        self._epoll.register(pidfd, select.EPOLLIN)
        self._log.info("gateway: started pid %d", process.pid, extra=NOTED)
        self.problem = None


def open_sockets(address: Address, count: int) -> list[socket.socket]:
    """Return ``count`` listening sockets of one address. The kernel divides connections among them. Raises OSError.

    With SO_REUSEPORT other programs of this user could listen on the port, too, and would get a part of the
    connections. So a socket without it is bound first, which fails if the port is taken.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    opened: list[socket.socket] = []
    try:
        for number in range(count + 1):
            opened.append(socket.socket(family))
            opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if number:
                opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened[-1].bind((address.host, address.port))
            opened[-1].listen(BACKLOG)
            if not number:
                opened.pop().close()
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def _settings_of(config: Config, gateway: GatewayConfig, runtime_dir: Path, log: str) -> GatewaySettings:
    def path(given: str | None) -> str | None:
        return None if given is None else str(config.path(given))

    return GatewaySettings(
        runtime_dir=str(runtime_dir),
        host=gateway.listen.host,
        port=gateway.listen.port,
        auth=gateway.auth,
        allowed_hosts=tuple(gateway.allowed_hosts),
        cors_origins=tuple(gateway.cors_origins),
        certificate=path(gateway.certificate),
        private_key=path(gateway.private_key),
        max_body=gateway.max_body,
        keepalive=gateway.keepalive,
        parent=os.getpid(),
        log=log,
    )
