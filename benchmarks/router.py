"""Measure the supervisor's throughput and latency per event, against libzmq's own proxy and against no router at all.

    python -m benchmarks.router [--quick] [--out DIR]

One side is a supervisor and a worker with its own loop and an engine that computes nothing. The other sides are:

* raw DEALER to DEALER, without a router,
* ``zmq.proxy``: ROUTER and DEALER, in C, in a process of its own,
* a loop in Python that passes messages on without a look at them. No router in Python can be faster.

This process reads from all of them in the same plain way, over ipc, with messages as long as an EVENTS frame of one
token. The sides take turns, for several rounds after each of several starts. Figures are medians of all rounds. Ratios
are of one round. Nothing is bound to a CPU. With the supervisor three processes are busy (worker, supervisor, reader).
With the proxy there are three, too (sender, proxy, reader). Without a router there are two. On two cores the worker's
loop and its encoding compete with the supervisor. They are part of the supervisor's figures only.

A frame holds one event (64 streams of one connection, whose tokens come one by one; also 16 connections, without a
target) or 16 events (16 streams of one connection). The reader grants credit as clients do. The supervisor keeps its
record for resuming. A flood stays at most 80 tokens per stream ahead of the reader, since the sockets of the other
sides hold their sender back, too. Streams with a slow client are another measurement. Latency is the time from the
making of a token, which the engine or the sender writes into it, to its receipt. There the events come at random times,
2,000 per second.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil
import zmq

from benchmarks.flood_engine import Taken
from benchmarks.harness import Server, arguments_for, quiet_heap
from benchmarks.report import Result, write
from benchmarks.unrouted import Without, age, forward, proxy
from protocol import limits
from protocol.codec import encode, pack_body
from protocol.messages import Credit, Generate, Hello, Kind
from protocol.process.paths import front_endpoint
from protocol.process.sockets import DONT_WAIT, receive_now

STREAMS, SINGLE = 16, 64
"""Streams of one connection: if their tokens come together, and if they come one by one."""
RATE, PACED = 2000, 4000
MESSAGES, EVENTS = 400_000, 160_000
"""Number of messages of a flood without the supervisor, and of events of a flood through it."""
STARTS, ROUNDS = 7, 3
"""Starts of all processes, and rounds after each start. Several starts are needed because the result depends on which
processes share a core, which is decided at the start. On two cores that makes a factor of two."""
WINDOW = 80
"""Tokens that a stream may be ahead of the reader. The number is less than the credit, so that no events are held."""
GRANT = limits.STREAM_WINDOW // 2
"""Events after which a client grants as many more."""
TELL = 16
"""Events after which the reader tells the engine how many it has read."""
PATIENCE_MS = 60_000


@dataclass(slots=True)
class State:
    """The state of a connection that is read: the CREDIT frames of its streams, the number of events since these were
    last sent, and the offset of the index in its frames (0: no frame has come yet)."""

    socket: zmq.Socket[bytes]
    grants: list[bytes]
    owed: int = 0
    index_at: int = 0


class Through:
    """Connections to a supervisor. This process reads them in the plainest way that still grants credit."""

    def __init__(self, server: Server, taken: Taken, connections: int) -> None:
        self._taken = taken
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = []
        for _ in range(connections):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
            socket.connect(front_endpoint(server.runtime_dir))
            socket.send(encode(Hello(pack_body({"library": "benchmark"}))))
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        self._number = 0

    def flood(self, prompt: str, events: int, streams: int, found: list[float] | None = None) -> tuple[float, int]:
        """Return (events per second, number of frames) of a flood of ``events`` events.

        streams  streams on each connection
        found    takes the latency of each frame, in seconds
        """
        each = events // (streams * len(self._sockets))
        all_streams = streams * len(self._sockets)
        self._taken.steps = 0
        body = pack_body({"prompt": prompt, "max_tokens": each})
        states = []
        for socket in self._sockets:
            numbers = range(self._number + 1, self._number + 1 + streams)
            for number in numbers:
                socket.send(encode(Generate(number, "m", {}, body)))
            states.append(State(socket, [encode(Credit(number, GRANT)) for number in numbers]))
        self._number += streams
        # All streams of one connection get their events together. So the count of one stream is that of all.
        begun, frames, got, last_reported, total = 0.0, 0, 0, 0, each * all_streams
        granted, taken, events_kind = GRANT * streams, self._taken, int(Kind.EVENTS)
        for state, frame in self._frames(states):
            if frame[2] != events_kind:
                continue
            if found is not None and got < total - 1:  # the last frame does not end with a time
                found.append(age(frame))
            if not state.index_at:
                begun, state.index_at = begun or time.perf_counter(), index_at(frame)
            frames += 1
            count = frame[state.index_at]
            count = count & 0x0F if count != 0xDC else frame[state.index_at + 1] << 8 | frame[state.index_at + 2]
            got += count
            state.owed += count
            if state.owed >= granted:
                state.owed -= granted
                for grant in state.grants:
                    state.socket.send(grant)
            if got - last_reported >= TELL or got >= total:
                taken.steps, last_reported = got // all_streams, got
                if got >= total:
                    break
        return (got - 1) / (time.perf_counter() - begun), frames

    def _frames(self, states: list[State]) -> Iterator[tuple[State, bytes]]:
        """Yield each frame that comes, with the state of its connection.

        Raises zmq.Again if nothing comes for long, because a stream has ended too early.
        """
        if len(states) == 1:
            state = states[0]
            receive = state.socket.recv
            while True:
                yield state, receive()
        by_socket = {state.socket: state for state in states}
        while ready := self._poller.poll(PATIENCE_MS):
            for socket, _ in ready:
                state = by_socket[socket]
                with suppress(zmq.Again):
                    while True:
                        yield state, receive_now(socket, DONT_WAIT)
        raise zmq.Again

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def index_at(frame: bytes) -> int:
    """Return the offset of the index in an EVENTS frame. All frames of a connection and a worker have the same one."""
    at = 3
    for _ in range(2):  # channel and generation
        first = frame[at]
        at += 1 if first < 0x80 else {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}[first]
    return at


def spent(process: psutil.Process) -> float:
    """Return the seconds of processor time so far, including libzmq's thread."""
    times = process.cpu_times()
    return times.user + times.system


@dataclass
class Round:
    """Events per second, seconds of processor time for each event, and the median latency of an event in seconds."""

    raw: float
    proxy: float
    python: float
    single: float
    batched: float
    many: float
    cpu: float
    cpu_batched: float
    cpu_worker: float
    single_frames: float
    latency: float
    latency_proxy: float


def one_round(
    server: Server, taken: Taken, raw: Without, proxied: Without, forwarded: Without, scale: float, seed: int
) -> Round:
    supervisor = psutil.Process(server.overview()["supervisor"]["pid"])
    worker = psutil.Process(server.status("m")["pid"])

    def through(prompt: str, events: int, connections: int = 1, streams: int = STREAMS) -> tuple[float, ...]:
        reader = Through(server, taken, connections)
        before = spent(supervisor), spent(worker)
        rate, frames = reader.flood(prompt, int(events * scale), streams)
        after = spent(supervisor), spent(worker)
        reader.close()
        server.wait_idle("m")
        each = [(b - a) / (events * scale) for a, b in zip(before, after, strict=True)]
        return rate, *each, frames / (events * scale)

    single, cpu, cpu_worker, single_frames = through("one", EVENTS, 1, SINGLE)
    raw_rate, proxy_rate, python_rate = (each.flood(int(MESSAGES * scale)) for each in (raw, proxied, forwarded))
    batched, cpu_batched, _, _ = through("all", 2 * EVENTS)
    many, _, _, _ = through("all", EVENTS, STREAMS, 1)
    latencies: list[float] = []
    reader = Through(server, taken, 1)
    reader.flood(f"paced {RATE} {seed}", int(PACED * scale), 1, latencies)
    reader.close()
    server.wait_idle("m")
    return Round(
        raw_rate, proxy_rate, python_rate, single, batched, many, cpu, cpu_batched, cpu_worker, single_frames,
        statistics.median(latencies),
        statistics.median(proxied.latencies(int(PACED * scale), RATE, seed)),
    )  # fmt: skip


def rounds_of_a_start(seeds: Iterable[int], scale: float) -> list[Round]:
    with tempfile.NamedTemporaryFile(prefix="modelctl-bench-") as file:
        options = {"taken": file.name, "window": WINDOW}
        entry = {"model_dir": ".", "engine": "benchmarks.flood_engine:FloodEngine", "options": options}
        with (
            Server({"m": {**entry, "max_batch_size": SINGLE}}) as server,
            Without() as raw,
            Without(proxy) as proxied,
            Without(forward) as forwarded,
        ):
            taken = Taken(file.name)
            one_round(server, taken, raw, proxied, forwarded, 0.05, 0)
            return [one_round(server, taken, raw, proxied, forwarded, scale, seed) for seed in seeds]


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    starts, rounds, scale = (1, 1, 0.05) if arguments.quick else (STARTS, ROUNDS, 1.0)
    quiet_heap()
    found: list[Round] = []
    for start in range(starts):
        found += rounds_of_a_start(range(start * rounds, (start + 1) * rounds), scale)

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, found))

    write(
        "router",
        [
            Result("raw DEALER to DEALER", median(lambda r: r.raw), "/s"),
            Result("zmq.proxy", median(lambda r: r.proxy), "/s"),
            Result("a loop in Python that only forwards", median(lambda r: r.python), "/s"),
            Result("the same, over zmq.proxy", median(lambda r: r.python / r.proxy), "ratio"),
            Result("one event a frame", median(lambda r: r.single), "/s"),
            Result("one event a frame: frames for each event", median(lambda r: r.single_frames), "ratio"),
            Result("one event a frame, over zmq.proxy", median(lambda r: r.single / r.proxy), "ratio", ">= 0.55"),
            Result("one event a frame, 16 connections", median(lambda r: r.many), "/s"),
            Result("one client of 16 streams", median(lambda r: r.batched), "/s"),
            Result("one client of 16 streams, over raw messages", median(lambda r: r.batched / r.raw), "ratio", ">= 1"),
            Result("supervisor's processor time of an event, one a frame", 1e6 * median(lambda r: r.cpu), "µs", "<= 8"),
            Result("the same, 16 streams of one client", 1e6 * median(lambda r: r.cpu_batched), "µs", "<= 8"),
            Result("worker's processor time of an event, one a frame", 1e6 * median(lambda r: r.cpu_worker), "µs"),
            Result("one way at 2,000 events a second", 1e6 * median(lambda r: r.latency), "µs"),
            Result("the same through zmq.proxy", 1e6 * median(lambda r: r.latency_proxy), "µs"),
            Result("one way, over zmq.proxy", median(lambda r: r.latency / r.latency_proxy), "ratio", "<= 1.3"),
        ],
        arguments.out,
    )


if __name__ == "__main__":
    main()
