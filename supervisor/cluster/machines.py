"""Start agents on the machines of a Ray cluster, through the helper process that talks to Ray (``ray_driver``)."""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from protocol.errors import FrameError
from protocol.process.birth import helper_environment
from protocol.process.helper_process import HelperProcess
from protocol.values import pack
from supervisor.cluster.messages import (
    FROM_DRIVER,
    AgentLeft,
    EndAgent,
    KeepSpares,
    Looked,
    Node,
    Nodes,
    Refused,
    StartAgent,
    ToDriver,
    Unusable,
)
from supervisor.config.reading import is_name, labels_of
from supervisor.helper import Helper, HelperWatch
from supervisor.logs.events import EventKind, noted
from supervisor.ports.sockets import Restarts
from supervisor.workers.launcher import NoMachineError

# What the supervisor knows of the machines of a cluster: those that Ray lists, and those that it has listed before.
# Pure: times are arguments, in monotonic seconds.


GONE_S: Final = 86_400.0
"""Seconds for which a machine that is gone is remembered."""
MOST_GONE: Final = 100
"""Machines that are gone and remembered. Those that went first make room."""


class Machines:
    """The machines of a cluster.

    nodes  those that Ray lists; empty until it has answered, and while the helper that talks to it is gone
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._listed: dict[str, Node] = {}
        """The machines of Ray's last answer, by name. ``lose`` keeps it: the next answer is compared with it."""
        self._gone: dict[str, tuple[Node, float]] = {}
        self._answered: float | None = None

    def adopt(self, nodes: Sequence[Node], now: float) -> tuple[list[str], list[str]]:
        """Take in the machines that Ray lists now. Return the names of those that came, and of those that are gone."""
        listed = {node.name: node for node in nodes}
        came, went = sorted(listed.keys() - self._listed.keys()), sorted(self._listed.keys() - listed.keys())
        for name in went:
            self._gone[name] = self._listed[name], now
        kept = [(name, gone) for name, gone in self._gone.items() if name not in listed and now - gone[1] < GONE_S]
        self._gone = dict(kept[-MOST_GONE:])
        self.nodes, self._listed, self._answered = list(nodes), listed, now
        return came, went

    def confirm(self, now: float) -> None:
        """Take note that Ray has answered, and lists the same machines as before."""
        self._answered = now

    def lose(self) -> None:
        """Take note that nobody can ask Ray for now."""
        self.nodes = []

    def names(self) -> set[str]:
        """Return the names of all machines, gone ones included."""
        return self._listed.keys() | self._gone.keys()

    def describe(self, heard: dict[str, float], versions: dict[str, str], now: float) -> dict[str, Any]:
        """Return what ``status`` shows of the machines.

        heard     by machine, the seconds since one of its agents was heard
        versions  by machine, the version of modelctl that an agent there has told
        """
        return {
            "answered_s": None if self._answered is None else round(now - self._answered, 1),
            "nodes": [
                {
                    **asdict(node),
                    "version": versions.get(node.name),
                    "heard_s": None if (silent := heard.get(node.name)) is None else round(silent, 1),
                }
                for node in self.nodes
            ],
            "gone": [
                {"name": name, "address": node.address, "gpus": node.gpus, "gone_s": round(now - since, 1)}
                for name, (node, since) in self._gone.items()
                if now - since < GONE_S
            ],
        }


# Choose the machine for a worker from those of the cluster. Pure.


def choose(
    nodes: Sequence[Node],
    free: Mapping[str, float],
    wanted: str,
    gpus: int,
    beside: Mapping[str, int] | None = None,
    held: Mapping[str, int] | None = None,
    without: Collection[str] = (),
) -> Node:
    """Return the machine for a worker. Raises NoMachineError.

    Of several machines the one with the fewest workers of the same model is taken, then the one with the fewest of all.

    free     machine → GPUs that can be leased
    wanted   ``node`` of models.yaml
    gpus     GPUs that the worker needs
    beside   machine → other workers of the same model
    held     machine → workers of all models
    without  machines that are not taken
    """
    there = [node for node in _meant(nodes, wanted) if node.name not in without]
    what = _words(wanted)
    if not there:
        raise NoMachineError(f"the Ray cluster has no more {what}" if without else f"the Ray cluster has no {what}")
    roomy = [node for node in there if free[node.name] >= gpus]
    if not roomy:
        large = {node.name: gpus - int(free[node.name]) for node in there if node.gpus >= gpus}
        names = ", ".join(f"{node.name} {free[node.name]:g} of {node.gpus:g}" for node in there)
        if is_name(wanted):
            raise NoMachineError(
                f"{wanted} has {free[wanted]:g} of {there[0].gpus:g} GPUs free, and {gpus} are needed", large
            )
        raise NoMachineError(f"no {what} of the Ray cluster has {gpus} GPUs free: {names}", large)
    beside, held = beside or {}, held or {}
    return min(roomy, key=lambda node: (beside.get(node.name, 0), held.get(node.name, 0), node.name))


def is_meant(node: Node, wanted: str) -> bool:
    """Return whether ``wanted`` (``node`` of models.yaml) can be this machine."""
    if is_name(wanted):
        return node.name == wanted
    return not node.own and labels_of(wanted).items() <= node.labels.items()


def is_worth_another_lease(passed: Collection[int], refused: Refused) -> bool:
    """Return whether a worker that its machine has refused is tried on other GPUs of that machine.

    There is an end: each try must have brought a GPU that the worker was not refused on before.

    passed  the GPUs of the machine that the worker was refused on before
    """
    return refused.elsewhere and not set(refused.gpus) <= set(passed)


def _meant(nodes: Sequence[Node], wanted: str) -> list[Node]:
    found = [node for node in nodes if is_meant(node, wanted)]
    if is_name(wanted):
        if not found:
            names = ", ".join(sorted(node.name for node in nodes))
            raise NoMachineError(f"the Ray cluster has no machine {wanted}: it has {names}")
        if len(found) > 1:
            raise NoMachineError(
                f"the Ray cluster has {len(found)} machines called {wanted}: start each with a --node-name of its own"
            )
    return found


def _words(wanted: str) -> str:
    return f"other machine with the labels {wanted}" if labels_of(wanted) else "other machine"


_COMMAND = (sys.executable, "-P", "-m", "supervisor.cluster.ray_driver")
NOT_YET = "the Ray cluster has not answered yet"
AGAIN_S = 5.0
"""Seconds between two starts of the helper."""
MOST_UNSENT = 1 << 20
"""Bytes that may wait for the helper. A helper that reads so slowly is killed."""
_ENDED = "it has ended"


class RayStarter:
    """Starts agents on the machines of a cluster. No method blocks. Raises OSError if the helper cannot be started.

    address      the cluster's address, as Ray takes it, or "auto" for the one that this machine belongs to
    machines     the machines of the cluster
    trouble      why the cluster cannot be used, for people; "" if it can, or has not answered yet
    unreachable  why agents could not reach the supervisor, for people; "" if they can. None is started meanwhile
    descriptor   a descriptor that is readable when ``ended`` has something to return
    """

    def __init__(self, address: str, log: logging.Logger) -> None:
        self._address, self._log = address, log
        self.machines = Machines()
        self.trouble = ""
        self.unreachable = ""
        self._started: dict[int, tuple[str, int]] = {}
        """The machine and the GPUs of each agent that was started, and has not ended yet."""
        self._held: Counter[str] = Counter()
        self._leased: Counter[str] = Counter()
        """By machine, the number of agents in ``_started``, and the sum of their GPUs. When each start added them up
        for each machine, 1,000 starts took 3.3 s of processor, and 2,000 took 24 s."""
        self._ends: list[AgentLeft] = []
        self._spares: KeepSpares | None = None
        """What the helper was told last."""
        self._why = _ENDED
        """Why the helper is to end, or has ended."""
        self._watch = HelperWatch()
        self.descriptor = self._watch.descriptor
        self._helper = Helper(self._watch, self._begin, self._take, self._lose, Restarts(AGAIN_S, AGAIN_S))
        self._helper.check(time.monotonic())

    def _begin(self) -> HelperProcess:
        self._spares, self._why = None, _ENDED
        ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "HOME"}
        return HelperProcess([*_COMMAND, self._address], helper_environment(**ray))

    @property
    def nodes(self) -> list[Node]:
        """The machines of the cluster; empty until it has answered."""
        return self.machines.nodes

    def choose(
        self, wanted: str, gpus: int, beside: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> Node:
        """Return a machine for a worker, see ``choose``. Raises NoMachineError."""
        if self.unreachable or self._helper.process is None or not self.nodes:
            raise NoMachineError(self.unreachable or self.trouble or NOT_YET)
        free = {node.name: self._free(node) for node in self.nodes}
        return choose(self.nodes, free, wanted, gpus, beside, self._held, without)

    def _free(self, node: Node) -> float:
        """Return the GPUs of a machine that can be leased. What Ray says is up to a second old, so our agents' leases
        are counted here."""
        return node.gpus - node.others - self._leased[node.name]

    def start(self, number: int, node: Node, gpus: int, engine: str, order: bytes) -> None:
        """Start an agent with a lease of ``gpus`` GPUs on a machine that ``choose`` has just returned, and give it the
        order. Each start ends in exactly one AgentLeft. ``engine`` is the worker's."""
        self._started[number] = node.name, gpus
        self._held[node.name] += 1
        self._leased[node.name] += gpus
        self._send(StartAgent(number, node.node_id, gpus, engine, order))

    def end(self, number: int) -> None:
        """End an agent, and with it its worker. Do nothing if it has ended."""
        if number in self._started:
            self._send(EndAgent(number))

    def keep_spares(self, wanted: Collection[tuple[str, str]], *, starting: bool) -> None:
        """Have spare agents kept, see ``driver_messages.KeepSpares``. The loop calls this again and again."""
        told = KeepSpares([list(pair) for pair in sorted(wanted)], starting)
        if self._helper.process is not None and told != self._spares:
            self._spares = told
            self._send(told)

    def ended(self) -> list[AgentLeft]:
        """Return the agents that have ended since the last call."""
        self._watch.hear()
        ends, self._ends = self._ends, []
        return ends

    def check(self, now: float) -> None:
        """Start the helper again if it has ended. Call this every second or so."""
        try:
            self._helper.check(now)
        except OSError as e:
            self._log.warning("the helper that talks to Ray cannot be started: %s", e)

    def close(self) -> None:
        """End all agents."""
        self._helper.end()

    def _take(self, record: bytes) -> None:
        try:
            message = FROM_DRIVER.read(record)
        except FrameError as e:
            self._give_up(str(e))
            return
        if isinstance(message, Nodes):
            self._adopt(message.nodes)
        elif isinstance(message, Looked):
            self.machines.confirm(time.monotonic())
        elif isinstance(message, AgentLeft):
            if message.number in self._started:
                self._forget(message.number)
                self._ends.append(message)
        elif isinstance(message, Unusable):
            if message.why != self.trouble:
                self._log.error("cluster: %s", message.why, extra=noted(EventKind.CLUSTER))
            self.trouble = message.why

    def _forget(self, number: int) -> None:
        """Count an agent no more, because it has ended."""
        node, gpus = self._started.pop(number)
        self._held[node] -= 1
        self._leased[node] -= gpus
        if not self._held[node]:  # names of machines that never come back do not gather
            del self._held[node], self._leased[node]

    def _adopt(self, nodes: list[Node]) -> None:
        came, went = self.machines.adopt(nodes, time.monotonic())
        for name in came:
            self._log.info("cluster: machine %s is there", name, extra=noted(EventKind.CLUSTER))
        for name in went:
            self._log.warning("cluster: machine %s is gone", name, extra=noted(EventKind.CLUSTER))
        self.trouble = ""

    def _give_up(self, why: str) -> None:
        if self._helper.process is not None:
            self._why = why
            self._helper.process.kill()

    def _lose(self, _: HelperProcess) -> None:
        """Note that the helper is gone. Ray ends all its actors, and so all agents end."""
        self._ends += [AgentLeft(number, "the connection to the Ray cluster was lost") for number in self._started]
        for started in (self._started, self._held, self._leased):
            started.clear()
        self.machines.lose()
        self.trouble = self.trouble or f"the helper that talks to Ray: {self._why}"

    def _send(self, message: ToDriver) -> None:
        self._helper.send(pack(message))
        if self._helper.process is not None and self._helper.process.unsent > MOST_UNSENT:
            self._give_up("it does not read")
