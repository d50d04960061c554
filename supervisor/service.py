"""Tell the service manager that started the supervisor, such as systemd, how the supervisor is: sd_notify(3).

The protocol is one datagram of text lines to the socket that $NOTIFY_SOCKET names. Without that variable nothing in
this module does anything. ``ServiceReports`` decides what is said. The end of the
supervisor (``SupervisorShutdown``) stands here, too.

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
from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import GoAway
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.turnovers import Reloads
from supervisor.gateway import GatewayProcesses
from supervisor.logs.events import LEAVES, EventKind, noted
from supervisor.ports.client_port import ClientPorts
from supervisor.requests.request import EffectQueue, ToClient
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.life import AT_REST, WorkerState

# What a service manager, such as systemd, is told about the supervisor, and when. Pure. ``ServiceManager`` sends it.
#
# The lines are those of sd_notify(3).


LOOK_S: Final = 0.25
"""Seconds between two looks at the workers. A look takes a few microseconds, and most looks send nothing."""
EXTEND_S: Final = 60.0
"""Seconds that the manager waits for the next message during a start, a reload or a shutdown. A large model may load,
and a drain may last, for as long as the loop is alive. A loop that is stuck is ended after this time."""
_EXTEND_AGAIN_S: Final = 10.0
_MOST_BYTES: Final = 500
"""Longest status text."""


class WorkerView(NamedTuple):
    """One worker, as the reports need it.

    awaited  whether the service is ready only when this worker is: it starts with the supervisor
    """

    name: str
    state: WorkerState
    awaited: bool


class ServiceView(NamedTuple):
    """The state of the supervisor at one look.

    gateway    the problem of the gateway, "" if it has none; None while the gateway has yet to serve for the first time
    listen     the problem of the port over TCP, "" if it has none. The service is ready without that port
    reloading  whether workers are being exchanged
    stopping   whether the supervisor shuts down
    """

    workers: Sequence[WorkerView]
    gateway: str | None = ""
    listen: str = ""
    reloading: bool = False
    stopping: bool = False


class ServiceReports:
    """Decides what the service manager is told, and when. Times are monotonic seconds, and the caller passes them.

    watchdog_s  seconds after which the manager kills a supervisor that has not sent WATCHDOG=1; None if it does not
    """

    def __init__(self, watchdog_s: float | None = None) -> None:
        self._feed_s = None if watchdog_s is None else watchdog_s / 2
        self._fed_at = self._extended_at = float("-inf")
        self._ready = self._reloading = self._stopping = False
        self._status = ""

    @property
    def look_s(self) -> float:
        """Seconds between two calls of ``due``."""
        return LOOK_S if self._feed_s is None else min(LOOK_S, self._feed_s / 2)

    def due(self, view: ServiceView, now: float) -> list[str]:
        """Return the lines of the message that is due now. Return none if the manager knows everything already."""
        lines = []
        if view.stopping:
            if not self._stopping:
                self._stopping = True
                lines.append("STOPPING=1")
        elif not self._ready:
            self._ready = is_up(view)
            lines += ["READY=1"] if self._ready else []
        elif view.reloading and not self._reloading:
            lines += self.reload_begins(now)
        elif self._reloading and not view.reloading:
            self._reloading = False
            lines.append("READY=1")
        if (status := status_text(view)) != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        settled = self._ready and not self._reloading and not self._stopping
        if not settled and now - self._extended_at >= _EXTEND_AGAIN_S:
            self._extended_at = now
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}")
        if self._feed_s is not None and now - self._fed_at >= self._feed_s:
            self._fed_at = now
            lines.append("WATCHDOG=1")
        return lines

    def reload_begins(self, now: float) -> list[str]:
        """Return the lines for the begin of a reload. Return none if the manager does not expect them now.

        READY=1 follows when ``due`` sees that nothing is being exchanged, also after a reload that was refused. A
        manager that has sent SIGHUP itself waits for both (Type=notify-reload).
        """
        if not self._ready or self._reloading or self._stopping:
            return []
        self._reloading = True
        return ["RELOADING=1", f"MONOTONIC_USEC={now * 1e6:.0f}"]


def is_up(view: ServiceView) -> bool:
    """Return whether the start is over: each worker that starts with the supervisor is ready or will not become ready
    by itself, and the gateway serves or has said why it does not."""
    settled = (*AT_REST, WorkerState.READY, WorkerState.ASLEEP)
    return view.gateway is not None and all(w.state in settled for w in view.workers if w.awaited)


def status_text(view: ServiceView) -> str:
    """Return what `systemctl status` shows about the supervisor: its problems, and the names of all workers, by their
    state."""
    by_state: dict[WorkerState, list[str]] = {}
    for worker in view.workers:
        by_state.setdefault(worker.state, []).append(worker.name)
    doing = "shutting down; " if view.stopping else "reloading; " if view.reloading else ""
    parts = [f"{len(by_state.get(WorkerState.READY, ()))} of {len(view.workers)} workers ready"]
    parts += [f"no gateway: {view.gateway}"] if view.gateway else []
    parts += [view.listen] if view.listen else []
    parts += [f"{state}: {', '.join(by_state[state])}" for state in WorkerState if state in by_state]
    text = " ".join((doing + "; ".join(parts)).split()).encode()
    return text.decode() if len(text) <= _MOST_BYTES else text[: _MOST_BYTES - 3].decode(errors="ignore") + "..."


# The supervisor's own end: every model is stopped, clients are told, and then the process leaves.


@dataclass(eq=False, repr=False)
class SupervisorShutdown:
    """The state of the supervisor's shutdown.

    begun  whether a shutdown has begun
    """

    _fleet: Fleet
    _reloads: Reloads
    _scheduler: Scheduler
    _clients: ClientPorts
    _effects: EffectQueue
    _log: logging.Logger

    def __post_init__(self) -> None:
        self.begun = False
        self._impatient = False

    def begin(self, cause: str, *, now: bool = False) -> None:
        """Stop every model. The supervisor exits when all workers have ended and their VRAM is free again.

        now  do not wait for requests, nor for the VRAM. A second call may set this
        """
        self._log.info(f"{LEAVES}%s: %s", " now" if now else "", cause, extra=noted(EventKind.SUPERVISOR))
        self._impatient = self._impatient or now
        if not self.begun:
            self.begun = True
            self._reloads.turnovers.abandon()
            self._scheduler.leave(shutting_down())
            # This goes before the errors that end waiting requests, so that clients know the reason.
            frame = encode(GoAway(pack_body({"reason": "the supervisor is shutting down"})))
            self._effects.extend(ToClient(channel, frame) for channel in self._clients.channels_for_requests())
        for replica in self._fleet.registry.replicas.values():
            self._fleet.stop(replica, cause, now=now)

    @property
    def is_done(self) -> bool:
        """Whether the supervisor may exit now."""
        return self.begun and self._fleet.all_stopped and (self._impatient or not self._fleet.vram.awaited)

    def check_not_begun(self) -> None:
        """Raise the error for new requests and orders during a shutdown, if one has begun."""
        if self.begun:
            raise shutting_down()


def shutting_down() -> WireError:
    """Return the error for new requests and orders during a shutdown."""
    return WireError(ErrorCode.DRAINING, "the supervisor is shutting down: it takes no new requests and starts nothing")


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


@dataclass(eq=False, repr=False)
class ServiceManager:
    """Tells the service manager how the supervisor is. The loop calls ``look`` every ``look_s`` seconds."""

    _environment: Environment
    _fleet: Fleet
    _reloads: Reloads
    _shutdown: SupervisorShutdown
    _gateway: GatewayProcesses
    _clients: ClientPorts
    _log: logging.Logger

    def __post_init__(self) -> None:
        self._socket = NotifySocket(self._environment.address)
        self._reports = ServiceReports(self._environment.watchdog_s)
        self.look_s = self._reports.look_s
        self._gateway_served = False
        self._unsent: deque[list[str]] = deque()
        self._trouble: str | None = None
        if self._environment.watchdog_s is not None:
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

    def _view(self) -> ServiceView:
        workers = [
            WorkerView(replica.shown, replica.state, replica.spec.autostart and not replica.is_away)
            for replica in self._fleet.registry.replicas.values()
        ]
        gateway, listen = self._gateway_trouble(), self._clients.problem or ""
        return ServiceView(workers, gateway, listen, self._reloads.turnovers.busy, self._shutdown.begun)

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


def service_environment(log: logging.Logger) -> Environment | None:
    """Return what the service manager that started this process has told it. None if none did."""
    try:
        return take_environment(os.environ, os.getpid())
    except ValueError as e:
        log.warning("the service manager is not told how the supervisor is: %s", e)
        return None
