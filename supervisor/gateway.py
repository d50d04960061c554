"""The HTTP gateway's processes: started with the supervisor, watched, and started again when they end.

The supervisor opens the listening sockets and hands them on. While a gateway process is being started again, the kernel
keeps new connections waiting, and clients are not refused.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from protocol.limits import GATEWAY_NAME
from protocol.process.birth import EndedSessions, Session, helper_environment
from protocol.process.helper_process import HelperProcess
from protocol.process.paths import make_private, open_private
from protocol.process.shown import LogStyle, masks
from protocol.process.worker_spec import ENDED, READY, STORED_ITEMS, TROUBLE, GatewaySettings, missing_for_gateway
from supervisor.config.file import Config
from supervisor.config.server import Address, GatewayConfig
from supervisor.config.yaml_source import signature_of
from supervisor.helper import HelperWatch
from supervisor.logs.events import EventKind, noted
from supervisor.logs.files import log_dir, log_path, prepare
from supervisor.ports.sockets import ListenAttempts, Restarts

# The module of ``gateway`` that the supervisor starts. No other file of the supervisor names that package.


GATEWAY: Final = (sys.executable, "-P", "-m", "gateway")
"""The program of a gateway process. It reads its settings (``protocol.process.worker_spec``) from standard input.
With -P, Python imports no json.py from the current directory."""


# One process of the HTTP gateway: started with its settings, heard, and ended.
#
# The process reads its settings from the link (``helper_link``), how to write its log, and which sessions of the page
# were ended at other processes. It says ``READY`` once a second while it serves, ``ENDED`` with a session that was
# ended, and ``TROUBLE`` with a reason if it cannot serve.


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


CHECK_S = 0.25
"""Seconds between two checks whether a process or the port is missing, or a process hangs."""
RESTART_S, RESTART_MAX_S = 0.5, 30.0
"""Pauses between attempts to start a process. A process that ran longer is started at once."""
SECRET_BYTES = 32
LEAVE_S = 3.0
"""Seconds that processes may take to end at the supervisor's end, before they are killed."""
BACKLOG = 4096
NOTED = noted(EventKind.GATEWAY)


class GatewayProcesses:
    """The processes of one gateway. Without a section ``gateway`` in models.yaml there is nothing to do.

    problem  why no gateway answers, for people. None while one does or starts, and without a section ``gateway``
    """

    def __init__(
        self, config: GatewayConfig | None, settings: GatewaySettings, log: logging.Logger, watch: HelperWatch
    ) -> None:
        self.problem: str | None = None
        self._config = config
        self._settings = settings
        self._log = log
        self._style = LogStyle()
        self._sockets: list[socket.socket] = []
        self._watch = watch
        self._children: list[GatewayChild] = []
        """The processes that were not collected yet."""
        self._ended_sessions = EndedSessions()
        self._restarts = 0
        self._begin_counts()

    def check(self) -> None:
        """Open the port if it is not open, start each process that does not run, and kill those that hang.

        A process that ended a moment after its start is not started again at once.
        """
        for child in self._children:
            if (done := child.check()) is not None:
                self._log.warning("gateway: %s", done, extra=NOTED)
        if self._config is None:
            return
        now = time.monotonic()
        if not self._sockets and (not self._opening.due(now) or not self._open(self._config)):
            return
        if self._settings.log is not None:
            prepare(Path(self._settings.log))  # a process opens its log again when that was renamed
        running = {child.number for child in self._serving()}
        for number, restarts in enumerate(self._starts):
            if number not in running and restarts.next(now):
                self._start(number)

    def _take(self, child: GatewayChild, record: bytes) -> None:
        if (session := child.take(record)) is not None:
            self._end_session(session)
        if self._is_ready():
            self.problem = None

    def adopt(self, config: GatewayConfig | None, settings: GatewaySettings) -> bool:
        """Serve with other settings. The processes that run complete their answers, while others take new connections.

        Connections wait in the listening sockets meanwhile. With another address, the former sockets are closed.
        Return whether anything differs.
        """
        was = self._settings
        settings = replace(settings, seal_secret=was.seal_secret)
        if (config and config.listen) == (self._config and self._config.listen):
            # Otherwise all sessions end. Anybody may listen at an address that the gateway has left, and receive the
            # browsers' requests.
            settings = replace(settings, cookie_secret=was.cookie_secret)
        if (config, settings) == (self._config, self._settings):
            return False
        if config is None or self._config is None or config.listen != self._config.listen:
            self._close_sockets()
        elif self._sockets:
            try:
                self._sockets += open_sockets(config.listen, config.processes - len(self._sockets), shared=True)
            except OSError:  # ``check`` tries again, and says what is wrong
                self._close_sockets()
            while len(self._sockets) > config.processes:
                self._sockets.pop().close()
        self._config, self._settings, self.problem = config, settings, None
        self._begin_counts()
        for child in self._children:
            child.retire()
        return True

    def write_logs(self, style: LogStyle) -> None:
        """Have the processes, and those that are started later, write their log in this way."""
        if style != self._style:
            self._style = style
            for child in self._children:
                child.write_log(style)

    def _end_session(self, session: str) -> None:
        """Tell all processes, and those that are started later, which session of the page was ended at one."""
        self._ended_sessions.add(Session.of(session), time.time())
        for child in self._children:
            child.end_session(session)

    def close(self, within_s: float = LEAVE_S) -> None:
        """End the processes, and wait for that. Processes that take longer than ``within_s`` seconds are killed."""
        for child in self._children:
            child.retire()
        deadline = time.monotonic() + within_s
        for child in self._children:
            if not child.wait(deadline - time.monotonic()):
                child.kill()
                child.wait()
        self._children.clear()
        self._close_sockets()

    def kill(self) -> None:
        """Kill all processes. ``close`` need not wait for them then."""
        for child in self._children:
            child.kill()

    @property
    def is_open(self) -> bool:
        """Whether the port is open."""
        return bool(self._sockets)

    def describe(self) -> dict[str, Any] | None:
        """Return the gateway as ``status`` shows it; None if there is none."""
        if self._config is None:
            return None
        return {
            "listen": str(self._config.listen),
            "auth": self._config.auth,
            "tls": self._config.certificate is not None,
            "pids": [child.pid for child in self._serving()],
            "ready": self._is_ready(),
            "restarts": self._restarts,
            "problem": self.problem,
            "log": self._settings.log,
        }

    def _serving(self) -> list[GatewayChild]:
        """Return the processes that take connections."""
        return [child for child in self._children if not child.retired]

    def _is_ready(self) -> bool:
        serving = self._serving()
        return bool(serving) and len(serving) == len(self._sockets) and all(child.is_ready for child in serving)

    def _begin_counts(self) -> None:
        self._opening = ListenAttempts("" if self._config is None else str(self._config.listen), "gateway.listen")
        self._starts = [Restarts(RESTART_S, RESTART_MAX_S) for _ in self._sockets]

    def _close_sockets(self) -> None:
        for opened in self._sockets:
            opened.close()
        self._sockets.clear()

    def _open(self, config: GatewayConfig) -> bool:
        """Open the listening sockets. Return whether that was possible; ``problem`` says why not."""
        before, self.problem = self.problem, missing_for_gateway()
        line = self.problem if self.problem != before else None
        if self.problem is None:
            try:
                self._sockets = open_sockets(config.listen, config.processes)
            except OSError as e:
                line = self._opening.failed(e.errno or 0)
                self.problem = self._opening.problem
        if line is not None:
            self._log.error("no gateway: %s", line, extra=NOTED)
        if self.problem is not None:
            return False
        self._begin_counts()
        self._log.info("gateway: listening on %s", url(config), extra=NOTED)
        if config.auth == "none":
            self._log.warning("gateway: auth is none: everybody on this machine may use, start and stop the models")
        return True

    def _start(self, number: int) -> None:
        if self._settings.log is not None:
            prepare(Path(self._settings.log))
        try:
            ended = self._ended_sessions.texts()
            settings = replace(self._settings, log_style=self._style, ended_sessions=ended)
            child = GatewayChild(number, self._sockets[number], settings)
        except OSError as e:
            self.problem = f"cannot be started: {e.strerror or e}"
            self._log.error("gateway: %s", self.problem, extra=NOTED)
            return
        self._children.append(child)
        self._watch.add(child, self._take, self._collect)
        self._log.info("gateway: started pid %d", child.pid, extra=NOTED)

    def _collect(self, child: GatewayChild) -> None:
        """Take note that a process has ended, and start another one in its place."""
        self._children.remove(child)
        if child.retired:
            self._log.info("gateway: %s, as it was told", child.end, extra=NOTED)
        else:
            self._restarts += 1
            self.problem = child.end
            if child.trouble is None and self._settings.log is not None:
                self.problem += f": {self._settings.log} may say why"
            self._log.warning("gateway: %s", self.problem, extra=NOTED)
        self.check()


def url(config: GatewayConfig) -> str:
    """Return the address of a gateway as people type it."""
    return f"{'http' if config.certificate is None else 'https'}://{config.listen}"


def open_sockets(address: Address, count: int, *, shared: bool = False) -> list[socket.socket]:
    """Return ``count`` listening sockets of one address. The kernel divides connections among them. Raises OSError.

    With SO_REUSEPORT other programs of this user could listen on the port, too, and would get a part of the
    connections. So a socket without it is bound first, which fails if the port is taken.

    shared  whether this program has the port already
    """
    opened: list[socket.socket] = []
    try:
        if not shared:
            _listening(address, socket.SO_REUSEADDR).close()
        opened.extend(_listening(address, socket.SO_REUSEADDR, socket.SO_REUSEPORT) for _ in range(count))
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def _listening(address: Address, *options: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        for option in options:
            opened.setsockopt(socket.SOL_SOCKET, option, 1)
        opened.bind((address.host, address.port))
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def settings_of(config: GatewayConfig, base: Path) -> GatewaySettings:
    """Return the settings of a gateway process, without the way to its supervisor, its parent and its log.

    base  directory of relative paths
    """

    def path(given: str | None) -> str | None:
        return None if given is None else str(base / Path(given).expanduser())

    certificate, private_key = path(config.certificate), path(config.private_key)

    return GatewaySettings(
        host=config.listen.host,
        port=config.listen.port,
        auth=config.auth,
        allowed_hosts=tuple(config.allowed_hosts),
        cors_origins=tuple(config.cors_origins),
        certificate=certificate,
        private_key=private_key,
        # A file that is missing has none. The process says what is wrong with it.
        certificate_files=tuple(signature_of(Path(file)) for file in (certificate, private_key) if file is not None),
        max_body=config.max_body,
        stored_items=_stored_items(config),
        body_memory=config.body_memory,
        keepalive=config.keepalive,
        progress=config.progress,
        reasoning_key=config.reasoning_key,
        unknown_options=config.unknown_options,
        parent=os.getpid(),
        masks=masks(),
    )


def _stored_items(config: GatewayConfig) -> int:
    if config.processes > 1:
        return 0
    return STORED_ITEMS if config.stored_items is None else config.stored_items


def supervisors_settings(config: Config, runtime_dir: Path) -> GatewaySettings:
    """Return the settings of the processes of a supervisor's own gateway."""
    settings = settings_of(config.gateway or GatewayConfig(), config.file.parent)
    log = str(log_path(runtime_dir, GATEWAY_NAME))
    return with_seal_secret(replace(settings, runtime_dir=str(runtime_dir), log=log), runtime_dir)


def with_seal_secret(settings: GatewaySettings, runtime_dir: Path) -> GatewaySettings:
    """Return the settings with the secret in the supervisor's state directory. It is made once, and survives restarts.

    If the file cannot be used, the settings keep their own secret, which does not outlive this program.
    """
    path = log_dir(runtime_dir).parent / "gateway-secret"
    try:
        make_private(path.parent)
        with open(open_private(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+") as file:
            secret = file.read(65)
            if not secret:
                secret = settings.seal_secret
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
        if len(bytes.fromhex(secret)) == SECRET_BYTES:
            return replace(settings, seal_secret=secret)
    except (OSError, ValueError):  # ValueError: the file holds something else
        pass
    return settings
