"""Start agents on the machines of a Ray cluster, through the helper process that talks to Ray (``ray_driver``)."""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping

from protocol.errors import FrameError
from protocol.process.helper_environment import helper_environment
from protocol.process.helper_process import HelperProcess
from supervisor.attempts import Restarts
from supervisor.cluster.choice import choose
from supervisor.cluster.driver_messages import (
    AgentLeft,
    EndAgent,
    KeepSpares,
    Looked,
    Node,
    Nodes,
    StartAgent,
    ToDriver,
    Unusable,
    pack,
    read,
)
from supervisor.cluster.listed_machines import Machines
from supervisor.cluster.starting import AgentEnd
from supervisor.event_history import EventKind, noted
from supervisor.helper import Helper, HelperWatch
from supervisor.workers.machines import NoMachineError

_COMMAND = (sys.executable, "-P", "-m", "supervisor.cluster.ray_driver")
NOT_YET = "the Ray cluster has not answered yet"
AGAIN_S = 5.0
"""Seconds between two starts of the helper."""
MOST_UNSENT = 1 << 20
"""Bytes that may wait for the helper. A helper that reads so slowly is killed."""
_ENDED = "it has ended"


class RayStarter:
    """An ``AgentStarter``. Raises OSError if the helper cannot be started.

    address   the cluster's address, as Ray takes it, or "auto" for the one that this machine belongs to
    machines  the machines of the cluster
    trouble   why the cluster cannot be used, for people; "" if it can, or has not answered yet
    unreachable  why agents could not reach the supervisor, for people; "" if they can. None is started meanwhile
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
        self._ends: list[AgentEnd] = []
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
    ) -> str:
        return self._choose(wanted, gpus, beside, without).name

    def _choose(
        self, wanted: str, gpus: int, beside: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> Node:
        if self.unreachable or self._helper.process is None or not self.nodes:
            raise NoMachineError(self.unreachable or self.trouble or NOT_YET)
        free = {node.name: self._free(node) for node in self.nodes}
        return choose(self.nodes, free, wanted, gpus, beside, self._held, without)

    def _free(self, node: Node) -> float:
        """Return the GPUs of a machine that can be leased. What Ray says is up to a second old, so our agents' leases
        are counted here."""
        return node.gpus - node.others - self._leased[node.name]

    def start(self, number: int, node: str, gpus: int, engine: str, order: bytes) -> None:
        node_id = self._choose(node, gpus).node_id
        self._started[number] = node, gpus
        self._held[node] += 1
        self._leased[node] += gpus
        self._send(StartAgent(number, node_id, gpus, engine, order))

    def end(self, number: int) -> None:
        if number in self._started:
            self._send(EndAgent(number))

    def keep_spares(self, wanted: Collection[tuple[str, str]], *, starting: bool) -> None:
        """Have spare agents kept, see ``driver_messages.KeepSpares``. The loop calls this again and again."""
        told = KeepSpares([list(pair) for pair in sorted(wanted)], starting)
        if self._helper.process is not None and told != self._spares:
            self._spares = told
            self._send(told)

    def ended(self) -> list[AgentEnd]:
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
        self._helper.end()

    def _take(self, record: bytes) -> None:
        try:
            message = read(record)
        except FrameError as e:
            self._give_up(str(e))
            return
        if isinstance(message, Nodes):
            self._adopt(message.read())
        elif isinstance(message, Looked):
            self.machines.confirm(time.monotonic())
        elif isinstance(message, AgentLeft):
            if message.number in self._started:
                self._forget(message.number)
                self._ends.append(AgentEnd(message.number, message.why))
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
        self._ends += [AgentEnd(number, "the connection to the Ray cluster was lost") for number in self._started]
        for started in (self._started, self._held, self._leased):
            started.clear()
        self.machines.lose()
        self.trouble = self.trouble or f"the helper that talks to Ray: {self._why}"

    def _send(self, message: ToDriver) -> None:
        self._helper.send(pack(message))
        if self._helper.process is not None and self._helper.process.unsent > MOST_UNSENT:
            self._give_up("it does not read")
