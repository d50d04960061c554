"""Queues of client messages that the supervisor has received and not handled yet, with limits. Pure.

libzmq must never stop reading a client (see ``sockets.client_router``). So a client that sends faster than the
supervisor handles would fill the memory. Therefore every turn of the loop takes in many more messages than it handles.
The messages that stay in the queues show which connection sends too fast. The supervisor ends that connection.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.messages import Hello, Message
from supervisor.requests.request import number_of

_MIB = 1 << 20
SHORT_MESSAGES, SHORT_BYTES = 512, 4 * _MIB
"""Messages and bytes. A connection with fewer of both in its queue is not to blame for the growth of the process."""
T = TypeVar("T")


@dataclass(frozen=True)
class ArrivalLimits:
    """How much may wait to be handled.

    The Python client sends at most 7,000 requests a second (5,500 if each has 64 KB). The supervisor handles these in
    0.4 s, so no message waits. A client that has 10,000 requests ready and sends them all at once stays below half of
    ``messages_of_connection``. Each message also costs about 300 bytes beside its content.
    """

    messages_of_connection: int = 20_000
    bytes_of_connection: int = 64 * _MIB
    messages_of_all: int = 60_000
    bytes_of_all: int = 128 * _MIB
    growth: int = 64 * _MIB
    """Bytes that the process may grow by while messages wait. libzmq receives small messages six times as fast as the
    supervisor takes them, and even faster on a busy machine. So most of a flood waits where it cannot be counted."""


class _ConnectionQueue(Generic[T]):
    """The waiting messages of one connection, and their size in bytes."""

    __slots__ = ("messages", "size")

    def __init__(self) -> None:
        self.messages: deque[tuple[T, int]] = deque()
        self.size = 0


class Arrivals(Generic[T]):
    """Queues of messages by channel, the number of a connection. ``next`` takes one message from each queue in turn."""

    def __init__(self, bounds: ArrivalLimits) -> None:
        self.bounds = bounds
        self._queues: dict[int, _ConnectionQueue[T]] = {}
        self._turns: deque[int] = deque()
        self._messages = self._bytes = 0
        self._over: set[int] = set()
        self._resident: int | None = None
        """Bytes that the process had in memory when messages began to wait; None while all have been taken in."""

    def __bool__(self) -> bool:
        return self._messages > 0

    def add(self, channel: int, message: T, size: int) -> None:
        """Put a message of ``size`` bytes at the end of its connection's queue."""
        if (queue := self._queues.get(channel)) is None:
            queue = self._queues[channel] = _ConnectionQueue()
            self._turns.append(channel)
        queue.messages.append((message, size))
        queue.size += size
        self._messages += 1
        self._bytes += size
        if len(queue.messages) > self.bounds.messages_of_connection or queue.size > self.bounds.bytes_of_connection:
            self._over.add(channel)

    def next(self) -> tuple[int, T] | None:
        """Take out the first message of the connection whose turn it is; None if nothing waits."""
        while self._turns:
            channel = self._turns.popleft()
            if (queue := self._queues.get(channel)) is None:
                continue  # its messages were dropped, and no channel is used twice
            message, size = queue.messages.popleft()
            queue.size -= size
            self._messages -= 1
            self._bytes -= size
            if queue.messages:
                self._turns.append(channel)
            else:
                del self._queues[channel]
            return channel, message
        return None

    def drop(self, channel: int) -> None:
        """Drop the waiting messages of a connection that has ended."""
        if (queue := self._queues.pop(channel, None)) is not None:
            self._messages -= len(queue.messages)
            self._bytes -= queue.size
        self._over.discard(channel)

    def has_grown(self, resident: int) -> bool:
        """Return whether the process has grown by too much since messages began to wait in libzmq.

        resident  bytes that the process has in memory now
        """
        if self._resident is None:
            self._resident = resident
        return resident - self._resident > self.bounds.growth

    def all_taken(self) -> None:
        """Note that no message waits in libzmq. Growth is counted anew from the next time that messages wait there."""
        self._resident = None

    def excessive(self, *, grown: bool) -> list[tuple[int, int, int]]:
        """Return (channel, messages, bytes) of each connection to end because too many of its messages wait.

        If too many messages of all connections wait, or the process has ``grown`` by too much, the result includes the
        connections with the longest queues, and those with a queue of at least half that length. Otherwise, of many
        connections that flood at once, one would be ended after the other while the rest go on.
        """
        found, self._over = self._over, set()
        if self._messages < SHORT_MESSAGES and self._bytes < SHORT_BYTES:
            return []
        if grown or self._messages > self.bounds.messages_of_all:
            found |= self._longest(lambda queue: len(queue.messages), SHORT_MESSAGES)
        if grown or self._bytes > self.bounds.bytes_of_all:
            found |= self._longest(lambda queue: queue.size, SHORT_BYTES)
        return [(channel, len(self._queues[channel].messages), self._queues[channel].size) for channel in found]

    def _longest(self, length: Callable[[_ConnectionQueue[T]], int], at_least: int) -> set[int]:
        """Return the channels whose queue is as long as ``at_least``, and half as long as the longest queue."""
        enough = max(at_least, max(map(length, self._queues.values())) / 2)
        return {channel for channel, queue in self._queues.items() if length(queue) >= enough}


# Note when clients send faster than the supervisor takes messages in. New connections wait during that time. Pure.


FLOOD_S = 2.0
"""The most seconds that new connections wait during a flood and after it."""


class Flood:
    """The state of a flood at one port. It is true while a flood goes on."""

    def __init__(self) -> None:
        self._at: float | None = None
        """Monotonic time at which the flood began or went on, or newcomers were last let in. None without a flood."""

    def __bool__(self) -> bool:
        return self._at is not None

    def begin(self, now: float) -> None:
        """Note that the process has grown by too much while messages wait in libzmq."""
        if self._at is None:
            self._at = now

    def go_on(self, now: float) -> None:
        """Note that a connection is ended for a flood. The supervisor has still to drop what the client has sent."""
        self._at = now

    def end(self) -> None:
        """Note that everything that was sent has been taken in."""
        self._at = None

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now.

        After a flood new connections wait until the supervisor has taken in everything that was sent. But every
        FLOOD_S all waiting connections are let in, because libzmq gives a handshake 3 s.
        """
        if self._at is None:
            return True
        if now - self._at < FLOOD_S:
            return False
        self._at = now
        return True


# The rule that HELLO comes first on a connection. Pure.


def check_greeting(message: Message, *, greeted: bool) -> None:
    """Raise FrameError unless HELLO comes first, once, and with a map.

    greeted  whether HELLO has come before on this connection
    """
    kind, number = message.kind, number_of(message)
    if not isinstance(message, Hello):
        text = "the first message of a connection is HELLO"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind, number=number)
    if greeted:
        text = "HELLO was said before on this connection: say it once"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind)
    try:
        unpack_body(message.body)
    except FrameError as e:
        raise FrameError(e.code, f"HELLO: {e.message}", kind=kind, field=e.field) from None


# Choose the clients that get a PING now: each client once a second, a few clients at a time. Pure.
#
# Some hundred PINGs and PONGs at once would delay every token by 10 ms, once a second.


PROBE_INTERVAL_S = 0.05
"""Seconds between two parts of a round."""
PARTS = 20
"""Number of parts in a round. A round takes a second."""


class Probes:
    """Rounds through the connections with unfinished requests."""

    def __init__(self) -> None:
        self._left: list[int] = []
        self._parts = 0

    def next(self, channels: Callable[[], Collection[int]]) -> list[int]:
        """Return the channels of the clients to probe now. Call this every PROBE_INTERVAL_S.

        channels  returns all connections with unfinished requests. It is called when a round begins
        """
        if not self._parts:
            self._left, self._parts = list(channels()), PARTS
        count = -(-len(self._left) // self._parts)
        self._parts -= 1
        now, self._left = self._left[:count], self._left[count:]
        return now
