"""Senders and a reader without a supervisor between them, for ``benchmarks.router`` to compare with."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Event

import zmq

from benchmarks.flood_engine import TEXT, Pace, stamp
from model_worker.link import SOCKET_MARK
from protocol.codec import EventWriter
from protocol.messages import EventEntry
from protocol.process.sockets import DONT_WAIT, receive_now, send_to

Sent = tuple[int, float | None, int]
"""(messages, their rate or None, seed) of one run without the supervisor."""


def event_frame(text: str = TEXT) -> bytes:
    """Return an EVENTS frame with one token, as a worker sends it."""
    writer = EventWriter()
    event = writer.event((1000,), {"text": text})
    return writer.frame(1, 1, [EventEntry(1, 10_000, 0, 1, len(event))], event)


def send(endpoint: str, wanted: "multiprocessing.Queue[Sent | None]") -> None:
    """Send as many messages as each order in ``wanted`` says, until an order is None. Runs in a process of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDHWM, SOCKET_MARK)
        socket.connect(endpoint)
        frame = event_frame()
        head = frame[: -len(TEXT)]
        while (order := wanted.get()) is not None:
            messages, rate, seed = order
            if rate is None:
                for _ in range(messages):
                    socket.send(frame)
            else:
                pace = Pace(rate, seed)
                for _ in range(messages):
                    pace.wait()
                    socket.send(head + stamp().encode())


def between(front: str, back: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return the two sockets of a process between sender and reader: the one that the sender uses, and the reader's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    inner, outer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, endpoint in ((inner, back), (outer, front)):
        socket.setsockopt(zmq.SNDHWM, SOCKET_MARK)
        socket.setsockopt(zmq.RCVHWM, SOCKET_MARK)
        socket.bind(endpoint)
    return inner, outer


def proxy(front: str, back: str, ready: Event) -> None:
    """Run libzmq's proxy in a process of its own, until the process is terminated."""
    inner, outer = between(front, back)
    ready.set()
    zmq.proxy(inner, outer)


def forward(front: str, back: str, ready: Event) -> None:
    """Do the work of ``proxy`` in Python, in one direction: receive everything that is there, and send it on."""
    inner, outer = between(front, back)
    ready.set()
    while True:
        inner.poll()
        with suppress(zmq.Again):
            while True:
                sender, frame = receive_now(inner, DONT_WAIT), receive_now(inner, DONT_WAIT)
                try:
                    send_to(outer, sender, frame)
                except zmq.Again:  # the queue to the reader is full
                    outer.poll(flags=zmq.POLLOUT)
                    send_to(outer, sender, frame)


class Without:
    """A sender in a process of its own, and this process as the reader. A context manager.

    Between them is nothing, or a process that runs ``middle`` (``proxy`` or ``forward``).
    """

    def __init__(self, middle: Callable[[str, str, Event], None] | None = None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._scratch = tempfile.TemporaryDirectory(prefix="modelctl-bench-")
        front, back = (f"ipc://{self._scratch.name}/{name}" for name in ("front", "back"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, SOCKET_MARK)
        self._wanted: multiprocessing.Queue[Sent | None] = spawn.Queue()
        self._sender = spawn.Process(target=send, args=(front if middle is None else back, self._wanted))
        self._middle = None
        if middle is not None:
            ready = spawn.Event()
            self._middle = spawn.Process(target=middle, args=(front, back, ready))
            self._middle.start()
            ready.wait()
            self._socket.connect(front)
            # The DEALER passes on what the ROUTER has received: the sender's identity as a part, then the message.
        else:
            self._socket.bind(front)
        self._sender.start()
        self._parts = 1 if middle is None else 2

    def __enter__(self) -> "Without":
        self.flood(1000)
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted.put(None)
        self._sender.join()
        if self._middle is not None:
            self._middle.terminate()
            self._middle.join()
        self._socket.close(linger=0)
        self._context.term()
        self._scratch.cleanup()

    def flood(self, messages: int) -> float:
        """Return the messages per second that the reader receives."""
        self._wanted.put((messages, None, 0))
        receive, second = self._socket.recv, self._parts == 2
        begun = self._first()
        for _ in range(messages - 1):
            receive()
            if second:
                receive()
        return (messages - 1) / (time.perf_counter() - begun)

    def latencies(self, messages: int, rate: float, seed: int) -> list[float]:
        """Return the latency of each message in seconds."""
        self._wanted.put((messages, rate, seed))
        found = []
        for _ in range(messages):
            if self._parts == 2:
                self._socket.recv()
            found.append(age(self._socket.recv()))
        return found

    def _first(self) -> float:
        for _ in range(self._parts):
            self._socket.recv()
        return time.perf_counter()


def age(frame: bytes) -> float:
    """Return the seconds since the time with which the frame ends."""
    return (time.monotonic_ns() - int(frame[-len(TEXT) :], 16)) / 1e9
