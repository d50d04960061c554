"""A client with thousands of streams on a few connections that counts tokens and reads the time of some of them.

``benchmarks.many_streams`` decodes every event. That would take more processor time than the supervisor takes.
"""

import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgpack
import zmq

from protocol import limits
from protocol.codec import encode, pack_body
from protocol.messages import Credit, Generate, Hello, Kind, Pong
from protocol.process.paths import front_endpoint

GRANT = limits.STREAM_WINDOW // 2
"""Events of a stream after which the client grants as many more."""
SAMPLE = 16
"""Frames for each one whose age is noted."""
ENDLESS = 1_000_000
WITHIN_S = 120.0
_EVENTS, _PING, _ERROR = int(Kind.EVENTS), int(Kind.PING), int(Kind.ERROR)


class SampledStreams:
    """Connections to one supervisor. A context manager.

    tokens    that came since ``forget``
    ages      seconds from the making of a token to its receipt, of one frame of SAMPLE
    failures  the frames that told of a request's end or refusal
    """

    def __init__(self, runtime_dir: Path, connections: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, int] = {}
        self._sockets: list[zmq.Socket[bytes]] = []
        self._unpaid: list[list[int]] = []
        self.tokens = self.frames = self.begun = 0
        self.ages: list[float] = []
        self.failures: list[bytes] = []
        for number in range(connections):
            socket = self._context.socket(zmq.DEALER)
            for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):
                socket.setsockopt(option, 0)
            socket.connect(front_endpoint(runtime_dir))
            descriptor = int(socket.get(zmq.FD))
            self._by_descriptor[descriptor] = number
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
            self._sockets.append(socket)
            self._unpaid.append([0])  # requests are numbered from 1
            self._send(number, encode(Hello(pack_body({"library": "benchmark"}))))

    def begin(self, models: Sequence[str]) -> None:
        """Begin a stream of each of these models. All streams of a model have one connection. Return when each stream
        has its first token."""
        numbers = {model: at % len(self._sockets) for at, model in enumerate(dict.fromkeys(models))}
        for at, model in enumerate(models):
            unpaid = self._unpaid[numbers[model]]
            unpaid.append(0)
            body = pack_body({"prompt": f"stream {at}", "max_tokens": ENDLESS})
            self._send(numbers[model], encode(Generate(len(unpaid) - 1, model, {}, body)))
        self.read_until(lambda: self.begun >= len(models) or bool(self.failures), "a first token of every stream")

    def forget(self) -> None:
        self.tokens = 0
        self.ages = []

    def read(self, seconds: float) -> None:
        """Read what comes, for ``seconds`` seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)

    def read_until(self, done: Callable[[], bool], what: str) -> None:
        """Read until a condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + WITHIN_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {WITHIN_S} s: {what}; failures: {self.failures[:3]}")
            self._wait(0.1)

    def _wait(self, seconds: float) -> None:
        for descriptor, _ in self._epoll.poll(seconds):
            self._drain(self._by_descriptor[descriptor])

    def _drain(self, number: int) -> None:
        receive = self._sockets[number].recv
        while True:
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(number, frame)

    def _send(self, number: int, frame: bytes) -> None:
        socket = self._sockets[number]
        socket.send(frame, zmq.NOBLOCK)
        # Sending can consume the descriptor's edge. Then messages that came meanwhile would wait for the next one.
        if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain(number)

    def _take(self, number: int, frame: bytes) -> None:
        message = msgpack.unpackb(frame)
        if message[1] != _EVENTS:
            if message[1] == _PING:
                self._send(number, encode(Pong(message[2])))
            elif message[1] == _ERROR:
                self.failures.append(frame)
            return
        index, unpaid = message[4], self._unpaid[number]
        self.tokens += len(index)
        self.frames += 1
        if self.frames % SAMPLE == 0:
            text = msgpack.unpackb(message[5][4 : index[0][4]])["text"]
            self.ages.append((time.monotonic_ns() - int(text)) / 1e9)
        for request, seq, flags, _, _ in index:
            if flags:
                self.failures.append(frame)
            self.begun += not seq
            unpaid[request] += 1
            if unpaid[request] == GRANT:
                unpaid[request] = 0
                self._send(number, encode(Credit(request, GRANT)))

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._epoll.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
