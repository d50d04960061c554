"""Inflict the faults of machines and networks (``node_plan``)."""

import contextlib
import os
import signal
from typing import Any

import psutil

from tests.chaos.faults import Faults, Target
from tests.chaos.machines import Machines, agent_of, driver_of
from tests.chaos.node_plan import MACHINES
from tests.chaos.plan import FaultPlan


class NodeFaults(Faults):
    """The faults of an episode in which workers run on other machines."""

    def __init__(self, machines: Machines, *rest: Any) -> None:
        super().__init__(*rest)
        self._machines = machines

    def _agent(self, fault: FaultPlan) -> tuple[Target, Target] | None:
        """Return the agent and the worker at which a fault aims; None if there is none now."""
        worker = self.aim(fault, ready=True)
        if worker is None or (process := agent_of(worker.pid)) is None:
            return None
        try:
            agent = Target(f"agent of {worker.name}", process.pid)
        except ProcessLookupError:
            return None
        self._targets.append(agent)
        return agent, worker

    def _kill_agent(self, fault: FaultPlan) -> None:
        if found := self._agent(fault):
            found[0].signal(signal.SIGKILL)
            self.doomed += found  # the worker goes with it

    def _stop_agent(self, fault: FaultPlan) -> None:
        if found := self._agent(fault):
            found[0].signal(signal.SIGSTOP)
            self.doomed += found

    def _cut_short(self, fault: FaultPlan) -> None:
        self._for_a_while(fault, "cut", "heal")

    def _cut_long(self, fault: FaultPlan) -> None:
        self._for_a_while(fault, "cut", "heal")

    def _machine_gone(self, fault: FaultPlan) -> None:
        self._for_a_while(fault, "off", "on")

    def _for_a_while(self, fault: FaultPlan, begin: str, end: str) -> None:
        name = MACHINES[fault.place]
        self._log(f"  machine {name}: {begin}, {end} after {fault.lasts_s:.2f} s")
        self._machines.tell(name, begin)
        self._later(fault.lasts_s, lambda: self._machines.tell(name, end))
        self._undo.append(lambda: self._machines.tell(name, end))

    def _reset_link(self, fault: FaultPlan) -> None:
        self._machines.tell(MACHINES[fault.place], "reset")

    def _suspend_machine(self, fault: FaultPlan) -> None:
        """Stop an agent and its worker, and cut their machine off. Both come back, and have noticed nothing."""
        found = self._agent(fault)
        for target in found or ():
            target.signal(signal.SIGSTOP)
            self._later(fault.lasts_s, lambda target=target: target.signal(signal.SIGCONT))
            self._undo.append(lambda target=target: target.signal(signal.SIGCONT))
        for name in MACHINES if found is None else (self._node_of(found[1]),):
            self._machines.tell(name, "cut")
            self._later(fault.lasts_s, lambda name=name: self._machines.tell(name, "heal"))
            self._undo.append(lambda name=name: self._machines.tell(name, "heal"))

    def _node_of(self, worker: Target) -> str:
        return next((m["node"] for m in self._serving.overview()["models"] if m["name"] == worker.name), MACHINES[0])

    def _kill_driver(self, fault: FaultPlan) -> None:
        if driver := driver_of(self._serving.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                driver.kill()

    def _pause_driver(self, fault: FaultPlan) -> None:
        if (driver := driver_of(self._serving.pid)) is not None:
            try:
                target = Target("the driver", driver.pid)
            except ProcessLookupError:
                return
            self._targets.append(target)
            target.signal(signal.SIGSTOP)
            self._later(fault.lasts_s, lambda: target.signal(signal.SIGCONT))
            self._undo.append(lambda: target.signal(signal.SIGCONT))

    def end(self, how: str) -> bool:
        if "cut off" not in how:
            return super().end(how)
        self._log(f"the supervisor's end: {how}")
        for name in MACHINES:
            self._machines.tell(name, "cut")
            self._at_end.append(lambda name=name: self._machines.tell(name, "heal"))
        for target in self.doomed:
            target.signal(signal.SIGCONT)  # an agent that is stopped cannot end its worker
        self._serving._killed = True
        os.kill(self._serving.pid, signal.SIGKILL)
        return False
