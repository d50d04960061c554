"""The worker's end of the connection to the supervisor: one DEALER socket.

Sending never blocks a step of the engine. Messages that cannot be sent now wait.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import zmq

from model_worker.engine import Capabilities
from model_worker.intake import ModelTraits
from protocol import __version__, limits
from protocol.codec import EventWriter, decode, encode, pack_body
from protocol.messages import (
    SUPERVISOR_TO_WORKER,
    AnswerMessage,
    Compiled,
    EventEntry,
    Hello,
    Message,
    Parked,
    Prefill,
    ProgressMessage,
    Ready,
    Slept,
    Stats,
    Woke,
)
from protocol.process.compiled import find
from protocol.process.sockets import (
    AnySocket,
    check_listener,
    end_when_silent,
    has_input,
    monitor_event,
    prove_keys,
    send_now,
)
from protocol.process.worker_spec import EXIT_ASKED, EXIT_DISCONNECTED, ProgressLease, WorkerSpec

# The queue of events from the engine to the supervisor, joined to one frame per channel, in their order.
#
# ``PlainOutbox`` is the reference. If the compiled module ``outbox`` can be used (see ``protocol.process.compiled``),
# it takes the place of the reference. It handles the fast path without Python.


class PlainJobCursor:
    """The part of a job that changes with every event.

    channel  the channel of the client's connection
    request  the client's number of the request
    seq      the number of the next event
    tokens   number of tokens in all events before the next one, including those of another worker
    """

    __slots__ = ("channel", "request", "seq", "tokens")

    def __init__(self, channel: int, request: int, seq: int, tokens: int) -> None:
        self.channel, self.request, self.seq, self.tokens = channel, request, seq, tokens


class PlainOutbox:
    """Queues and sends everything that goes through one socket.

    generation   the generation of the worker, which every EVENTS frame names
    most_events  the largest number of events in one EVENTS frame
    most_bytes   the largest number of event bytes in one frame. A longer event has a frame of its own

    Sending never blocks a step. Messages that cannot be sent now wait.
    """

    def __init__(self, socket: AnySocket, generation: int, most_events: int, most_bytes: int) -> None:
        self._socket, self._generation = socket, generation
        self._most_events, self._most_bytes = most_events, most_bytes
        self._writer = EventWriter()
        self._joined: dict[int, tuple[list[EventEntry], list[bytes]]] = {}
        self._frames: deque[bytes] = deque()

    def steps(
        self, step: Callable[[], list[Any]], lease: ProgressLease, jobs: dict[int, Any], until: float
    ) -> tuple[list[Any], int]:
        """Run one step of the engine. The compiled outbox runs many steps before it returns.

        The compiled outbox renews the lease before each step and sends the step's events. It goes on while all events
        are of the fast path and nothing has come through the socket, at most until ``until`` (time.monotonic()). If
        steps are very short, it asks the socket only every 20 µs.

        Returns the events of the last step, and how many of them ``take`` has queued. Raises ZMQError, and every
        exception of the engine.
        """
        lease.step()
        return step(), 0

    def take(self, events: list[Any], first: int, jobs: dict[int, Any]) -> int:
        """Queue the events of a step that the fast path can handle, and return the index of the first event that it
        cannot.

        The caller handles that event, and calls ``take`` again with the next index. This reference has no fast path.

        first  index of the first event to look at
        jobs   the JobCursor of each job, by the number that events name. Its ``seq`` and ``tokens`` are brought up to
               date
        """
        return first

    def queue(self, channel: int, entry: EventEntry, event: bytes) -> None:
        """Queue an event. The next ``flush`` sends it to its channel."""
        joined = self._joined.get(channel)
        if joined is None:
            joined = self._joined[channel] = ([], [])
        joined[0].append(entry)
        joined[1].append(event)

    def answer(self, frame: bytes) -> None:
        """Send a frame that is not an event. While the pipe is full, the frame waits behind events."""
        self._frames.append(frame)
        self._send_frames()

    def flush(self) -> None:
        """Send one frame per channel. Raises ZMQError.

        While the pipe is full (the supervisor is paused, for example) events are joined. They become frames of limited
        size once the pipe has room. So each event is encoded once, however long it waits.
        """
        if not self._send_frames():
            return
        for channel, (index, chunks) in self._joined.items():
            body = b"".join(chunks)
            if len(chunks) <= self._most_events and len(body) <= self._most_bytes:
                self._frames.append(self._writer.frame(channel, self._generation, index, body))
                continue
            self._frames.extend(
                self._writer.frame(channel, self._generation, index[first:last], b"".join(chunks[first:last]))
                for first, last in slices(chunks, self._most_events, self._most_bytes)
            )
        self._joined.clear()
        self._send_frames()

    def _send_frames(self) -> bool:
        """Send the frames that are complete. Return whether all of them could be sent."""
        while self._frames:
            try:
                send_now(self._socket, self._frames[0])
            except zmq.Again:
                return False
            self._frames.popleft()
        return True

    @property
    def unsent(self) -> bool:
        """Return whether anything still has to be sent."""
        return bool(self._frames or self._joined)


def slices(chunks: Sequence[bytes], most_events: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of runs of events that make frames of at most so many events and about so many bytes."""
    first = size = 0
    for i, chunk in enumerate(chunks):
        if i > first and (i - first >= most_events or size + len(chunk) > most_bytes):
            yield first, i
            first, size = i, 0
        size += len(chunk)
    yield first, len(chunks)


if TYPE_CHECKING:
    from model_worker.outbox import JobCursor as JobCursor
    from model_worker.outbox import Outbox as Outbox
else:
    compiled = find("model_worker.outbox")
    JobCursor = PlainJobCursor if compiled is None else compiled.JobCursor
    Outbox = PlainOutbox if compiled is None else compiled.Outbox

CONNECT_WAIT_MS = 10_000
"""Milliseconds that a connect may take. On a Unix socket it succeeds or fails at once, unless the machine is busy."""
PROGRESS_INTERVAL_S = 0.05
SOCKET_MARK = 10_000
"""Messages that the socket holds in each direction before it takes no more."""
MAX_FRAME_EVENTS = 256
MAX_FRAME_BYTES = 4 << 10
"""Limits of an EVENTS frame with more than one event. Such a frame has up to 7 KB with its index. A worker that is
faster than the supervisor joins the events that it cannot send. Without these limits its frames would grow as long as
possible, and the supervisor would hold as many of them in memory as its socket accepts."""


class WorkerLink:
    """The connection of one worker process to the supervisor."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._generation = spec.generation
        self._supervisor_pid = spec.supervisor_pid
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, spec.routing_id)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SOCKET_MARK)
        socket.setsockopt(zmq.RCVHWM, SOCKET_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.SOCKET_MAX_FRAME)
        # A worker that lost its supervisor is of no use. A new worker process is safer than a resumed connection.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._by_key = spec.keys is not None
        if spec.keys is not None:
            prove_keys(socket, spec.endpoint, spec.keys)
            end_when_silent(socket, spec.link_lease_s)
        connected = zmq.EVENT_HANDSHAKE_SUCCEEDED if self._by_key else zmq.EVENT_CONNECTED
        self._monitor = socket.get_monitor_socket(connected | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        socket.connect(spec.endpoint)
        self._socket = socket
        self._outbox = outbox = Outbox(socket, spec.generation, MAX_FRAME_EVENTS, MAX_FRAME_BYTES)
        self.steps, self.take, self.queue, self.flush = outbox.steps, outbox.take, outbox.queue, outbox.flush
        """The outbox's own methods. The loop calls them for every step, so a wrapper would cost time."""
        self._last_progress = ("", 0.0)
        self._watching: threading.Thread | None = None
        self._closing = -1
        """Descriptor of an event that ends ``_watching``."""

    def hello(self) -> None:
        """Send HELLO after it is certain that the supervisor listens. Call this before any other method.

        Over ipc the kernel confirms that our own user listens, and over TCP the handshake proves the supervisor's key.
        End this process if no process listens, or another one: that process would receive the answers to prompts.
        """
        if not self._monitor.poll(CONNECT_WAIT_MS):
            _leave("the supervisor did not take the connection")
        event, descriptor = monitor_event(self._monitor)
        if event not in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
            _leave("the supervisor does not listen any more, or does not know this worker's key")
        if not self._by_key:
            try:
                check_listener(descriptor)
            except OSError as e:
                _leave(f"the supervisor's socket cannot be trusted: {e}")
        self._socket.send(encode(Hello(pack_body({"pid": os.getpid(), "build": __version__}))))
        if self._by_key:
            self._closing = os.eventfd(0)
            self._watching = threading.Thread(target=self._watch, name="connection", daemon=True)
            self._watching.start()

    def _watch(self) -> None:
        """End the process when a connection over TCP is lost, whatever the engine does meanwhile.

        The agent ends a worker that hangs, or whose network is cut. But the agent may be stopped. Only this thread
        uses the monitor until ``close`` has joined it.
        """
        ready = zmq.zmq_poll([(self._monitor, zmq.POLLIN), (self._closing, zmq.POLLIN)])
        if self._closing not in dict(ready):
            _leave("the connection to the supervisor was lost")

    def progress(self, phase: str, done: int, total: int, unit: str = "") -> None:
        """Report progress of the load. An engine may call this often. A message is sent at most every 50 ms, and when a
        phase begins or ends."""
        self.exit_if_orphaned()
        now = time.monotonic()
        last_phase, last_time = self._last_progress
        if phase == last_phase and done < total and now - last_time < PROGRESS_INTERVAL_S:
            return
        self._last_progress = (phase, now)
        body = {"phase": phase, "done": done, "total": total, "unit": unit}
        self._socket.send(encode(ProgressMessage(pack_body(body))))

    def ready(
        self,
        capabilities: Capabilities,
        format: ModelTraits,
        *,
        load_seconds: float,
        max_jobs: int,
        end_tokens: str = "",
    ) -> None:
        """Say that the model is loaded, and describe it."""
        body = {
            "context": capabilities.context,
            "max_batch_size": capabilities.max_batch_size,
            "max_jobs": max_jobs,
            "chat": capabilities.chat and not format.template_error,
            "template": format.template_changes[:500],
            "parallel_tool_calls": format.parallel,
            "end_tokens": end_tokens[:500],
            "verb": capabilities.verb,
            "device": capabilities.device,
            "attention": capabilities.attention,
            "decoding": capabilities.decoding,
            "tool_format": format.tools,
            "tools_tried": format.tools is not None and format.tried,
            "reasoning_start": format.reasoning and format.reasoning[0],
            "reasoning_end": format.reasoning and format.reasoning[1],
            "sleep_bytes": capabilities.sleep_bytes,
            "no_sleep": capabilities.no_sleep,
            "load_seconds": round(load_seconds, 3),
        }
        self._socket.send(encode(Ready(pack_body(body))))

    def slept(self, seconds: float, host_bytes: int, refused: str = "") -> None:
        """Say that the model sleeps, or why it cannot sleep."""
        body = {"refused": refused, "seconds": round(seconds, 3), "host_bytes": host_bytes}
        self._outbox.answer(encode(Slept(pack_body(body))))

    def woke(self, seconds: float, host_bytes: int) -> None:
        """Say that the model is awake."""
        self._outbox.answer(encode(Woke(pack_body({"seconds": round(seconds, 3), "host_bytes": host_bytes}))))

    def stats(self, body: dict[str, object]) -> None:
        """Send the engine's current figures. Called every second, and so also checks whether the connection is lost."""
        self.exit_if_orphaned()
        try:
            self._socket.send(encode(Stats(pack_body(body))), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the next reading supersedes this one

    def prefill(self, channel: int, request: int, done: int, total: int) -> None:
        """Report how much of a prompt has been computed, in tokens."""
        try:
            self._socket.send(encode(Prefill(channel, request, done, total)), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the next report, or the first token, supersedes this one

    def receive(self, wait_ms: int, also: Sequence[int] = ()) -> list[Message]:
        """Return all messages that have arrived.

        Wait for the first one up to ``wait_ms`` milliseconds, or until one of the descriptors in ``also`` is readable.
        """
        if wait_ms and not self._poll(wait_ms, also):
            self.exit_if_orphaned()
            return []
        messages: list[Message] = []
        # Ask before every read: an exception for an empty socket would cost more than everything else here.
        while has_input(self._socket):
            frame = self._socket.recv(zmq.NOBLOCK)
            # The supervisor has the same build as this worker. A frame that cannot be read may be a job or a cancel.
            # The FrameError ends this process, so that no request is lost silently.
            messages.append(decode(frame, SUPERVISOR_TO_WORKER))
        return messages

    def _poll(self, wait_ms: int, also: Sequence[int]) -> bool:
        if not also:
            return bool(self._socket.poll(wait_ms))
        return bool(zmq.zmq_poll([(self._socket, zmq.POLLIN), *((fd, zmq.POLLIN) for fd in also)], wait_ms))

    def answer(self, ask: int, body: bytes) -> None:
        """Answer an ASK. The answer waits behind events while the pipe is full."""
        self._outbox.answer(encode(AnswerMessage(ask, body)))

    def parked(self, channel: int, request: int) -> None:
        """Give a job back to the supervisor while its constraint is compiled."""
        self._outbox.answer(encode(Parked(channel, request)))

    def compiled(self, channel: int, request: int, party: int, milliseconds: int) -> None:
        """Ask for a job that was given back, because its constraint is compiled.

        party         the client that pays for the compilation
        milliseconds  processor time of the compilation
        """
        self._outbox.answer(encode(Compiled(channel, request, party, milliseconds)))

    @property
    def unsent(self) -> bool:
        """Return whether events still have to be sent."""
        return self._outbox.unsent

    def exit_if_orphaned(self) -> None:
        """End the process at once if the supervisor, or the connection to it, is gone.

        The kernel's SIGKILL normally comes before this method notices that the supervisor is gone. The connection alone
        is lost when a frame was too large for libzmq. A worker that cannot be reached would hold its requests and its
        GPU for ever.
        """
        if os.getppid() != self._supervisor_pid:
            os._exit(EXIT_ASKED)
        if self._watching is None and self._monitor.poll(0):
            _leave("the connection to the supervisor was lost")

    def close(self) -> None:
        """Hand the last frames to the kernel, within half a second, and close the connection."""
        if self._watching is not None:
            os.eventfd_write(self._closing, 1)
            self._watching.join()
            os.close(self._closing)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)
        self._context.term()


def _leave(why: str) -> NoReturn:
    """Print the reason and end the process, because a worker is of no use without its supervisor."""
    print(why, file=sys.stderr, flush=True)
    os._exit(EXIT_DISCONNECTED)
