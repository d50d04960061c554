"""Start workers on other machines, through an agent for each, and watch them over the network.

A worker there counts as ended when its agent says so, when what has started the agent says that the agent is gone, or
when nothing was heard of the agent for a lease. In the last case the machine or the network may be gone, or the agent
may have been stopped. The worker may still run. Its key is taken off the list, and frames that it sends are dropped, so
another worker can take its requests at once. The agent ends the worker at the end of a lease of its own.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from protocol import __version__
from protocol.errors import FrameError
from protocol.process.private_paths import open_private
from protocol.process.progress_lease import Reading, read_word
from protocol.process.worker_spec import LinkKeys, WorkerSpec
from supervisor.cluster.agent_messages import (
    BEAT_S,
    Beat,
    Copying,
    Ended,
    Heard,
    Leave,
    Log,
    Order,
    Refused,
    Signal,
    Stacks,
    ToAgent,
    Up,
    pack,
    read_from_agent,
)
from supervisor.cluster.starting import AgentStarter, NoMachineError
from supervisor.cluster.store_keeper import ModelStore
from supervisor.cluster.store_places import directories_of
from supervisor.model_logs import about
from supervisor.workers.hang_detector import CheckClock
from supervisor.workers.launcher import Launched

CHECK_S = 0.1
"""Seconds between two calls of ``RemoteLauncher.check``."""
SILENT_S = 4 * BEAT_S
"""Seconds without a beat after which the last one says nothing about the worker any more."""
AUTO = "auto"
"""The name of no machine: any one is meant."""
LOST = -signal.SIGKILL
"""The exit code of a worker whose end nobody has seen."""


class RemoteWorker:
    """A worker on another machine, see ``launcher.Launched``.

    node  the name of the machine
    pid   the process's pid there; 0 until the agent is up
    waits  why no agent could be started yet; "" once one was
    progress  how far its directories are copied; None at other times
    lost  why the worker counts as ended although nobody has seen its end; "" otherwise
    """

    def __init__(self, launcher: "RemoteLauncher", number: int, spec: WorkerSpec) -> None:
        self._launcher = launcher
        self.number, self.spec = number, spec
        self.node = "" if spec.node == AUTO else spec.node
        self.waits = ""
        self.progress: dict[str, Any] | None = None
        self.key = ""
        self.agent_id = b"agent-" + os.urandom(16)
        self.pid = 0
        self.lost = ""
        self.code: int | None = None
        self.up = False
        self.silent_s = 0.0
        """Seconds counted since the last message of the agent."""
        self.beat = Beat(_first_word(spec.leases.start_s), None, "its machine has not answered yet")

    @property
    def is_gone(self) -> bool:
        return self.code is not None

    def signal(self, number: int) -> None:
        if not self.is_gone:
            self._launcher.signal(self, number)

    def read_lease(self) -> Reading | None:
        # A worker does not hang because its network is cut. ``RemoteLauncher.check`` counts how long it is silent.
        # And one that waits for a machine, or for its directories, has not begun.
        return None if self.waits or self.progress or self.silent_s > SILENT_S else read_word(self.beat.word)

    def dump_stacks(self) -> None:
        if not self.is_gone:
            self._launcher.tell(self, Stacks())

    def condition(self) -> str:
        return self.beat.condition

    def memory(self) -> int | None:
        return self.beat.memory


class RemoteLauncher:
    """The launcher of workers on other machines, see ``launcher.Launcher``.

    starter   starts the agents
    endpoint  the port for workers on other machines, as they reach it
    server    the public key of that port
    lease_s   seconds after which a machine counts as lost, for both ends
    send      sends a frame to a routing id of that port, and returns whether it could
    store     the model store; None if the directories of models are on the machines
    """

    def __init__(
        self,
        starter: AgentStarter,
        endpoint: str,
        server: str,
        lease_s: float,
        send: Callable[[bytes, bytes], bool],
        log: logging.Logger,
        store: ModelStore | None = None,
    ) -> None:
        self._starter, self._endpoint, self.server = starter, endpoint, server
        self._lease_s, self._send, self._log, self._store = lease_s, send, log, store
        self._workers: dict[bytes, RemoteWorker] = {}
        """The workers that were not reaped yet, by the routing id of their agent."""
        self._clock = CheckClock(CHECK_S)
        self._number = 0
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.keys: set[str] = set()
        """The public keys of the workers that run, for ZAP."""
        self.versions: dict[str, str] = {}
        """By machine, the version of modelctl that an agent there has told."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when a worker has ended."""
        return self._readable

    @property
    def starter_descriptor(self) -> int:
        """A descriptor that is readable when ``agents_ended`` is to be called."""
        return self._starter.descriptor

    def start(self, spec: WorkerSpec) -> RemoteWorker:
        """Start a worker on the machine ``spec.node``, or on the one that has the fewest workers of its model.

        If no machine has room, the worker waits: ``check`` tries again.
        """
        self._number += 1
        public, secret = zmq.curve_keypair()
        keys = LinkKeys(self.server, public.decode(), secret.decode())
        worker = RemoteWorker(self, self._number, replace(spec, endpoint=self._endpoint, keys=keys))
        self._workers[worker.agent_id] = worker
        self._try(worker)
        return worker

    def _try(self, worker: RemoteWorker) -> None:
        spec, node = worker.spec, worker.spec.node
        assert spec.keys is not None
        try:
            if node == AUTO:
                others = (other for other in self._workers.values() if other is not worker and not other.waits)
                beside = [other.node for other in others if other.spec.engine.model == spec.engine.model]
                node = self._starter.choose(spec.leased_gpus, beside)
            order = Order(
                spec, worker.agent_id, self._lease_s, __version__, self._store.access if self._store else None
            )
            self._starter.start(worker.number, node, spec.leased_gpus, order.packed())
        except NoMachineError as e:
            if str(e) != worker.waits:
                self._log.info("%s: waits: %s", spec.name, e, extra=about(spec.name))
            worker.waits = str(e)
            return
        if worker.waits:
            self._log.info("%s: starts on %s", spec.name, node, extra=about(spec.name))
        worker.node, worker.waits, worker.key = node, "", spec.keys.public
        self.keys.add(worker.key)
        if self._store is not None:
            self._store.admit(worker.key, directories_of(spec.engine))

    def knows(self, routing_id: bytes) -> bool:
        """Return whether a frame with this routing id is of an agent."""
        return routing_id in self._workers

    def on_frame(self, agent_id: bytes, frame: bytes | None) -> None:
        """Handle a frame of an agent. None stands for a message of several parts, which no agent sends."""
        worker = self._workers[agent_id]
        if worker.is_gone:
            return
        try:
            if frame is None:
                return
            message = read_from_agent(frame)
        except FrameError as e:
            self._give_up(worker, f"its agent sent what cannot be: {e}")
            return
        worker.silent_s, worker.up = 0.0, True
        if isinstance(message, Beat):
            worker.beat = message
            self.tell(worker, Heard())
        elif isinstance(message, Copying):
            worker.progress = {
                "phase": message.phase, "done": message.done, "total": message.total, "unit": "bytes",
                "per_s": message.rate,
            }  # fmt: skip
            self.tell(worker, Heard())
        elif isinstance(message, Log):
            _append(worker.spec.log_path, message.text)
        elif isinstance(message, Up):
            worker.pid, worker.progress = message.pid, None
            self.versions[worker.node] = message.build
        elif isinstance(message, Refused):
            self.versions[worker.node] = message.build
            _append(worker.spec.log_path, message.why.encode() + b"\n")
            self._end(worker, LOST, message.why)
        else:
            assert isinstance(message, Ended)
            self.tell(worker, Leave())
            self._end(worker, message.code)

    def agents_ended(self) -> None:
        """Take note of agents that are gone. Frames that they sent before have been handled."""
        by_number = {worker.number: worker for worker in self._workers.values()}
        for end in self._starter.ended():
            worker = by_number.get(end.number)
            if worker is not None and not worker.is_gone:
                self._give_up(worker, end.why or "its agent has ended")

    def check(self, now: float) -> None:
        """Give up workers whose machines are silent, and start those that wait for a machine. Call this every CHECK_S,
        after the frames have been read."""
        passed = self._clock.passed(now)
        for worker in self._workers.values():
            if worker.waits and not worker.is_gone:
                self._try(worker)
            if worker.is_gone or not worker.up:  # until it is up, the worker's first lease counts
                continue
            worker.silent_s += passed
            if worker.silent_s > self._lease_s:
                self._give_up(worker, f"nothing was heard of {worker.node} for {self._lease_s:g} s")

    def heard(self) -> dict[str, float]:
        """Return, by machine, the seconds since one of its agents was heard. Machines without an agent are left out."""
        silent: dict[str, float] = {}
        for worker in self._workers.values():
            if worker.up and not worker.is_gone:
                silent[worker.node] = min(worker.silent_s, silent.get(worker.node, worker.silent_s))
        return silent

    def _give_up(self, worker: RemoteWorker, why: str) -> None:
        self._starter.end(worker.number)
        self._end(worker, LOST, why)

    def _end(self, worker: RemoteWorker, code: int, lost: str = "") -> None:
        worker.code, worker.lost = code, lost
        self.keys.discard(worker.key)
        if self._store is not None:
            self._store.revoke(worker.key)
        os.eventfd_write(self._readable, 1)

    def signal(self, worker: RemoteWorker, number: int) -> None:
        """Send a signal to a worker. One whose agent is not up yet can only be killed."""
        if worker.up:
            self.tell(worker, Signal(number))
        elif number == signal.SIGKILL or worker.waits:
            self._give_up(worker, worker.waits or f"its agent on {worker.node} did not come up")

    def tell(self, worker: RemoteWorker, message: ToAgent) -> None:
        """Send a message to the agent of a worker. An agent that cannot be reached is silent, and given up for that."""
        self._send(worker.agent_id, pack(message))

    def ended(self) -> list[Launched]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._readable)
        return [worker for worker in self._workers.values() if worker.is_gone]

    def reap(self, process: Launched) -> int:
        assert isinstance(process, RemoteWorker)
        del self._workers[process.agent_id]
        return LOST if process.code is None else process.code

    def sweep(self, holds: Mapping[int, str]) -> None:
        """Do nothing: agents of a former supervisor have ended their workers, or do so at the end of their lease."""

    def close(self) -> None:
        self._starter.close()
        if self._store is not None:
            self._store.close()
        os.close(self._readable)


def _first_word(start_s: float) -> int:
    """Return the word of a lease that a worker has before it writes its own: phase STARTING is 0."""
    return min(round(start_s * 1000), 0xFFFFFFF)


def _append(path: str, text: bytes) -> None:
    """Add text to a worker's log on this machine. On a full disk it is lost."""
    with suppress(OSError):
        descriptor = open_private(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
