"""The agent of one worker on another machine. It sees whether the worker fits on its GPUs, starts it as the supervisor
starts its own, reports how the worker is, and ends it when it is told to, or when it has heard nothing of the
supervisor for a lease.

The program reads one order (``agent_messages.Order``) from its standard input up to its end. It dies with the process
that has started it, and the worker dies with the agent: the kernel sees to both. Its exit code is 0 if the supervisor
knows how the worker ended.

With the name of an engine as its argument it is a spare agent: it keeps a spare worker of this engine while it waits
for its order.
"""

import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import zmq

from protocol import __version__
from protocol.errors import FrameError
from protocol.process.birth import die_with, set_title
from protocol.process.sockets import prove_keys
from protocol.process.worker_spec import LOAD_ERROR_PREFIX, WorkerPhase, WorkerSpec, missing_for
from protocol.values import pack
from supervisor.cluster.copies import Fetching, directories_of, moved
from supervisor.cluster.messages import (
    BEAT_S,
    MAX_LOG,
    TO_AGENT,
    Admitted,
    Beat,
    Ended,
    FromAgent,
    Gpus,
    Heard,
    Leave,
    Log,
    Order,
    Refused,
    Signal,
    Stacks,
    StoreAccess,
    Up,
)
from supervisor.placement.estimates import ESTIMATED, Estimated, Estimator, Question
from supervisor.placement.gpu_reader import GpuReader
from supervisor.placement.gpus import Gpu, GpusAbsent, GpusLate, GpusUnknown
from supervisor.placement.policy import (
    GpuRequest,
    Needs,
    Placed,
    PlacementRefused,
    near_cpus,
    numa_nodes,
    place,
    place_unseen,
    ranges,
    rooms,
    split_of,
)
from supervisor.placement.vram import free_bytes
from supervisor.reactor import Timers
from supervisor.workers.launcher import Launched
from supervisor.workers.local import LocalLauncher
from supervisor.workers.orphans import Orphans, become_subreaper

# The GPUs of an agent's machine: whether the worker fits on those that were leased, and what they hold.
#
# The agent estimates the worker's need and reads NVML before it starts the worker. The words and the arithmetic are
# those with which the supervisor places workers of its own machine.


ROOM_WAIT_S = 10.0
"""Seconds that a worker waits for room. The memory of a process that has just ended may not be back yet."""
READING_WAIT_S = 30.0
"""Seconds that a worker waits for a driver whose answer is late. Then it starts without a look at the GPUs."""
RETRY_S = 0.25
"""Seconds between two looks at the GPUs for a worker that waits."""
REPORT_S = 1.0
"""Seconds between two readings of the GPUs for the supervisor's status."""


@dataclass(frozen=True)
class Fits:
    """The worker can be started on these CPUs (empty: all). ``report`` tells the supervisor about it."""

    report: Admitted
    cpus: tuple[int, ...] = ()


class AgentGpus:
    """Looks at the GPUs for one worker. A worker on the CPU has no GPUs, and always fits.

    spec   with the places of the model's directories on this machine, and with the devices of the lease
    order  a worker whose order has ``passed`` has been refused before, and does not wait for room again
    """

    def __init__(self, spec: WorkerSpec, order: Order, timers: Timers, log: logging.Logger) -> None:
        self._spec, self._passed, self._limits = spec, order.passed, order.limits
        self._count, self._vram = order.elsewhere.gpus, order.elsewhere.vram
        self._estimator = Estimator(timers)
        self._estimated: Estimated | None = None
        self._reader = GpuReader(log, start_s=0.0) if self._count else None
        self._begun = self._again_at = time.monotonic()
        self._said: Gpus | None = None
        self._ready_at: float | None = None
        """Since when the worker is known to be loaded."""
        self._is_measured = False
        self._loaded: int | None = None
        """The bytes that the worker held when it was loaded, by the first reading after that."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when ``decide`` has an estimate to take in."""
        return self._estimator.descriptor

    def begin(self) -> Refused | None:
        """Check that the engine is installed, and begin to read the model's directory. Return why that is in vain.

        Raises OSError if the system has no process or descriptor left.
        """
        spec = self._spec
        if (missing := missing_for(spec.engine.engine)) is not None:
            return Refused("config", LOAD_ERROR_PREFIX + missing, False)
        if self._count and not spec.visible_devices:
            return Refused("config", "Ray leased GPUs and set no CUDA_VISIBLE_DEVICES: let it do so", False)
        if self._count and spec.engine.engine in ESTIMATED:
            question = Question(spec.engine, spec.sampling, spec.forced, (self._count,))
            self._estimator.ask("the worker", question, self._take)
        else:
            self._take(Estimated(unknown=f"there is no estimate for engine {spec.engine.engine}"))
        return None

    def _take(self, estimated: Estimated) -> None:
        self._estimated, self._begun = estimated, time.monotonic()

    def decide(self, now: float) -> Fits | Refused | None:
        """Return whether the worker fits; None if that is not known yet. Call this again and again."""
        self._estimator.ended()
        estimated = self._estimated
        if estimated is None or now < self._again_at:
            return None
        self._again_at = now + RETRY_S
        if estimated.error is not None:
            return Refused(estimated.reason, LOAD_ERROR_PREFIX + estimated.error, estimated.retry)
        if self._reader is None:
            return Fits(Admitted([], {}, None, None, None))
        reading: Sequence[Gpu] | None = None
        try:
            reading = self._reader.read()
        except GpusLate:
            if now - self._begun < READING_WAIT_S:
                return None
        except GpusUnknown:
            pass
        return self._place(estimated, reading, now)

    def _place(self, estimated: Estimated, reading: Sequence[Gpu] | None, now: float) -> Fits | Refused | None:
        engine, count = self._spec.engine, self._count
        split, pins = split_of(engine.engine, engine.options, count), tuple(self._spec.visible_devices.split(","))
        request = GpuRequest(pins, split, count)
        needs = {count: Needs(declared=self._vram)} if self._vram else estimated.needs
        there = rooms(reading or (), [], self._limits)
        decision = place_unseen(request, None) if reading is None else place(request, needs, there)
        if isinstance(decision, PlacementRefused):
            if not decision.missing:
                return Refused("config", decision.message, False)
            if not self._passed and now - self._begun < ROOM_WAIT_S:
                return None
            leased = [room for room in there if any(map(room.gpu.is_meant, pins))]
            left = [room for room in there if room not in leased and room.gpu.index not in self._passed]
            other = place(GpuRequest(None, split, count), needs, left)
            indices = [room.gpu.index for room in leased]
            return Refused("no room", decision.message, False, indices, isinstance(other, Placed))
        cpus = near_cpus(decision.gpus, os.sched_getaffinity(0))
        parts = needs[count].parts(count) if needs else {}
        unknown = None if needs else estimated.unknown
        nodes = ranges(numa_nodes(decision.gpus, cpus)) or None
        indices = [gpu.index for gpu in decision.gpus]
        return Fits(Admitted(indices, parts, unknown, ranges(cpus) or None, nodes), cpus)

    def report(self, pid: int, *, is_loaded: bool) -> Gpus | None:
        """Return what the GPUs hold now, if that has changed. Never waits. Call this every ``REPORT_S``.

        pid        the worker
        is_loaded  whether the worker has loaded its model
        """
        if self._reader is None:
            return None
        if is_loaded and self._ready_at is None:
            self._ready_at = time.monotonic()
        try:
            answer = self._reader.read_ahead()
        except GpusAbsent:
            self.close()
            return None
        except GpusUnknown:
            return None
        if answer is None:
            return None
        asked_at, gpus = answer
        held = [[gpu.index, gpu.processes[pid]] for gpu in gpus if pid in gpu.processes]
        # An answer to a question of before shows a part of the model.
        if not self._is_measured and self._ready_at is not None and asked_at >= self._ready_at:
            self._is_measured = True
            self._loaded = sum(size for _, size in held if size is not None) or None
        told = Gpus([[gpu.index, gpu.uuid, gpu.total, gpu.used, gpu.free] for gpu in gpus], held, self._loaded)
        if told == self._said:
            return None
        self._said = told
        return told

    def close(self) -> None:
        """End the processes that read the model's directory and NVML."""
        self._estimator.forget("the worker")
        if self._reader is not None:
            self._reader.close()
            self._reader = None


SOCKET_MARK = 1000
"""Messages that may wait for the network in each direction."""
HOLD_S = 120.0
"""Seconds for which a refused lease is held at most. Ray leases the free GPUs with the lowest indices, so another lease
gets other GPUs only while this one is held. There is no worker, so a lost supervisor does no harm meanwhile."""
MOST_LOGGED = 8 << 20
"""Bytes of the worker's log on this machine beyond which it is emptied. The supervisor keeps what was sent."""
LAST_WORDS = 1 << 20
"""Bytes of such a log that are kept if it grows faster than it can be sent."""
PREFIX = "modelctl-agent-"
"""The name of an agent's directory begins so. The agent's pid follows."""

EXIT_KNOWN, EXIT_LOST, EXIT_REFUSED = 0, 1, 2


class _LeaveError(Exception):
    """There is nothing left to do. ``code`` is the agent's exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class ProcessStarter:
    """The launcher of this machine, with the timers and the log that it uses."""

    def __init__(self, directory: Path) -> None:
        self.timers, self.log = Timers(), logging.getLogger("supervisor.agent")
        self.launcher = LocalLauncher(self.timers, Orphans(directory, self.log), self.log, directory / "spare.log")

    def call_timers(self, now: float) -> None:
        for timer in self.timers.due(now):
            if not timer.cancelled:
                timer.callback()

    def wait_for_order(self, engine: str) -> bytes:
        """Keep a spare worker of an engine, and return what standard input brings up to its end.

        As on the supervisor's own machine, another spare follows one that has ended, and none is made while the machine
        has too little memory. If there is none when the order comes, the worker starts without.
        """
        poller, ready = select.poll(), dict[int, int]()
        for descriptor in (stdin := sys.stdin.fileno(), self.launcher.descriptor):
            poller.register(descriptor, select.POLLIN)
        while stdin not in ready:
            self.launcher.keep_spares({(engine, None)}, time.monotonic(), starting=False, free=free_bytes)
            ready = dict(poller.poll(1000))
            self.call_timers(time.monotonic())
            self.launcher.ended()  # collects a spare that has ended
        return sys.stdin.buffer.read()


class Agent:
    """One worker, and the connection to its supervisor.

    devices  CUDA_VISIBLE_DEVICES of the lease
    """

    def __init__(self, order: Order, devices: str, directory: Path, starter: ProcessStarter) -> None:
        self._order = order
        self._log_file = directory / "worker.log"
        self._log_sent = 0
        self._fetching: Fetching | None = None
        """What copies the model's directories. Its copies are kept as long as it lives."""
        spec = order.spec
        assert spec.keys is not None
        context = self._context = zmq.Context()
        link = self._link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.ROUTING_ID, order.agent_id)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.SNDHWM, SOCKET_MARK)
        link.setsockopt(zmq.RCVHWM, SOCKET_MARK)
        link.setsockopt(zmq.MAXMSGSIZE, MAX_LOG)
        link.setsockopt(zmq.RECONNECT_IVL, -1)  # the key may be taken off the list meanwhile: the lease decides
        prove_keys(link, spec.endpoint, spec.keys)
        link.connect(spec.endpoint)
        self._starter = starter
        self._timers, self._launcher, self._log = starter.timers, starter.launcher, starter.log
        self._spec = replace(
            spec, log_path=str(self._log_file), supervisor_pid=os.getpid(), link_lease_s=order.lease_s,
            visible_devices=devices if order.elsewhere.gpus else spec.visible_devices,
        )  # fmt: skip
        self._gpus: AgentGpus | None = None
        """What sees whether the worker fits; None until the model's directories are there."""
        self._killed_by: int | None = None
        """The signal that came for a worker that was not started yet."""
        self._report_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(link, zmq.POLLIN)
        self._poller.register(self._launcher.descriptor, zmq.POLLIN)

    def run(self) -> int:
        """Start the worker, and stay with it until it has ended. Return this process's exit code."""
        try:
            worker = self._start()
            while True:  # until the worker ends, or is given up
                self._attend(lambda now: None, lambda now: self._sign_of(worker, now), worker)
        except _LeaveError as e:
            return e.code

    def _start(self) -> Launched:
        """Start the worker, if it fits. Raises _LeaveError."""
        if self._order.build != __version__:
            why = (
                f"modelctl {__version__} is installed on {socket.gethostname()}, and the supervisor is "
                f"{self._order.build}: install the same version"
            )
            self._refuse(Refused("config", why, False))
        if self._order.store is not None:
            self._copy(self._order.store)
        try:
            gpus = self._gpus = AgentGpus(self._spec, self._order, self._timers, self._log)
            self._poller.register(gpus.descriptor, zmq.POLLIN)
            waits = Beat(0, None, "its machine sees whether it fits")
            if (refused := gpus.begin()) is not None:
                self._refuse(refused)
            verdict: Fits | Refused = self._attend(gpus.decide, lambda now: waits)
            if isinstance(verdict, Refused):
                self._refuse(verdict)
            self._send(verdict.report)
            worker = self._launcher.start(replace(self._spec, cpus=verdict.cpus))
            self._launcher.keep_spares((), time.monotonic(), starting=True)  # one that was not ready in time
        except OSError as e:
            why = f"cannot start a process on {socket.gethostname()}: {e.strerror or e}"
            self._refuse(Refused("spawn", why, True))
        self._send(Up(worker.pid, __version__))
        return worker

    def _copy(self, store: StoreAccess) -> None:
        """Copy the model's directories to this machine. Raises _LeaveError."""
        assert self._spec.keys is not None
        directories = directories_of(self._spec.engine)
        fetching = self._fetching = Fetching(self._context, store, self._spec.keys, directories)
        fetching.start()
        self._attend(lambda now: None if fetching.is_alive() else fetching, fetching.progress)
        if fetching.problem:
            self._refuse(Refused("spawn", fetching.problem, True))
        self._spec = replace(self._spec, engine=moved(self._spec.engine, fetching.places))

    def _attend(
        self,
        outcome: Callable[[float], Any],
        sign: Callable[[float], FromAgent],
        worker: Launched | None = None,
    ) -> Any:
        """Wait for an outcome, and return it. Meanwhile send signs of life, and do what the supervisor orders.

        Raises _LeaveError if the worker ends first, if it is not wanted any more, or if nothing is heard of the
        supervisor for a lease.

        outcome  returns it, or None if it is not known yet
        sign     returns the next sign of life. It is sent every BEAT_S
        worker   the worker; None before it is started
        """
        heard, sign_at = time.monotonic(), 0.0
        while (found := outcome(now := time.monotonic())) is None:
            if now >= sign_at:
                self._send(sign(now))
                sign_at = now + BEAT_S
            self._starter.call_timers(now)
            if self._poller.poll(round(1000 * max(0.0, sign_at - time.monotonic()))) and self._take(worker):
                heard = time.monotonic()
            if ended := self._launcher.ended():  # a spare that has ended is collected by this
                raise _LeaveError(self._report_end(self._launcher.reap(ended[0])))
            if self._killed_by is not None:
                raise _LeaveError(self._report_end(-self._killed_by))
            if time.monotonic() - heard > self._order.lease_s:
                if worker is not None:
                    self._give_up(worker)
                raise _LeaveError(EXIT_LOST)
        return found

    def _sign_of(self, worker: Launched, now: float) -> Beat:
        """Return the next beat of the worker. Before it, send what the worker has logged, and what the GPUs hold."""
        self._send_log()
        reading = worker.read_lease()
        if self._gpus is not None and now >= self._report_at:  # the answer to the question of the last time
            is_loaded = reading is not None and reading.phase in (WorkerPhase.IDLE, WorkerPhase.STEP)
            if (report := self._gpus.report(worker.pid, is_loaded=is_loaded)) is not None:
                self._send(report)
            self._report_at = now + REPORT_S
        return Beat(0 if reading is None else reading.word, worker.memory(), worker.condition())

    def _take(self, worker: Launched | None) -> bool:
        """Do what the supervisor has ordered. Return whether it has been heard."""
        heard = False
        while True:
            try:
                message = TO_AGENT.read(self._link.recv(zmq.NOBLOCK))
            except zmq.Again:
                return heard
            except FrameError:
                continue
            heard = True
            if worker is None:
                if isinstance(message, Signal):
                    self._killed_by = message.number
            elif isinstance(message, Signal):
                with suppress(ValueError, OSError):
                    worker.signal(signal.Signals(message.number))
            elif isinstance(message, Stacks):
                worker.dump_stacks()
            else:
                assert isinstance(message, Heard | Leave)

    def _report_end(self, code: int) -> int:
        """Report an end, until the supervisor knows it or the lease is over."""
        until = time.monotonic() + self._order.lease_s
        while self._send_log():
            if not self._wait(until):
                return EXIT_LOST
        while not self._send(Ended(code)):
            if not self._wait(until):
                return EXIT_LOST
        while (left := until - time.monotonic()) > 0:
            if self._link.poll(round(1000 * left)):
                with suppress(FrameError):
                    if isinstance(TO_AGENT.read(self._link.recv(zmq.NOBLOCK)), Leave):
                        return EXIT_KNOWN
        return EXIT_LOST

    def _wait(self, until: float) -> bool:
        """Wait a moment for room in the socket. Return False if it is too late."""
        self._link.poll(50, zmq.POLLOUT)
        return time.monotonic() < until

    def _give_up(self, worker: Launched) -> None:
        """End the worker, because nothing was heard of the supervisor: it may be gone, or may have given this worker
        up and started another one."""
        worker.signal(signal.SIGKILL)
        while not (ended := self._launcher.ended()):
            self._poller.poll(100)
        self._launcher.reap(ended[0])

    def _refuse(self, refused: Refused) -> NoReturn:
        self._send(refused)
        if refused.elsewhere:
            time.sleep(HOLD_S)  # usually the end of this process: the supervisor ends it
        self._link.close(linger=1000)
        raise _LeaveError(EXIT_REFUSED)

    def _send_log(self) -> bool:
        """Send the next bytes of the worker's log. Return whether there may be more."""
        try:
            self._log_sent = keep_small(self._log_file, self._log_sent)
            with open(self._log_file, "rb") as log:
                log.seek(self._log_sent)
                text = log.read(MAX_LOG // 2)
        except OSError:
            return False
        if text and self._send(Log(text)):
            self._log_sent += len(text)
        return bool(text)

    def _send(self, message: FromAgent) -> bool:
        """Send a message, and return whether the socket has taken it."""
        try:
            self._link.send(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Free what is left. The worker has ended."""
        if self._gpus is not None:
            self._gpus.close()
        if self._fetching is not None:
            self._fetching.stop()
            self._fetching.join()
        self._link.close(linger=0)


def keep_small(log: Path, sent: int) -> int:
    """Keep the log of a running worker small. Return the position up to which it was sent.

    The log is emptied when all of a large one was sent. If it grows faster than it can be sent, only its end is kept.
    The file itself must stay, see ``files.cut``. Raises OSError.
    """
    size = log.stat().st_size
    unsent = size - sent
    if unsent <= 2 * MOST_LOGGED and (unsent or size <= MOST_LOGGED):
        return sent
    with open(log, "a+b") as file:
        file.seek(max(sent, size - LAST_WORDS))
        end = file.read(LAST_WORDS)
        file.truncate(0)
        if end:
            left_out = unsent - len(end)
            file.write(f"{left_out} bytes are left out here: the log grew too fast\n".encode() + end)
    return 0


def clear_directories() -> None:
    """Remove what agents that were killed have left."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = directory.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)  # another user's stays


def main() -> int:
    """Run the agent of the order in standard input."""
    parent = os.getppid()
    if not die_with(parent):
        return EXIT_LOST
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    clear_directories()
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        starter = ProcessStarter(directory)
        try:
            return _work(starter, directory, *sys.argv[1:2])
        finally:
            starter.launcher.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _work(starter: ProcessStarter, directory: Path, engine: str = "") -> int:
    """Get an order, as a spare agent if an engine is given, and run its agent."""
    if engine:
        set_title(f"spare agent ({engine})")
    given = starter.wait_for_order(engine) if engine else sys.stdin.buffer.read()
    devices, _, packed = given.partition(b"\n")
    if not packed:
        return EXIT_LOST
    order = Order.unpack(packed)
    set_title(f"agent of worker {order.spec.name or order.spec.engine.model}")
    agent = Agent(order, devices.decode(), directory, starter)
    try:
        return agent.run()
    finally:
        agent.close()
