"""Tell the service manager that started the supervisor, such as systemd, how the supervisor is: sd_notify(3).

The protocol is one datagram of text lines to the socket that $NOTIFY_SOCKET names. Without that variable nothing in
this module does anything. ``service_reports`` decides what is said.

The watchdog's messages come from the supervisor's loop, and from nothing else. A thread would go on sending them beside
a loop that is stuck.
"""

import errno
import faulthandler
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from supervisor.fleet.fleet import Fleet
from supervisor.fleet.reloads import Reloads
from supervisor.gateway_process import GatewayProcesses
from supervisor.ports.client_ports import ClientPorts
from supervisor.service_reports import ServiceReports, View, WorkerView
from supervisor.shutdown import SupervisorShutdown


class NotifySocket:
    """The way to the service manager. A send never waits.

    address  the path of the manager's socket, or @NAME for an abstract one
    """

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def send(self, lines: Sequence[str]) -> bool:
        """Send one message. Return whether that was possible; it is not while the manager's queue is full.

        Raises OSError if the manager cannot be reached.
        """
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            raise
        return True


class Environment(NamedTuple):
    """What the service manager has put into the environment.

    address     see ``NotifySocket``
    watchdog_s  see ``ServiceReports``
    """

    address: str
    watchdog_s: float | None


def take_environment(environment: MutableMapping[str, str], pid: int) -> Environment | None:
    """Take the service manager's variables out of the environment, so that no child has them. None without a manager.

    Raises ValueError if a variable cannot be used.

    pid  this process. The watchdog may be meant for another one
    """
    names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    address, microseconds, watched = (environment.pop(name, "") for name in names)
    if not address:
        return None
    if address[0] not in "/@":
        raise ValueError(f"$NOTIFY_SOCKET is {address!r}, and must be an absolute path or @NAME of a Unix socket")
    if not microseconds or watched not in ("", str(pid)):
        return Environment(address, None)
    if not microseconds.isascii() or not microseconds.isdigit() or int(microseconds) == 0:
        raise ValueError(f"$WATCHDOG_USEC is {microseconds!r}, and must be a positive number of microseconds")
    return Environment(address, int(microseconds) / 1e6)


class ServiceManager:
    """Tells the service manager how the supervisor is. The loop calls ``look`` every ``look_s`` seconds."""

    def __init__(
        self,
        environment: Environment,
        fleet: Fleet,
        reloads: Reloads,
        shutdown: SupervisorShutdown,
        gateway: GatewayProcesses,
        clients: ClientPorts,
        log: logging.Logger,
    ) -> None:
        self._socket = NotifySocket(environment.address)
        self._reports = ServiceReports(environment.watchdog_s)
        self.look_s = self._reports.look_s
        self._fleet = fleet
        self._reloads = reloads
        self._shutdown = shutdown
        self._gateway = gateway
        self._gateway_served = False
        self._clients = clients
        self._log = log
        self._unsent: deque[list[str]] = deque()
        self._trouble: str | None = None
        if environment.watchdog_s is not None:
            # The watchdog ends a supervisor that is stuck with SIGABRT. Its stack then goes to the manager's journal.
            faulthandler.enable(sys.__stderr__ or 2)

    def look(self, now: float) -> None:
        """Tell the service manager what is new, if anything is."""
        if not self._unsent:
            self._unsent.append(self._reports.due(self._view(), now))
        self._send()

    def reload_begins(self, now: float) -> None:
        """Tell the service manager that models.yaml is about to be read again."""
        self._unsent.append(self._reports.reload_begins(now))
        self._send()

    def _view(self) -> View:
        workers = [
            WorkerView(replica.shown, replica.state, replica.spec.autostart and not replica.is_away)
            for replica in self._fleet.registry.replicas.values()
        ]
        gateway, listen = self._gateway_trouble(), self._clients.problem or ""
        return View(workers, gateway, listen, self._reloads.rollouts.busy, self._shutdown.begun)

    def _gateway_trouble(self) -> str | None:
        described = self._gateway.describe()
        if described is None or described["ready"]:
            self._gateway_served = True
            return ""
        problem: str | None = described["problem"]
        return problem or ("" if self._gateway_served else None)

    def _send(self) -> None:
        while self._unsent:
            lines = self._unsent[0]
            try:
                if lines and not self._socket.send(lines):
                    return  # the next look tries again
                self._trouble = None if lines else self._trouble
            except OSError as e:
                if self._trouble != str(e):
                    self._trouble = str(e)
                    self._log.warning("the service manager cannot be told how the supervisor is: %s", e)
            self._unsent.popleft()


def service_manager(
    fleet: Fleet,
    reloads: Reloads,
    shutdown: SupervisorShutdown,
    gateway: GatewayProcesses,
    clients: ClientPorts,
    log: logging.Logger,
) -> ServiceManager | None:
    """Return the connection to the service manager that started this process. None if none did."""
    try:
        environment = take_environment(os.environ, os.getpid())
    except ValueError as e:
        log.warning("the service manager is not told how the supervisor is: %s", e)
        return None
    if environment is None:
        return None
    return ServiceManager(environment, fleet, reloads, shutdown, gateway, clients, log)
