"""The worker's end of the wire: one DEALER to the supervisor. Never blocks a step: what cannot be sent now waits."""

import os
import time
from collections.abc import Sequence

import zmq

from model_worker.engine import Capabilities
from protocol import __version__, limits
from protocol.codec import decode, encode, pack_body
from protocol.errors import FrameError
from protocol.messages import (
    SUPERVISOR_TO_WORKER,
    EventEntry,
    Events,
    Hello,
    Message,
    Progress,
    Ready,
    Stats,
)
from protocol.worker_spec import WorkerSpec

PROGRESS_INTERVAL_S = 0.05


class SupervisorLink:
    """Messages to and from the supervisor, for one generation of one model."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._generation = spec.generation
        self._supervisor_pid = spec.supervisor_pid
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, spec.routing_id)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.SOCKET_MAX_FRAME)
        # A worker that lost its supervisor is of no use: a new generation is cleaner than a resumed connection.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(spec.endpoint)
        self._socket = socket
        self._unsent: dict[int, tuple[list[EventEntry], list[bytes]]] = {}
        self._last_progress = ("", 0.0)

    def hello(self) -> None:
        self._socket.send(encode(Hello(pack_body({"pid": os.getpid(), "build": __version__}))))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report load progress; called as often as the engine likes, sent at most every 50 ms and at phase ends."""
        self.exit_if_orphaned()
        now = time.monotonic()
        last_phase, last_time = self._last_progress
        if phase == last_phase and done < total and now - last_time < PROGRESS_INTERVAL_S:
            return
        self._last_progress = (phase, now)
        self._socket.send(encode(Progress(pack_body({"phase": phase, "done": done, "total": total}))))

    def ready(self, capabilities: Capabilities, *, load_seconds: float, max_jobs: int) -> None:
        body = {
            "context": capabilities.context,
            "max_batch_size": capabilities.max_batch_size,
            "max_jobs": max_jobs,
            "chat": capabilities.chat,
            "device": capabilities.device,
            "attention": capabilities.attention,
            "load_seconds": round(load_seconds, 3),
        }
        self._socket.send(encode(Ready(pack_body(body))))

    def stats(self, body: dict[str, object]) -> None:
        try:
            self._socket.send(encode(Stats(pack_body(body))), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the next reading supersedes this one

    def receive(self, wait_ms: int) -> list[Message]:
        """Everything that has arrived; waits up to ``wait_ms`` for the first message."""
        if wait_ms and not self._socket.poll(wait_ms):
            self.exit_if_orphaned()
            return []
        messages: list[Message] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode(frame, SUPERVISOR_TO_WORKER))
            except FrameError as e:
                # The supervisor is the same build as we are: this is a bug, worth a line, not worth every other stream.
                print(f"dropped a frame from the supervisor: {e}", flush=True)

    def queue(self, channel: int, entry: EventEntry, event: bytes) -> None:
        """Add an event to what the next ``flush`` sends to its channel."""
        index, chunks = self._unsent.setdefault(channel, ([], []))
        index.append(entry)
        chunks.append(event)

    def flush(self) -> None:
        """Send one frame per channel. What does not fit the pipe now is joined with the next step's events."""
        for channel in list(self._unsent):
            index, chunks = self._unsent[channel]
            frame = encode(Events(channel, self._generation, index, b"".join(chunks)))
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return
            del self._unsent[channel]

    @property
    def unsent(self) -> Sequence[int]:
        """Channels with events still to be sent."""
        return tuple(self._unsent)

    def exit_if_orphaned(self) -> None:
        """Leave at once if the supervisor is gone. The kernel's SIGKILL comes first; this covers its absence."""
        if os.getppid() != self._supervisor_pid:
            os._exit(0)

    def close(self) -> None:
        """Hand the last frames to the kernel, within half a second."""
        self._socket.close(linger=500)
        self._context.term()
