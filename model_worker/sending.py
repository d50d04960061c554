"""The queue of events from the engine to the supervisor, joined to one frame per channel, in their order.

``PlainOutbox`` is the reference. If the compiled module ``outbox`` can be used (see ``protocol.process.compiled``), it
takes the place of the reference. It handles the fast path without Python.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from protocol.codec import EventWriter
from protocol.messages import EventEntry
from protocol.process.compiled import find
from protocol.process.progress_lease import ProgressLease
from protocol.process.socket_calls import AnySocket, send_now


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
