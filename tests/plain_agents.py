"""Start agents as plain processes of this machine, in the place of what starts them on a cluster."""

import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from supervisor.cluster.messages import AgentLeft, Node
from supervisor.config.reading import is_name
from supervisor.workers.launcher import NoMachineError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class PlainStarter:
    """Starts agents as a RayStarter does. ``before`` are words in front of the command, as ``ip netns exec NAME``."""

    def __init__(self, before: Sequence[str] = ()) -> None:
        self._before = list(before)
        self._epoll = select.epoll()
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self.nodes = ["far"]
        """The machines that ``choose`` knows."""
        self.path: list[str] = []
        """Directories in front of its PYTHONPATH."""
        self.devices = ""
        """The CUDA_VISIBLE_DEVICES that an agent gets with a lease of GPUs."""
        self.gpus = 0
        """The GPUs of each machine. An agent gets the free ones with the lowest indices, as of Ray. 0: all get
        ``devices``."""
        self.leases: dict[int, tuple[str, list[int]]] = {}
        """The machine and the GPUs of each agent, while ``gpus`` counts."""
        self.lost_nodes: set[str] = set()
        """Machines on which no agent can be started."""

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def choose(
        self, wanted: str, gpus: int, beside: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> Node:
        left = [node for node in self.nodes if node not in without]
        if is_name(wanted):
            if self.gpus and (free := len(self.free(wanted))) < gpus:
                raise NoMachineError(f"{wanted} has {free} of {self.gpus} GPUs free, and {gpus} are needed")
            return Node("", wanted, "", 0, 0, 0, False)
        if left:
            return Node("", left[0], "", 0, 0, 0, False)
        raise NoMachineError("no other machine")

    def free(self, node: str) -> list[int]:
        """Return the GPUs of a machine that are not leased."""
        leased = {gpu for name, gpus in self.leases.values() for gpu in gpus if name == node}
        return [gpu for gpu in range(self.gpus) if gpu not in leased]

    def start(self, number: int, node: Node, gpus: int, engine: str, order: bytes) -> None:
        if node.name in self.lost_nodes:
            raise NoMachineError(f"no machine {node.name}")
        devices = self.devices
        if self.gpus:
            self.leases[number] = node.name, self.free(node.name)[:gpus]
            devices = ",".join(map(str, self.leases[number][1]))
        agent = subprocess.Popen(
            [*self._before, sys.executable, "-P", "-m", "supervisor.cluster"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*self.path, ROOT])},
            start_new_session=True,
        )
        assert agent.stdin is not None
        agent.stdin.write((devices if gpus else "").encode() + b"\n" + order)
        agent.stdin.close()
        self.agents[number] = agent
        pidfd = os.pidfd_open(agent.pid)
        self._pidfds[pidfd] = number
        self._epoll.register(pidfd, select.EPOLLIN)

    def end(self, number: int) -> None:
        if number in self.agents:
            self.agents[number].kill()

    def ended(self) -> list[AgentLeft]:
        ends = []
        for pidfd, _ in self._epoll.poll(0):
            number = self._pidfds.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            code = self.agents.pop(number).wait()
            self.leases.pop(number, None)
            ends.append(AgentLeft(number, f"its agent left with {code}" if code else ""))
        return ends

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._epoll.close()
