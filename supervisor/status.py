"""The part of ``status`` that describes the supervisor itself."""

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol import __version__
from protocol.errors import RequestError
from protocol.limits import GATEWAY_NAME, SUPERVISOR_NAME
from protocol.process.compiled import load_compiled
from protocol.process.logs import LogLines
from protocol.process.shown import LEVELS, LogStyle, masked_values
from supervisor.config.folder_keeper import FolderKeeper
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replicas import ReplicaRegistry
from supervisor.fleet.turnovers import Reloads
from supervisor.gateway import GatewayProcesses
from supervisor.keys.ring import KeyRing
from supervisor.logs.events import EventKind, log_trouble, noted
from supervisor.logs.files import StyledByModel, log_path
from supervisor.placement.vram import Vram
from supervisor.ports.authorizer import RequestAuthorizer
from supervisor.ports.client_port import ClientPorts
from supervisor.ports.worker_port import RELAY, WorkerPort
from supervisor.ports.zap import ZapHandler
from supervisor.requests.request import EffectQueue
from supervisor.requests.scheduler import Scheduler
from supervisor.service import SupervisorShutdown
from supervisor.usage.keeper import UsageKeeper
from supervisor.usage.request_log import RequestLog
from supervisor.worker_traffic import WorkerTraffic
from supervisor.workers.launcher import Launcher
from supervisor.workers.local import LocalLauncher

# What is wrong with the supervisor as a whole, in words: for ``ps``, the metrics, and events.
#
# A model's own trouble is its state and reason. These are the others, and each has a name: the log cannot be written,
# a changed models.yaml is not used, the GPUs cannot be read, the gateway does not answer, the keys cannot be read,
# requests are refused because queues are full, workers cannot be started where the launcher may start them, the port
# over TCP cannot be opened yet, the folders of models cannot be read.


LASTING_S = 300.0
"""Seconds after which a trouble that has not ended is an event."""
LATELY_S = 10.0
"""Seconds for which refused requests are a trouble, and between two events about them."""
NAME_NO_MODEL: Final = ("gpus", "gateway", "cluster", "listen")
"""Troubles whose words name no model. A key for some models sees these only."""
_SAID = {"log": EventKind.LOG, "queue": EventKind.QUEUE}
"""The troubles that ``look`` makes events of. Whoever finds one of the others says so itself."""


@dataclass(eq=False, repr=False)
class Troubles:
    """The present troubles. Runs on the supervisor's one thread. The loop calls ``look`` once a second."""

    _log: logging.Logger
    _scheduler: Scheduler
    _registry: ReplicaRegistry
    _reloads: Reloads
    _vram: Vram
    _gateway: GatewayProcesses
    _keys: KeyRing
    _launcher: Launcher
    _clients: ClientPorts
    _folders: FolderKeeper

    def __post_init__(self) -> None:
        self._lasting = Lasting()
        self._refused = Refusals()
        self._said: dict[str, str] = {}

    def describe(self) -> dict[str, str]:
        """Return each trouble by its name, in words."""
        found = {
            "log": log_trouble(self._log),
            "config": self._reloads.refused,
            "gpus": self._vram.trouble,
            "gateway": self._gateway.problem,
            "keys": self._keys.trouble,
            "queue": self._refused.words(self._turned_away(), time.monotonic()),
            **self._launcher.troubles,
            "listen": self._clients.problem,
            "folders": self._folders.trouble,
        }
        return {name: words for name, words in found.items() if words is not None}

    def _turned_away(self) -> dict[str, int]:
        models = {replica.model for replica in self._registry.replicas.values()}
        return {model: self._scheduler.totals(model)["refused"] for model in models}

    def look(self) -> None:
        """Make events of troubles that begin, of those that last, and of those that end."""
        now = self.describe()
        begun, ended = self._lasting.look(now, time.monotonic())
        for name in begun:
            message = "%s: for %d minutes now: %s"
            self._log.error(message, name, LASTING_S // 60, now[name], extra=noted(EventKind.TROUBLE))
        for name in ended:
            self._log.info("%s: it is over", name, extra=noted(EventKind.TROUBLE))
        for name, kind in _SAID.items():
            extra: dict[str, Any] = noted(kind)
            if name in now and name not in self._said:
                self._said[name] = now[name]
                self._log.error("%s: %s", name, now[name], extra=extra)
            elif name not in now and self._said.pop(name, None) is not None:
                self._log.info("%s: it is over", name, extra=extra)


class Lasting:
    """The troubles that last. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def look(self, troubles: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """Return the names of the troubles that have lasted for LASTING_S just now, and of those that are over since.

        now  monotonic seconds
        """
        self._since = {name: self._since.get(name, now) for name in troubles}
        begun = [name for name, since in self._since.items() if name not in self._told and now - since >= LASTING_S]
        ended = [name for name in self._told if name not in self._since]
        self._told = self._told.union(begun).difference(ended)
        return begun, ended


class Refusals:
    """The requests that full queues have refused lately. Pure."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lately: dict[str, tuple[float, int]] = {}
        """By model: when it last refused one, and how many it had refused before it began to."""

    def words(self, counts: dict[str, int], now: float) -> str | None:
        """Return which models refuse requests, and how many; None if none does.

        counts  model → requests that its queue has refused since the supervisor's start
        now     monotonic seconds
        """
        for model, count in counts.items():
            before = self._counts.get(model, 0)
            if count > before:
                first = self._lately[model][1] if model in self._lately else before
                self._lately[model] = now, first
        self._counts = dict(counts)
        self._lately = {model: told for model, told in self._lately.items() if now - told[0] < LATELY_S}
        parts = [f"{model} ({counts.get(model, 0) - first})" for model, (_, first) in self._lately.items()]
        return f"requests are refused as overloaded, because queues are full: {', '.join(parts)}" if parts else None


@dataclass(eq=False, repr=False)
class SupervisorDescription:
    """The supervisor's own part of ``status``. Make it when the supervisor starts, since it counts the uptime."""

    _runtime_dir: Path
    _log: logging.Logger
    _fleet: Fleet
    _reloads: Reloads
    _scheduler: Scheduler
    _clients: ClientPorts
    _workers: WorkerPort
    _traffic: WorkerTraffic
    _authorizer: RequestAuthorizer
    _zap: ZapHandler
    _shutdown: SupervisorShutdown
    _gateway: GatewayProcesses
    _usage: UsageKeeper | None
    _troubles: Troubles
    _local: LocalLauncher
    _launcher: Launcher
    _request_log: RequestLog

    def __post_init__(self) -> None:
        self.session = os.urandom(8).hex()  # the module secrets loads OpenSSL, which takes 3.5 MB
        """A random text that tells this supervisor process from the ones before it."""
        self._started = time.monotonic()
        self.own_logs = {name: log_path(self._runtime_dir, name) for name in (SUPERVISOR_NAME, GATEWAY_NAME)}
        """By name, the paths of the logs that belong to no worker."""

    @property
    def listen_problem(self) -> str | None:
        """Why ``supervisor.listen`` is not open; None if it is, or if there is none."""
        return self._clients.problem

    def describe(self) -> dict[str, Any]:
        """Return the supervisor as ``status`` shows it."""
        described = {
            "pid": os.getpid(),
            "session": self.session,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "config": str(self._fleet.registry.config.file),
            "runtime_dir": str(self._runtime_dir),
            "log_trouble": log_trouble(self._log),
            "troubles": self._troubles.describe(),
            "spares": self._local.spares(),
            "shutting_down": self._shutdown.begun,
            "turnovers": self._reloads.turnovers.describe(),
            "held_bytes": self._scheduler.held_bytes,
            "forwarding": "compiled" if self._workers.relays else f"Python ({load_compiled(RELAY)[1]})",
            "connections": self._clients.connected,
            "tcp": self._authorizer.describe_tcp(),
            "http_keys": self._authorizer.describe_http(),
            "gateway": self._gateway.describe(),
            "cluster": self._launcher.describe(),
            "usage": None if self._usage is None else self._usage.describe(),
            "request_log": self._request_log.describe(),
            "counters": self._counters(),
        }
        return masked_values(described)

    def _counters(self) -> dict[str, int]:
        counters = [port.counters for port in self._clients]
        return {
            "connections_accepted": sum(c.accepted for c in counters),
            "connections_closed": sum(c.disconnected for c in counters),
            "handshakes_failed": sum(c.handshakes_failed for c in counters),
            "connections_denied": self._zap.denied,
            "connections_cut_off": sum(c.cut_off for c in counters),
            "bad_frames": sum(c.bad_frames for c in counters),
            "worker_frames_dropped": self._traffic.dropped + self._scheduler.dropped_frames,
        }


# Have the supervisor, the gateway and the workers write their logs as ``LogStyles`` says, while they run.


@dataclass(eq=False, repr=False)
class LogControl:
    """The way from the styles of logs to the processes that write them."""

    _registry: ReplicaRegistry
    _log: logging.Logger
    _gateway: GatewayProcesses
    _effects: EffectQueue

    def adopt(self, start: LogStyle) -> None:
        """Apply what models.yaml says now."""
        self._registry.log_styles.adopt(start)
        self.apply()

    def levels(self, name: str | None, level: str | None) -> dict[str, str]:
        """Set the level of a process, or of all, and return the levels: the answer to the verb ``log_level``.

        name   a model, the supervisor or the gateway; None for all
        level  None to set nothing

        Raises RequestError for an unknown level.
        """
        if level is not None and level not in LEVELS:
            raise RequestError(f"level is {level[:64]!r}: must be one of {', '.join(LEVELS)}", field="level")
        styles, gateway = self._registry.log_styles, [GATEWAY_NAME] if self._registry.config.gateway else []
        names = [SUPERVISOR_NAME, *gateway, *self._registry.models] if name is None else [name]
        if level is not None:
            styles.set(names, level)
            self._log.info("log level of %s: %s", name or "all processes", level)
            self.apply()
        return {each: styles.of(each).level for each in names}

    def apply(self) -> None:
        """Let every process that writes otherwise follow. Call this after a change of the styles."""
        styles = self._registry.log_styles
        own = styles.of(SUPERVISOR_NAME)
        # Events are kept whatever the level is, and a model's log takes the supervisor's lines by the model's level.
        self._log.setLevel(min(logging.INFO, styles.least()))
        for handler in self._log.handlers:
            if isinstance(handler.formatter, LogLines):
                handler.formatter.as_json = own.is_json
                if isinstance(handler, StyledByModel):
                    handler.styles = styles
                else:
                    handler.setLevel(own.number)
        self._gateway.write_logs(styles.of(GATEWAY_NAME))
        self._effects.extend(self._registry.log_orders(self._registry.replicas.values()))
