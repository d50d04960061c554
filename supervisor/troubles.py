"""What is wrong with the supervisor as a whole, in words: for ``ps``, the metrics, and events.

A model's own trouble is its state and reason. These are the others, and each has a name: the log cannot be written, a
changed models.yaml is not used, the GPUs cannot be read, the gateway does not answer, the keys cannot be read, requests
are refused because queues are full, workers cannot be started where the launcher may start them, the port over TCP
cannot be opened yet, the folders of models cannot be read.
"""

import logging
import time
from collections.abc import Collection
from typing import Any, Final

from supervisor.event_history import EventKind, noted
from supervisor.fleet.reloads import Reloads
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.folder_keeper import FolderKeeper
from supervisor.gateway_process import GatewayProcesses
from supervisor.keys.ring import KeyRing
from supervisor.logs import log_trouble
from supervisor.placement.vram import Vram
from supervisor.ports.client_ports import ClientPorts
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.launcher import Launcher

LASTING_S = 300.0
"""Seconds after which a trouble that has not ended is an event."""
LATELY_S = 10.0
"""Seconds for which refused requests are a trouble, and between two events about them."""
NAME_NO_MODEL: Final = ("gpus", "gateway", "cluster", "listen")
"""Troubles whose words name no model. A key for some models sees these only."""
_SAID = {"log": EventKind.LOG, "queue": EventKind.QUEUE}
"""The troubles that ``look`` makes events of. Whoever finds one of the others says so itself."""


class Troubles:
    """The present troubles. Runs on the supervisor's one thread. The loop calls ``look`` once a second."""

    def __init__(
        self,
        log: logging.Logger,
        scheduler: Scheduler,
        registry: ReplicaRegistry,
        reloads: Reloads,
        vram: Vram,
        gateway: GatewayProcesses,
        keys: KeyRing,
        launcher: Launcher,
        clients: ClientPorts,
        folders: FolderKeeper,
    ) -> None:
        self._log = log
        self._scheduler = scheduler
        self._registry = registry
        self._reloads = reloads
        self._vram = vram
        self._gateway = gateway
        self._keys = keys
        self._launcher = launcher
        self._clients = clients
        self._folders = folders
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
