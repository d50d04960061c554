"""The helper process that talks to Ray: the driver, in Ray's words. The supervisor never imports Ray.

It starts and ends actors as the supervisor tells it, and reports which machines there are. If the cluster hangs, so
does this process, and nobody else. Ray ends all actors when this process ends, and the kernel ends it with the
supervisor.

Ray's Python API is used for membership, leases of GPUs and actors, and nothing else: no queues, no restarts, and no
objects but the names of the GPUs that were leased for a spare agent.
"""

import logging
import math
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protocol.codec import unpack_body
from protocol.errors import FrameError
from protocol.process.helper_link import HelperLink, become_helper
from protocol.values import pack
from supervisor.cluster.machines import is_meant
from supervisor.cluster.messages import (
    TO_DRIVER,
    AgentLeft,
    EndAgent,
    FromDriver,
    KeepSpares,
    Looked,
    Node,
    Nodes,
    StartAgent,
    Unusable,
    read_gpu,
)
from supervisor.workers.local import SparePlan

# Spare agents: actors ahead of their time, one for each engine and machine. The agent of each has a spare worker.
#
# Most seconds of a start go into imports, here as on the supervisor's own machine (``workers.spares``). A spare agent
# has no lease of GPUs. The next one on its machine takes its place after it was used, or has ended by itself.


ASK_S = 10.0
"""Seconds between two questions whether a spare agent lives. Ray does not tell that an agent has ended, since the
agent's actor goes on."""


@dataclass
class _Spare:
    """A spare agent.

    started   future of the first answer whether the agent lives
    asked     future of the latest answer, to the question of ``asked_at``
    """

    actor: Any
    started: Any
    asked: Any
    asked_at: float


class Spares:
    """The spare agents. Times are monotonic seconds, and the caller passes them.

    start  returns a new actor with a spare agent. Arguments: the machine's id, the actor's name, the engine
    ask    asks an actor whether its agent lives. Returns a future of the answer, which comes after the agent's start
    kill   ends an actor
    """

    def __init__(
        self,
        start: Callable[[str, str, str], Any],
        ask: Callable[[Any], Any],
        kill: Callable[[Any], None],
    ) -> None:
        self._start, self._ask, self._kill = start, ask, kill
        self._wanted = KeepSpares([], starting=True)
        self._there: dict[tuple[str, str], _Spare] = {}
        """By the machine's id and the engine."""
        self._plans: dict[str, SparePlan] = {}
        self._count = 0

    def want(self, message: KeepSpares) -> None:
        self._wanted = message

    def keep(self, nodes: Sequence[Node], now: float) -> None:
        """Start the spares that are missing on other machines with GPUs, and end those that are dead or not wanted."""
        machines = {node.node_id: node for node in nodes if node.gpus and not node.own}
        for gone in self._plans.keys() - machines.keys():
            del self._plans[gone]
        wanted = {
            node_id: {engine for name, engine in self._wanted.wanted if is_meant(node, name)}
            for node_id, node in machines.items()
        }
        for (node_id, engine), spare in list(self._there.items()):
            ended = spare.asked.done() and not lives(spare.asked)
            if ended and node_id in self._plans:
                self._plans[node_id].ended(engine, now)
            if ended or engine not in wanted.get(node_id, ()):
                del self._there[node_id, engine]
                self._kill(spare.actor)
            elif spare.asked.done() and now - spare.asked_at >= ASK_S:
                spare.asked, spare.asked_at = self._ask(spare.actor), now
        for node_id, engines in wanted.items():
            there = [engine for known, engine in self._there if known == node_id]
            plan = self._plans.setdefault(node_id, SparePlan())
            for engine in plan.missing(engines, there, now, starting=self._wanted.starting):
                self._count += 1
                name = f"modelctl-{os.getpid()}-spare-{self._count}"
                try:
                    actor = self._start(node_id, name, engine)
                    asked = self._ask(actor)
                except Exception:  # of Ray. The workers that run must not pay for a spare
                    plan.ended(engine, now)
                else:
                    self._there[node_id, engine] = _Spare(actor, asked, asked, now)

    def take(self, node_id: str, engine: str) -> Any | None:
        """Return the actor of a spare agent, which is none any more; None if there is none that has been started."""
        spare = self._there.get((node_id, engine))
        if spare is None or not lives(spare.started):
            return None
        del self._there[node_id, engine]
        return spare.actor

    def used(self, node_id: str, engine: str, now: float, *, lived: bool) -> None:
        """Take note whether a spare that was taken was alive."""
        if (plan := self._plans.get(node_id)) is not None:
            if lived:
                plan.used(engine)
            else:
                plan.ended(engine, now)


def lives(asked: Any) -> bool:
    """Return whether a question whether an agent lives has been answered, and with yes."""
    return asked.done() and asked.exception() is None and bool(asked.result())


LOOK_S = 1.0
"""Seconds between two looks at the machines of the cluster."""
LAG_S = 5.0
"""Seconds after which Ray's figures surely show that an actor has given its GPUs back."""
READ_GPUS_S = 60.0
"""Seconds between two readings of the GPUs of a machine on which no worker reports them. Each starts a process, which
takes 0.2 s of processor time. Ray's own process is kept from one task to the next, and takes as much in a minute."""
STRANGER_S = 30.0
"""Seconds that the try without a token may take."""
_STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
    print("admitted")
except AuthenticationError:
    print("refused")
"""
"""A program without a token. A cluster that lets it in lets anybody run code."""


class Driver:
    """The connection to the supervisor, and the actors that were started."""

    def __init__(self, link: HelperLink) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from supervisor.cluster.ray_actor import AgentActor, Lease, read_gpus

        self._ray: Any = ray
        self._actor: Any = AgentActor
        self._lease_actor: Any = Lease
        self._read_gpus: Any = read_gpus
        self._affinity = NodeAffinitySchedulingStrategy
        self._link = link
        self._actors: dict[int, list[Any]] = {}
        """The actors of each agent: its own, and the one that holds the lease of an agent that was a spare one. Empty
        for an agent that was ended, until its end is told."""
        self._spares = Spares(self._start_spare, self._ask, self._kill)
        self._over: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[tuple[StartAgent, Any, bool]] = queue.SimpleQueue()
        """Spare agents that were asked whether they live: for which start, the actor, the answer."""
        self._leases: dict[int, tuple[str, int]] = {}
        """The machine of each actor that holds GPUs, and how many."""
        self._returned: list[tuple[float, str, int]] = []
        """When leases were given back: time, machine, GPUs."""
        self._read: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._devices: dict[str, list[Any] | None] = {}
        """What was read of each machine's GPUs."""
        self._read_at: dict[str, float] = {}
        """When the GPUs of each machine are read next; infinity while that goes on."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._said: list[Node] | None = None

    def run(self) -> None:
        """Serve the supervisor until it ends the connection. Raises EOFError then."""
        own = self._ray.get_runtime_context().get_node_id()
        poll = select.poll()
        for source in (self._link.descriptor, self._wake):
            poll.register(source, select.POLLIN)
        look_at = 0.0
        while True:
            if (now := time.monotonic()) >= look_at:
                self._say_nodes(own)
                look_at = now + LOOK_S
            ready = {descriptor for descriptor, _ in poll.poll(round(1000 * max(0.0, look_at - time.monotonic())))}
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._over.empty():
                    number, why = self._over.get()
                    if (lease := self._leases.pop(number, None)) is not None:
                        self._returned.append((time.monotonic(), *lease))
                    if (actors := self._actors.pop(number, None)) is not None:
                        for actor in actors:  # if the lease was lost, the agent still runs
                            self._kill(actor)
                        self._say(AgentLeft(number, why))
                while not self._asked.empty():
                    self._use_spare(*self._asked.get())
                while not self._read.empty():
                    node_id, told = self._read.get()
                    self._devices[node_id] = _devices_of(told)
                    self._read_at[node_id] = time.monotonic() + READ_GPUS_S
            if self._link.descriptor in ready and (record := self._link.receive()) is not None:
                message = TO_DRIVER.read(record)
                if isinstance(message, StartAgent):
                    self._start(message)
                elif isinstance(message, KeepSpares):
                    self._spares.want(message)
                elif isinstance(message, EndAgent):
                    actors = self._actors.get(message.number, [])
                    for actor in actors:
                        self._kill(actor)
                    actors.clear()

    def _new(self, kind: Any, node_id: str, gpus: int, name: str) -> Any:
        """Start an actor on a machine, with a lease of GPUs."""
        where = self._affinity(node_id, soft=False)
        return kind.options(num_gpus=gpus, scheduling_strategy=where, name=name).remote()

    def _kill(self, actor: Any) -> None:
        self._ray.kill(actor, no_restart=True)

    def _start_spare(self, node_id: str, name: str, engine: str) -> Any:
        actor = self._new(self._actor, node_id, 0, name)
        actor.prepare.remote(engine)
        return actor

    def _ask(self, actor: Any) -> Any:
        """Ask an actor whether the spare agent that it was started with lives. Return a future of the answer."""
        return actor.is_there.remote().future()

    def _start(self, message: StartAgent) -> None:
        """Start an agent. A spare one is asked first whether it lives."""
        number = message.number
        if message.gpus:
            self._leases[number] = message.node_id, message.gpus
        if (spare := self._spares.take(message.node_id, message.engine)) is None:
            self._run(message)
            return
        self._actors[number] = [spare]

        def note(done: Any) -> None:  # Ray calls this on a thread of its own
            self._asked.put((message, spare, lives(done)))
            os.eventfd_write(self._wake, 1)

        self._ask(spare).add_done_callback(note)

    def _use_spare(self, message: StartAgent, spare: Any, lived: bool) -> None:
        """Give a spare agent its order, or a new agent if the spare is dead."""
        number = message.number
        self._spares.used(message.node_id, message.engine, time.monotonic(), lived=lived)
        if not self._actors[number]:  # it was ended meanwhile
            self._put_end(number, "")
            return
        if not lived:
            self._kill(spare)
            spare = None
        self._run(message, spare)

    def _run(self, message: StartAgent, agent: Any = None) -> None:
        """Give a spare agent its order, and the GPUs that another actor leases; without a spare, a new agent."""
        number, devices = message.number, None
        self._actors[number] = actors = [] if agent is None else [agent]
        try:
            if agent is None or message.gpus:
                kind = self._actor if agent is None else self._lease_actor
                actors.append(self._new(kind, message.node_id, message.gpus, _name_of(number)))
            if agent is not None and message.gpus:
                devices = actors[-1].devices.remote()  # the agent's actor waits for it
                self._when_over(number, actors[-1].hold.remote())
            self._when_over(number, actors[0].run.remote(message.order, devices))
        except Exception as e:
            self._put_end(number, line_of(e))

    def _when_over(self, number: int, result: Any) -> None:
        result.future().add_done_callback(lambda done: self._note_end(number, done))

    def _note_end(self, number: int, done: Any) -> None:
        """Take note that an agent has ended. Ray calls this on a thread of its own."""
        try:
            code = done.result()
            why = f"its agent left with exit code {code}" if code else ""
        except Exception as e:
            why = line_of(e)
        self._put_end(number, why)

    def _put_end(self, number: int, why: str) -> None:
        self._over.put((number, why))
        os.eventfd_write(self._wake, 1)

    def _read_devices(self, nodes: list[Node]) -> None:
        """Read the GPUs of the machines on which no worker of ours reports them."""
        ids = {node.node_id for node in nodes if node.gpus and not node.own}
        for kept in (self._devices, self._read_at):
            for gone in [node_id for node_id in kept if node_id not in ids]:
                del kept[gone]
        now, told = time.monotonic(), {node_id for node_id, _ in self._leases.values()}
        for node_id in ids:
            if node_id in told:
                self._read_at[node_id] = 0.0  # as soon as no worker reports them any more
            elif now >= self._read_at.get(node_id, 0.0):
                self._read_at[node_id] = math.inf
                task = self._read_gpus.options(scheduling_strategy=self._affinity(node_id, soft=False)).remote()
                task.future().add_done_callback(lambda done, node_id=node_id: self._note_gpus(node_id, done))

    def _note_gpus(self, node_id: str, done: Any) -> None:
        """Take note of what was read of a machine. Ray calls this on a thread of its own."""
        try:
            told = done.result()
        except Exception:  # the machine has left
            told = b""
        self._read.put((node_id, told))
        os.eventfd_write(self._wake, 1)

    def _others(self, node: dict[str, Any], free: float) -> float:
        """Return the GPUs of a machine that other programs have leased from Ray."""
        now = time.monotonic()
        self._returned = [one for one in self._returned if now - one[0] < LAG_S]
        ours = [*self._leases.values(), *((node_id, gpus) for _, node_id, gpus in self._returned)]
        leased = node["Resources"].get("GPU", 0.0) - free
        return max(0.0, float(leased) - sum(gpus for node_id, gpus in ours if node_id == node["NodeID"]))

    def _say_nodes(self, own: str) -> None:
        free = self._ray._private.state.available_resources_per_node()
        machines = [
            Node(
                node_id=node["NodeID"],
                name=node.get("NodeName") or node["NodeManagerAddress"],
                address=node["NodeManagerAddress"],
                gpus=node["Resources"].get("GPU", 0.0),
                free=free.get(node["NodeID"], {}).get("GPU", 0.0),
                others=self._others(node, free.get(node["NodeID"], {}).get("GPU", 0.0)),
                own=node["NodeID"] == own,
                labels={str(key): str(value) for key, value in (node.get("Labels") or {}).items()},
                devices=self._devices.get(node["NodeID"]),
            )
            for node in sorted(self._ray.nodes(), key=lambda node: str(node.get("NodeName")))
            if node["Alive"]
        ]
        self._read_devices(machines)
        self._spares.keep(machines, time.monotonic())
        self._say(Looked() if machines == self._said else Nodes(machines))
        self._said = machines

    def _say(self, message: FromDriver) -> None:
        self._link.send(pack(message))


def _name_of(number: int) -> str:
    """Return the name of the actor that holds the lease of an agent's GPUs."""
    return f"modelctl-{os.getpid()}-{number}"


def _devices_of(told: object) -> list[Any] | None:
    """Return the GPUs that ``gpu_probe`` has told. What comes from another machine is checked."""
    if not isinstance(told, bytes):
        return None
    try:
        return [read_gpu(gpu) for gpu in unpack_body(told)["gpus"]]
    except (FrameError, KeyError, TypeError, ValueError):
        return None


def why_open(address: str) -> str | None:
    """Return, for people, why the cluster is not safe to use: it lets a process in that has no token, or that cannot be
    known. Return None for a cluster that refuses such a process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "disabled", "HOME": "/nonexistent"}
    command = [sys.executable, "-P", "-c", _STRANGER, address]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=STRANGER_S, cwd="/")
    except subprocess.TimeoutExpired:
        return "it cannot be seen whether it refuses processes without a token: it does not answer them"
    said = done.stdout.split()
    if said[-1:] == [b"refused"]:
        return None
    if said[-1:] == [b"admitted"]:
        return (
            "it lets anybody run code who can reach it: start all its machines with RAY_AUTH_MODE=token and the same "
            "token"
        )
    return f"it cannot be seen whether it refuses processes without a token: {done.stderr.decode()[-200:]}"


def line_of(error: Exception) -> str:
    """Return one line of an error of Ray for people. Ray's messages are long."""
    text = " ".join(str(getattr(error, "cause", None) or error).split())
    return f"Ray: {type(error).__name__}: {text[:300]}"


def main() -> None:
    """Connect to the cluster of the first argument, and serve the supervisor at standard input."""
    address = sys.argv[1]
    link = become_helper("driver of Ray", ignored=())
    try:
        import ray

        ray.init(address=address, namespace="modelctl", log_to_driver=False, logging_level=logging.ERROR)
    except ModuleNotFoundError:
        link.send(pack(Unusable("the package ray is not installed: pip install 'modelctl[ray]'")))
        return
    except Exception as e:
        link.send(pack(Unusable(f"the cluster {address} cannot be reached: {line_of(e)}")))
        return
    if (why := why_open(ray.get_runtime_context().gcs_address)) is not None:
        link.send(pack(Unusable(f"the Ray cluster {address} is not used: {why}")))
        return
    with suppress(EOFError):
        Driver(link).run()


if __name__ == "__main__":
    main()
