"""Simulated workers and their agents on other machines: real connections, and no engine. Also the driver that takes the
place of the one for Ray.

    python -m benchmarks.link_peers DIRECTORY     (the driver; the supervisor's connection is its standard input)

Each simulated worker has the two connections over TCP with CURVE that a real one has, its own and its agent's, and says
what a real one says: HELLO, READY, STATS every second, a beat every BEAT_S, and one EVENTS frame for each step and
client. A step gives each job one token. A token's text is the time when it was made, in nanoseconds of CLOCK_MONOTONIC.
A few processes hold all workers.
"""

import heapq
import json
import os
import sys
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from protocol import __version__, limits
from protocol.codec import EventWriter, decode, encode, pack_body
from protocol.messages import SUPERVISOR_TO_WORKER, Cancel, EventEntry, Hello, JobMessage, Ready, Shutdown, Stats
from protocol.process.helper_link import HelperLink, become_helper
from protocol.process.helper_process import HelperProcess
from protocol.process.sockets import has_input
from protocol.process.worker_spec import LinkKeys
from protocol.values import pack
from supervisor.cluster.messages import (
    BEAT_S,
    TO_AGENT,
    TO_DRIVER,
    AgentLeft,
    Beat,
    EndAgent,
    Ended,
    Node,
    Nodes,
    Order,
    Signal,
    StartAgent,
    Up,
)

PLAN = "plan.json"
"""The file in the driver's directory: peers (number of processes), nodes (number of machines), rate (steps per second
of a worker) and batch (jobs of a worker at once)."""
STATS_S = 1.0
START_S = 0.01
"""Seconds between the starts of two simulated workers. Real agents and workers take longer to come up."""
MARK = 10_000
_IDLE_WORD, _LEASE_MS = 2 << 28, 60_000


@dataclass(slots=True)
class Peer:
    """One simulated worker. ``jobs``: the next sequence number of each job, by channel and request."""

    number: int
    order: Order
    link: zmq.Socket[bytes]
    agent: zmq.Socket[bytes]
    jobs: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    steps: int = 0
    beat_at: float = 0.0
    stats_at: float = 0.0
    over: bool = False


class Peers:
    """The workers of one process, and their clock."""

    def __init__(self, driver: HelperLink, rate: float, batch: int) -> None:
        self._driver, self._period, self._batch = driver, 1 / rate, batch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16_000)
        self._due: list[tuple[float, int]] = []
        self._peers: dict[int, Peer] = {}
        self._writer = EventWriter()
        self._started = 0
        self._orders: deque[StartAgent] = deque()
        self._start_at = 0.0

    def run(self) -> None:
        while True:
            self._hear()
            now = time.monotonic()
            if self._orders and now >= self._start_at:
                self._start_at = now + START_S
                self._start(self._orders.popleft())
            while self._due and self._due[0][0] <= now:
                at, number = heapq.heappop(self._due)
                if (peer := self._peers.get(number)) is None:
                    continue
                try:
                    self._turn(peer, now)
                except zmq.Again:  # no connection: it was refused, or its handshake took too long
                    peer.over = True
                if peer.over:
                    self._end(peer)
                else:
                    # a process that is late skips steps, as an engine does that is slower than it should be
                    heapq.heappush(self._due, (max(at + self._period, now - self._period), number))
                now = time.monotonic()
            wait = self._due[0][0] - now if self._due else 0.05
            time.sleep(max(0.0, min(wait, START_S if self._orders else 0.05)))

    def _hear(self) -> None:
        while True:
            try:
                record = self._driver.receive()
            except EOFError:
                os._exit(0)
            if record is None:
                return
            message = TO_DRIVER.read(record)
            if isinstance(message, StartAgent):
                self._orders.append(message)
            elif isinstance(message, EndAgent) and message.number in self._peers:
                self._end(self._peers[message.number])

    def _socket(self, routing_id: bytes, endpoint: str, keys: LinkKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, MARK)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.SOCKET_MAX_FRAME)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.curve_serverkey = keys.server.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.connect(endpoint)
        return socket

    def _start(self, message: StartAgent) -> None:
        order = Order.unpack(message.order)
        spec = order.spec
        assert spec.keys is not None
        agent = self._socket(order.agent_id, spec.endpoint, spec.keys)
        link = self._socket(spec.routing_id, spec.endpoint, spec.keys)
        self._started += 1
        agent.send(pack(Up(os.getpid(), "simulated")))
        link.send(encode(Hello(pack_body({"pid": os.getpid(), "build": __version__}))))
        body = {
            "context": 1 << 24, "max_batch_size": self._batch, "max_jobs": self._batch, "chat": False, "device": "none",
            "template": "", "parallel_tool_calls": True, "tools_tried": False,
            "attention": "none", "decoding": "", "tool_format": None, "reasoning_start": None, "reasoning_end": None,
            "sleep_bytes": None, "no_sleep": "", "load_seconds": 0.0,
        }  # fmt: skip
        link.send(encode(Ready(pack_body(body))))
        self._peers[message.number] = Peer(message.number, order, link, agent)
        phase = (self._started * 0.618034) % 1 * self._period  # workers do not step together
        heapq.heappush(self._due, (time.monotonic() + phase, message.number))

    def _turn(self, peer: Peer, now: float) -> None:
        """Do what a worker and its agent do in the time of one step."""
        while has_input(peer.link):
            message = decode(peer.link.recv(), SUPERVISOR_TO_WORKER)
            if isinstance(message, JobMessage):
                peer.jobs[message.channel][message.request] = message.carry.get("seq", 0)
            elif isinstance(message, Cancel):
                for jobs in peer.jobs.values():
                    jobs.pop(message.request, None)
            elif isinstance(message, Shutdown):
                peer.over = True
                return
        if now >= peer.beat_at:
            peer.beat_at = now + BEAT_S
            while has_input(peer.agent):
                peer.over |= isinstance(TO_AGENT.read(peer.agent.recv()), Signal)
            word = peer.steps << 32 | _IDLE_WORD | _LEASE_MS
            peer.agent.send(pack(Beat(word, 1 << 30, "it sleeps")), zmq.NOBLOCK)
        if now >= peer.stats_at:
            peer.stats_at = now + STATS_S
            active = sum(map(len, peer.jobs.values()))
            figures = {"pending": 0, "active": active, "steps": peer.steps, "prompt_tokens": 0, "cached_tokens": 0}
            peer.link.send(encode(Stats(pack_body(figures))), zmq.NOBLOCK)
        self._step(peer)

    def _step(self, peer: Peer) -> None:
        peer.steps += 1
        event = self._writer.event((0,), {"text": str(time.monotonic_ns())})
        generation, length = peer.order.spec.generation, len(event)
        for channel, jobs in peer.jobs.items():
            if jobs:
                index = [EventEntry(request, seq, 0, 1, length) for request, seq in jobs.items()]
                if not peer.link.poll(0, zmq.POLLOUT):
                    return  # the supervisor is MARK frames behind: the worker waits for it, as a real one does
                peer.link.send(self._writer.frame(channel, generation, index, event * len(index)), zmq.NOBLOCK)
                for request in jobs:
                    jobs[request] += 1

    def _end(self, peer: Peer) -> None:
        with suppress(zmq.Again):
            peer.agent.send(pack(Ended(0)), zmq.NOBLOCK)
        peer.agent.close(linger=500)
        peer.link.close(linger=0)
        del self._peers[peer.number]
        self._driver.send(pack(AgentLeft(peer.number, "")))


def drive(directory: Path, supervisor: HelperLink) -> None:
    """Hand the starts to the processes of peers in turn, and the ends to the supervisor."""
    plan = json.loads((directory / PLAN).read_text())
    links = []
    for _ in range(plan["peers"]):
        command = [sys.executable, "-m", "benchmarks.link_peers", str(directory), "peers"]
        links.append(HelperProcess(command, os.environ, apart=False, errors=None))
    nodes = [Node("head", "head", "127.0.0.1", 0.0, 0.0, 0.0, True)]
    nodes += [Node(f"id-{n}", f"machine-{n:03}", "127.0.0.1", 8.0, 8.0, 0.0, False) for n in range(plan["nodes"])]
    supervisor.send(pack(Nodes(nodes)))
    poller = zmq.Poller()
    for each in (supervisor, *links):
        poller.register(each.descriptor, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if supervisor.descriptor in ready and (record := supervisor.receive()) is not None:
            message = TO_DRIVER.read(record)
            assert isinstance(message, StartAgent | EndAgent)
            links[message.number % len(links)].send(record)
        for link in links:
            link.flush()
            if link.descriptor in ready and (record := link.receive()) is not None:
                supervisor.send(record)


def main() -> None:
    directory, link = Path(sys.argv[1]), become_helper("peers", ignored=())
    if sys.argv[2:] == ["peers"]:
        plan = json.loads((directory / PLAN).read_text())
        Peers(link, plan["rate"], plan["batch"]).run()
    else:
        with suppress(EOFError):
            drive(directory, link)


if __name__ == "__main__":
    main()
