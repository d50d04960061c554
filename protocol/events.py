"""The message EVENTS, the most frequent one: the events of one step of the engine, for one connection of a client.

Bodies hold prompts and answers, which no log may show: so ``repr`` of a message leaves out its body.
"""

from dataclasses import field
from enum import IntFlag
from typing import NamedTuple

from protocol.kinds import MIB, Kind, Message, Way, message


class EventFlag(IntFlag):
    """The third element of an index entry."""

    FIRST = 1
    """The first event of its request that holds tokens."""
    FINISHED = 2
    """Terminal: the request ended as asked."""
    ERROR = 4
    """Terminal: the request ended with an error."""


TERMINAL = int(EventFlag.FINISHED | EventFlag.ERROR)
"""Both terminal flags. This is a plain integer, because testing flags against an IntFlag costs a call into Python."""


class FinishReason:
    """The values of ``finish_reason`` in a FINISHED event."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """max_tokens was reached."""
    BANNED = "banned_strings"
    """Every continuation that the model found leads to a banned string, or no token is left to draw. The answer ends
    there."""
    LOOP = "loop"
    """The answer repeated itself for as many tokens as stop_on_loop says."""
    CANCELLED = "cancelled"
    """The client cancelled."""


class EventEntry(NamedTuple):
    """One entry of an EVENTS index."""

    request: int
    seq: int
    """The event's number within the request: 0, 1, 2 and so on, without a gap."""
    flags: int
    """Bits, see below."""
    tokens: int
    """The number of token ids at the beginning of the event's bytes."""
    length: int
    """The size of the event in bytes: its ids, 4 bytes each, and its map."""


@message(Kind.EVENTS, Way.SUPERVISOR_TO_CLIENT | Way.WORKER_TO_SUPERVISOR, largest=3 * MIB, frozen=False)
class Events(Message):
    """Deliver the events of one step of the engine for this connection. They may belong to several requests.

    The bytes of the events lie one after the other in the body, in the order of the index. The bytes of one event are
    its token ids (u32, little endian) and then one msgpack map. A terminal flag says that this is the map of FINISHED
    or of ERROR. Without a terminal flag it is the map of a delta.
    """

    channel: int
    """The supervisor's number for the connection. Ignore it."""
    generation: int
    """The number of the worker's process; 0 if the supervisor has made the frame. It may change within a request.
    Ignore it."""
    index: list[EventEntry]
    """One entry for each event. The lengths add up to the length of the body."""
    body: bytes = field(repr=False)
    """The bytes of the events. This body is no map."""
