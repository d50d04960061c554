"""The part of ``status`` that describes the supervisor itself."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from protocol import __version__
from protocol.limits import GATEWAY_NAME, SUPERVISOR_NAME
from protocol.process.compiled import load_compiled
from protocol.process.masking import masked_values
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.reloads import Reloads
from supervisor.gateway_process import GatewayProcesses
from supervisor.logs import log_path, log_trouble
from supervisor.ports.client_ports import ClientPorts
from supervisor.ports.request_authorizer import RequestAuthorizer
from supervisor.ports.worker_port import RELAY, WorkerPort
from supervisor.ports.zap import ZapHandler
from supervisor.request_log import RequestLog
from supervisor.requests.scheduler import Scheduler
from supervisor.shutdown import SupervisorShutdown
from supervisor.troubles import Troubles
from supervisor.usage_keeper import UsageKeeper
from supervisor.worker_traffic import WorkerTraffic
from supervisor.workers.launcher import Launcher
from supervisor.workers.local_launcher import LocalLauncher


class SupervisorDescription:
    """The supervisor's own part of ``status``. Make it when the supervisor starts, since it counts the uptime."""

    def __init__(
        self,
        runtime_dir: Path,
        log: logging.Logger,
        fleet: Fleet,
        reloads: Reloads,
        scheduler: Scheduler,
        clients: ClientPorts,
        workers: WorkerPort,
        traffic: WorkerTraffic,
        authorizer: RequestAuthorizer,
        zap: ZapHandler,
        shutdown: SupervisorShutdown,
        gateway: GatewayProcesses,
        usage: UsageKeeper | None,
        troubles: Troubles,
        local: LocalLauncher,
        launcher: Launcher,
        request_log: RequestLog,
    ) -> None:
        self.session = os.urandom(8).hex()  # the module secrets loads OpenSSL, which takes 3.5 MB
        """A random text that tells this supervisor process from the ones before it."""
        self._started = time.monotonic()
        self._runtime_dir = runtime_dir
        self.own_logs = {name: log_path(runtime_dir, name) for name in (SUPERVISOR_NAME, GATEWAY_NAME)}
        """By name, the paths of the logs that belong to no worker."""
        self._log = log
        self._fleet = fleet
        self._reloads = reloads
        self._scheduler = scheduler
        self._clients = clients
        self._workers = workers
        self._traffic = traffic
        self._authorizer = authorizer
        self._zap = zap
        self._shutdown = shutdown
        self._gateway = gateway
        self._usage = usage
        self._troubles = troubles
        self._local = local
        self._launcher = launcher
        self._request_log = request_log

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
            "turnovers": self._reloads.rollouts.describe(),
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
