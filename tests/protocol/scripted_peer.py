"""A supervisor's front socket that a test scripts: a real ROUTER in a thread of its own.

The peer calls ``script(peer, client, message)`` in its thread for each received message. The script answers with
``peer.send(client, message)``. The peer records all messages, and tests can wait for them.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from modelctl import Client
from protocol.codec import decode, encode, pack_body, pack_event
from protocol.limits import SOCKET_MAX_FRAME
from protocol.messages import (
    CLIENT_TO_SUPERVISOR,
    Accepted,
    Cancel,
    Credit,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    Hello,
    Message,
    Ping,
    Pong,
    Welcome,
)

Script = Callable[["ScriptedPeer", bytes, Message], None]
Event = tuple[int, int, int, tuple[int, ...], dict[str, Any]]
"""(request, seq, flags, token ids, map)"""

DEADLINE_S = 60.0
REPOSITORY = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.002)


def pump_until(client: Client, condition: Callable[[], bool], what: str) -> None:
    """Let the client receive until a condition holds. Each public method of the client receives in the same way."""

    def pumped() -> bool:
        client._connection.pump()
        return condition()

    wait_until(pumped, what)


def until_lost(client: Client) -> None:
    """Wait until the client knows that its peer has ended. Requests that were sent before are lost."""
    pump_until(client, lambda: client._connection.session.broken is not None, "the end of the connection")


def events(*each: Event) -> Events:
    """Return one EVENTS message."""
    index, body = [], b""
    for request, seq, flags, ids, fields in each:
        event = pack_event(ids, fields)
        index.append(EventEntry(request, seq, flags, len(ids), len(event)))
        body += event
    return Events(1, 1, index, body)


def delta(request: int, seq: int, text: str, ids: tuple[int, ...] = ()) -> Event:
    return (request, seq, EventFlag.FIRST if seq == 0 else 0, ids, {"text": text})


def finished(request: int, seq: int, reason: str = "stop", text: str = "", ids: tuple[int, ...] = ()) -> Event:
    fields: dict[str, Any] = {
        "finish_reason": reason,
        "usage": {"prompt_tokens": 3, "completion_tokens": seq},
        "timings": {"prefill_ms": 0.5},
    }
    return (request, seq, EventFlag.FINISHED, ids, fields | ({"text": text} if text else {}))


def failed(request: int, seq: int, error: dict[str, Any]) -> Event:
    return (request, seq, EventFlag.ERROR, (), {"error": error})


def accepted(request: int) -> Accepted:
    return Accepted(request, pack_body({"model": "letters", "queue_position": 0}))


def answers(text: Sequence[str]) -> Script:
    """Return a script that answers every request with these pieces of text, one event each, and finishes it."""

    def script(peer: "ScriptedPeer", client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            peer.send(client, accepted(message.request))
            for seq, piece in enumerate(text):
                peer.send(client, events(delta(message.request, seq, piece, (seq,))))
            peer.send(client, events(finished(message.request, len(text))))

    return script


class ScriptedPeer:
    """A scripted peer. A context manager.

    window   the credit in WELCOME, in events
    welcome  whether the peer answers HELLO
    pong     whether the peer answers PING
    """

    def __init__(
        self, path: Path, script: Script | None = None, *, window: int = 256, welcome: bool = True, pong: bool = True
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.received: list[Message] = []
        self.clients: list[bytes] = []
        self.fault: BaseException | None = None
        self._script, self._window, self._welcome, self._pong = script, window, welcome, pong
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-peer")

    def __enter__(self) -> "ScriptedPeer":
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        """Close the socket and end the thread. To clients this looks like a supervisor that ends."""
        if self._thread.is_alive():
            self._wake.send(b"")
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
        self._wake.close(0)
        self._context.term()

    def send(self, client: bytes, message: Message | bytes) -> None:
        """Send a frame. Only the script may call this."""
        frame = message if isinstance(message, bytes) else encode(message)
        try:
            self._router.send_multipart([client, frame], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise

    def inject(self, client: bytes, message: Message | bytes) -> None:
        """Send a frame from the test's thread."""
        self._wake.send_multipart([client, message if isinstance(message, bytes) else encode(message)])

    def of(self, kind: type[Message]) -> list[Any]:
        """Return the messages of one kind that the peer has received so far."""
        return [m for m in list(self.received) if isinstance(m, kind)]

    def wait_for(self, kind: type[Message], count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.of(kind)) >= count or self.fault is not None, f"{count} {kind.__name__}")
        if self.fault is not None:
            raise self.fault
        return self.of(kind)

    def _run(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        wake = self._context.socket(zmq.PAIR)
        try:
            for option, value in (
                (zmq.ROUTER_MANDATORY, 1), (zmq.LINGER, 200), (zmq.MAXMSGSIZE, SOCKET_MAX_FRAME), (zmq.SNDHWM, 0)
            ):  # fmt: skip
                self._router.setsockopt(option, value)
            self._router.bind(self.endpoint)
            wake.connect("inproc://wake")
            self._started.set()
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if wake in ready:
                    frames = wake.recv_multipart()
                    if len(frames) == 1:
                        return
                    self.send(frames[0], frames[1])
                if self._router in ready:
                    self._on_frame(*self._router.recv_multipart())
        except BaseException as e:
            self.fault = e
        finally:
            wake.close(0)
            self._router.close()

    def _on_frame(self, client: bytes, frame: bytes) -> None:
        message = decode(frame, CLIENT_TO_SUPERVISOR)
        # record the message before anything is sent: a test that has the answer must find the question here
        self.received.append(message)
        if isinstance(message, Hello):
            self.clients.append(client)
            if self._welcome:
                self.send(client, Welcome(pack_body({"server": "scripted", "session": "s", "window": self._window})))
        elif isinstance(message, Ping) and self._pong:
            self.send(client, Pong(message.nonce))
        if self._script is not None:
            self._script(self, client, message)


class HoldingScript:
    """A script that accepts each request, sends ``first`` deltas, and leaves it open until the client cancels it."""

    def __init__(self, first: int = 1) -> None:
        self._first = first

    def __call__(self, peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            peer.send(client, accepted(message.request))
            for seq in range(self._first):
                peer.send(client, events(delta(message.request, seq, f"{seq} ", (seq,))))
        elif isinstance(message, Cancel):
            # an event that was already under way when the CANCEL came
            peer.send(client, events(delta(message.request, self._first, "late ")))
            peer.send(client, events(finished(message.request, self._first + 1, "cancelled")))


class CreditScript:
    """A script that sends ``total`` events for each request as credit allows, and records how many it sent."""

    def __init__(self, total: int, window: int) -> None:
        self._total, self._window = total, window
        self.sent: dict[int, int] = {}
        self.granted: dict[int, int] = {}

    def __call__(self, peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            self.sent[message.request], self.granted[message.request] = 0, self._window
            peer.send(client, accepted(message.request))
        elif isinstance(message, Credit):
            self.granted[message.request] += message.events
        else:
            return
        request = message.request
        while self.sent[request] < min(self._total, self.granted[request]):
            peer.send(client, events(delta(request, self.sent[request], "x", (self.sent[request],))))
            self.sent[request] += 1
            if self.sent[request] == self._total:
                peer.send(client, events(finished(request, self._total, "length")))


def _serve_until_killed(path: str) -> None:
    with ScriptedPeer(Path(path), HoldingScript(first=3)) as peer:
        print("ready", flush=True)
        threading.Event().wait()
        peer.stop()


@contextmanager
def peer_process(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a peer in a process that can be killed. Every request gets three deltas and no end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.protocol.scripted_peer", str(path)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    # at its end, this block closes the pipe and waits for the process
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    _serve_until_killed(sys.argv[1])
