"""Events of the engine on their way out: joined to one frame a channel, in the order in which they came. Compiled, if
that is to be had (see ``protocol.process.compiled``): ``outbox`` then does what is usual without Python.
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
    """What changes of a job with every event.

    channel  of the client's connection, request  its number there: whose the events are
    seq      number of the next event
    tokens   that the events before it had, those of a former worker included
    """

    __slots__ = ("channel", "request", "seq", "tokens")

    def __init__(self, channel: int, request: int, seq: int, tokens: int) -> None:
        self.channel, self.request, self.seq, self.tokens = channel, request, seq, tokens


class PlainOutbox:
    """What is to be sent through one socket, and never blocks a step: what cannot be sent now waits.

    generation   of the worker, which every EVENTS frame says
    most_events  bounds of such a frame; an event with more than ``most_bytes`` bytes has one of its own
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

        It renews the lease before each step and sends the step's events. It goes on while all events are of the fast
        path and nothing has come through the socket, at most until ``until`` (time.monotonic()). Where steps are very
        short, it asks the socket every 20 µs.

        Returns the events of the last step, and how many of them ``take`` has queued. Raises what the engine raises,
        and ZMQError.
        """
        lease.step()
        return step(), 0

    def take(self, events: list[Any], first: int, jobs: dict[int, Any]) -> int:
        """Queue what is usual of a step's events, from ``first`` on: up to which one. That, if there is one, is left to
        the caller, and then what follows to the next call. Here nothing is usual.

        jobs  by the number that events name: a JobCursor of each, whose ``seq`` and ``tokens`` are brought up to date
        """
        return first

    def queue(self, channel: int, entry: EventEntry, event: bytes) -> None:
        """Add an event to what the next ``flush`` sends to its channel."""
        joined = self._joined.get(channel)
        if joined is None:
            joined = self._joined[channel] = ([], [])
        joined[0].append(entry)
        joined[1].append(event)

    def answer(self, frame: bytes) -> None:
        """Send a frame that is no event. Waits behind those while the pipe is full, as they do."""
        self._frames.append(frame)
        self._send_frames()

    def flush(self) -> None:
        """Send one frame per channel. While the pipe is full (the supervisor is paused, say) events are joined, and
        become frames of bounded size once it is not: each event is encoded once, however long that takes. Raises
        ZMQError."""
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
        """Whether everything that is a frame already could be sent."""
        while self._frames:
            try:
                send_now(self._socket, self._frames[0])
            except zmq.Again:
                return False
            self._frames.popleft()
        return True

    @property
    def unsent(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self._frames or self._joined)


def slices(chunks: Sequence[bytes], most_events: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last) of runs of events that make frames of at most so many events and about so many bytes."""
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
