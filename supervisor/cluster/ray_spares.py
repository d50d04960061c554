"""Spare agents: actors ahead of their time, one for each engine and machine. The agent of each has a spare worker.

Most seconds of a start go into imports, here as on the supervisor's own machine (``workers.spares``). A spare agent has
no lease of GPUs, and the next one on its machine takes its place after it was used.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from supervisor.cluster.choice import is_meant
from supervisor.cluster.driver_messages import KeepSpares, Node
from supervisor.workers.spares import SparePlan


class Spares:
    """The spare agents. Times are monotonic seconds, and the caller passes them.

    start  returns a new actor with a spare agent. Arguments: the machine's id, the actor's name, the engine. The second
           value is a future, which says whether the agent was started
    kill   ends an actor
    """

    def __init__(self, start: Callable[[str, str, str], tuple[Any, Any]], kill: Callable[[Any], None]) -> None:
        self._start, self._kill = start, kill
        self._wanted = KeepSpares([], starting=True)
        self._there: dict[tuple[str, str], tuple[Any, Any]] = {}
        """Actor and future, by the machine's id and the engine."""
        self._plans: dict[str, SparePlan] = {}
        self._count = 0

    def want(self, message: KeepSpares) -> None:
        self._wanted = message

    def keep(self, nodes: Sequence[Node], now: float) -> None:
        """Start the spares that are missing on other machines with GPUs, and end those that are not wanted."""
        machines = {node.node_id: node for node in nodes if node.gpus and not node.own}
        for gone in self._plans.keys() - machines.keys():
            del self._plans[gone]
        wanted = {
            node_id: {engine for name, engine in self._wanted.wanted if is_meant(node, name)}
            for node_id, node in machines.items()
        }
        for (node_id, engine), (actor, started) in list(self._there.items()):
            failed = started.done() and started.exception() is not None
            if failed and node_id in self._plans:
                self._plans[node_id].ended(engine, now)
            if failed or engine not in wanted.get(node_id, ()):
                del self._there[node_id, engine]
                self._kill(actor)
        for node_id, engines in wanted.items():
            there = [engine for known, engine in self._there if known == node_id]
            plan = self._plans.setdefault(node_id, SparePlan())
            for engine in plan.missing(engines, there, now, starting=self._wanted.starting):
                self._count += 1
                name = f"modelctl-{os.getpid()}-spare-{self._count}"
                try:
                    self._there[node_id, engine] = self._start(node_id, name, engine)
                except Exception:  # of Ray. The workers that run must not pay for a spare
                    plan.ended(engine, now)

    def take(self, node_id: str, engine: str) -> Any | None:
        """Return the actor of a spare agent, which is none any more; None if there is none that has been started."""
        actor, started = self._there.get((node_id, engine), (None, None))
        if started is None or not started.done() or started.exception() is not None:
            return None
        del self._there[node_id, engine]
        return actor

    def used(self, node_id: str, engine: str, now: float, *, lived: bool) -> None:
        """Take note whether a spare that was taken was alive."""
        if (plan := self._plans.get(node_id)) is not None:
            if lived:
                plan.used(engine)
            else:
                plan.ended(engine, now)
