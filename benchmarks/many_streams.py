"""A client with many connections and streams that takes little processor time, also for thousands of streams.

The client library is made for a connection or two. Here one thread waits for hundreds by epoll, reads what has come and
notes the age of each token (see ``benchmarks.paced_engine``).
"""

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from protocol import limits
from protocol.codec import decode, encode, pack_body, split_events, unpack_body, unpack_event
from protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    TERMINAL,
    Credit,
    Error,
    Events,
    Generate,
    Hello,
    Ping,
    Pong,
    Welcome,
)
from protocol.process.paths import front_endpoint

GRANT = limits.STREAM_WINDOW // 2
"""Events of a stream after which the client grants as many more."""
WITHIN = 120.0


@dataclass(slots=True)
class _Line:
    """One connection. ``taken``: events of each stream since the last grant."""

    socket: zmq.Socket[bytes]
    taken: list[int] = field(default_factory=list)


class ManyStreams:
    """Connections to one supervisor. A context manager.

    begun, ended  streams that have had their first event, and streams that have ended
    ages          seconds from the making of a token to its receipt, for tokens that came since ``ages`` was last
                  emptied
    failures      error messages of refused or failed requests
    """

    def __init__(self, runtime_dir: Path, connections: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._epoll = select.epoll()
        self._lines: list[_Line] = []
        self._by_descriptor: dict[int, _Line] = {}
        self.ages: list[float] = []
        self.failures: list[str] = []
        self.welcomed = self.begun = self.ended = self.pongs = 0
        for _ in range(connections):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(front_endpoint(runtime_dir))
            line = _Line(socket)
            self._lines.append(line)
            descriptor = int(socket.get(zmq.FD))
            self._by_descriptor[descriptor] = line
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
            self._send(line, encode(Hello(pack_body({"library": "benchmark"}))))
        self.read_until(lambda: self.welcomed == connections, "a greeting on every connection")

    def exchange(self, messages: int) -> None:
        """Send ``messages`` PINGs on every connection, and read the answers."""
        for number in range(messages):
            for line in self._lines:
                self._send(line, encode(Ping(number)))
        self.read_until(lambda: self.pongs == messages * len(self._lines), "an answer to every PING")

    def begin(self, wanted: Sequence[tuple[int, str, str, int]]) -> None:
        """Begin streams: (number of the connection, model, prompt, most tokens) of each. Return when all have begun."""
        before = self.begun
        for connection, model, prompt, tokens in wanted:
            line = self._lines[connection]
            line.taken.append(0)
            body = pack_body({"prompt": prompt, "max_tokens": tokens})
            self._send(line, encode(Generate(len(line.taken), model, {}, body)))
        self.read_until(
            lambda: self.begun + len(self.failures) == before + len(wanted), "a first token of every stream"
        )

    def read(self, seconds: float) -> None:
        """Read what comes, for ``seconds`` seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)

    def read_until(self, done: Callable[[], bool], what: str) -> None:
        """Read until a condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + WITHIN
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {WITHIN} s: {what}; failures: {self.failures[:3]}")
            self._wait(1.0)

    def close(self) -> None:
        for line in self._lines:
            line.socket.close(linger=0)
        self._epoll.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, seconds: float) -> None:
        for descriptor, _ in self._epoll.poll(seconds):
            self._drain(self._by_descriptor[descriptor])

    def _drain(self, line: _Line) -> None:
        while True:
            try:
                frame = line.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(line, frame)

    def _send(self, line: _Line, frame: bytes) -> None:
        line.socket.send(frame, zmq.NOBLOCK)
        # Sending can consume the descriptor's edge. Then messages that came meanwhile would wait for the next one.
        if int(line.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain(line)

    def _take(self, line: _Line, frame: bytes) -> None:
        message = decode(frame, SUPERVISOR_TO_CLIENT)
        if isinstance(message, Events):
            now = time.monotonic_ns()
            for entry, event in split_events(message):
                if not entry.seq:
                    self.begun += 1
                if entry.flags & TERMINAL:
                    self.ended += 1
                if entry.tokens:
                    _, fields = unpack_event(entry, event)
                    self.ages.append((now - int(fields["text"])) / 1e9)
                elif entry.flags & TERMINAL and "error" in (fields := unpack_event(entry, event)[1]):
                    self.failures.append(fields["error"]["message"])
                line.taken[entry.request - 1] += 1
                if line.taken[entry.request - 1] == GRANT:
                    line.taken[entry.request - 1] = 0
                    self._send(line, encode(Credit(entry.request, GRANT)))
        elif isinstance(message, Ping):
            self._send(line, encode(Pong(message.nonce)))
        elif isinstance(message, Pong):
            self.pongs += 1
        elif isinstance(message, Welcome):
            self.welcomed += 1
        elif isinstance(message, Error):
            self.failures.append(unpack_body(message.body)["message"])
