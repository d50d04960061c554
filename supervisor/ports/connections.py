"""What is known of one client connection, and what libzmq tells of it with each message."""

from dataclasses import dataclass
from itertools import count

import zmq

from supervisor.keys.rights import OWNER, Identity

_channels = count(1)


@dataclass(slots=True)
class Connection:
    """One client connection. ``fd`` is its descriptor in this process, -1 if libzmq did not tell; ``identity`` whose it
    is; ``heard`` whether a message came since ``look`` looked."""

    routing_id: bytes
    channel: int
    fd: int
    greeted: bool = False
    identity: Identity = OWNER
    heard: bool = False


@dataclass(slots=True)
class PortCounters:
    """Since the start. ``disconnected`` includes connections that libzmq cut for a frame beyond 16 MiB; ``cut_off``
    counts those that the supervisor ended."""

    accepted: int = 0
    disconnected: int = 0
    handshakes_failed: int = 0
    bad_frames: int = 0
    cut_off: int = 0


def next_channel() -> int:
    """A number that no connection of this process has had."""
    return next(_channels)


def descriptor_of(part: zmq.Frame) -> int:
    """The one that a frame came through; -1 if libzmq does not say."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def is_automatic(routing_id: bytes) -> bool:
    """Given by libzmq. One that a client chose may be another's, whose frames it would then receive."""
    return len(routing_id) == 5 and routing_id[0] == 0


def is_older(routing_id: bytes, other: bytes) -> bool:
    """libzmq's own routing ids are a zero byte and a counter of four, which wraps around."""
    age = int.from_bytes(other[1:], "big") - int.from_bytes(routing_id[1:], "big")
    return 0 < age % (1 << 32) < 1 << 31
