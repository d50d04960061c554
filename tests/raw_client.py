"""A client without the client library, for tests that send arbitrary bytes and look at every frame."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from protocol.client.transport import ClientKey
from protocol.codec import decode, encode, pack_body, split_events, unpack_body, unpack_event
from protocol.errors import WireError
from protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    TERMINAL,
    Error,
    EventFlag,
    Events,
    Generate,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    Report,
)
from tests.serving import WITHIN


@dataclass
class Heard:
    """All events of one request so far. ``ends``: the finish reason or error name of each terminal event."""

    seqs: list[int] = field(default_factory=list)
    generations: set[int] = field(default_factory=set)
    text: str = ""
    tokens: int = 0
    ends: list[str] = field(default_factory=list)
    error: dict[str, object] = field(default_factory=dict)
    delivered: int | None = None
    usage: dict[str, int] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    after_end: int = 0


class RawClient:
    """A client with one DEALER socket. Every method that receives also fills ``heard``.

    where  the runtime directory, or an endpoint over TCP
    key    the client's key, for TCP
    """

    def __init__(
        self, where: Path | str, *, hello: bool = True, admin: bool = False, key: ClientKey | None = None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Not -1: then libzmq drops frames that have arrived but are not read yet when the connection ends.
        self.socket.setsockopt(zmq.RECONNECT_IVL, 1_000_000_000)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        if key is not None:
            self.socket.curve_serverkey = key.server_key.encode()
            self.socket.curve_publickey = key.public_key.encode()
            self.socket.curve_secretkey = key.secret_key.encode()
        self.socket.connect(where if isinstance(where, str) else f"ipc://{where}/{'admin' if admin else 'front'}")
        self.heard: dict[int, Heard] = {}
        self.errors: list[tuple[int, dict[str, object]]] = []
        self.replies: list[dict[str, object]] = []
        self.reports: dict[int, list[dict[str, object]]] = {}
        if hello:
            try:
                self.socket.send(encode(Hello(pack_body({"library": "raw"}))), zmq.NOBLOCK)
            except zmq.Again:
                pass  # the key was refused already, and libzmq accepts no message for a connection that it has given up

    def send(self, message: Message | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def generate(self, request: int, model: str, prompt: str, **fields: object) -> None:
        route = fields.pop("route", {})
        assert isinstance(route, dict)
        self.send(Generate(request, model, route, pack_body({"prompt": prompt, **fields})))

    def receive(self, within: float = WITHIN) -> Message:
        """Return the next message that is no PING. Answer PINGs."""
        deadline = time.monotonic() + within
        while True:
            if not self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise AssertionError(f"no message within {within} s")
            message = decode(self.socket.recv(), SUPERVISOR_TO_CLIENT)
            if isinstance(message, Ping):
                self.send(Pong(message.nonce))
                continue
            self._note(message)
            return message

    def barrier(self, within: float = WITHIN) -> None:
        """Send a PING, and receive everything that the supervisor sends before the PONG."""
        nonce = int.from_bytes(os.urandom(4), "big")
        self.send(Ping(nonce))
        while self.receive(within) != Pong(nonce):
            pass

    def read_until_ended(self, *requests: int, within: float = WITHIN) -> None:
        """Read until each of these requests has ended, and then read everything that follows.

        Fails at once if a request is refused. The message of a timeout shows the last errors from the supervisor.
        """
        deadline = time.monotonic() + within
        waiting = {request for request in requests if not self.heard.get(request, Heard()).ends}
        while waiting:
            try:
                message = self.receive(deadline - time.monotonic())
            except AssertionError as e:
                text = f"{e}; {len(waiting)} of {len(requests)} requests have not ended, the first is {min(waiting)}"
                text += f"; errors: {self.errors[-3:]}"
                raise AssertionError(text) from None
            if isinstance(message, Events):
                waiting -= {entry.request for entry in message.index if self.heard[entry.request].ends}
            elif isinstance(message, Error) and message.request in waiting:
                raise AssertionError(f"request {message.request}: {self.errors[-1][1]} ({len(waiting)} have not ended)")
        self.barrier()

    def _note(self, message: Message) -> None:
        if isinstance(message, Report):
            self.reports.setdefault(message.request, []).append(unpack_body(message.body))
        elif isinstance(message, Error):
            self.errors.append((message.request, unpack_body(message.body)))
        elif isinstance(message, Reply):
            self.replies.append(unpack_body(message.body))
        if not isinstance(message, Events):
            return
        for entry, event in split_events(message):
            ids, fields = unpack_event(entry, event)
            heard = self.heard.setdefault(entry.request, Heard())
            heard.after_end += bool(heard.ends)
            heard.seqs.append(entry.seq)
            heard.generations.add(message.generation)
            heard.text += fields.get("text", "")
            heard.tokens += len(ids)
            if entry.flags & TERMINAL:
                if entry.flags & EventFlag.ERROR:
                    heard.error = fields["error"]
                    heard.delivered = fields["delivered_tokens"]
                    heard.ends.append(WireError.from_wire(fields["error"]).code.wire_name)
                else:
                    heard.ends.append(fields["finish_reason"])
                    heard.usage, heard.timings = fields["usage"], fields["timings"]

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
