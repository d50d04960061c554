"""The state of one client connection, and the properties that libzmq gives with each of its messages."""

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
    """Counters since the start. ``disconnected`` includes connections that libzmq cut for a frame beyond 16 MiB;
    ``cut_off`` counts those that the supervisor ended."""

    accepted: int = 0
    disconnected: int = 0
    handshakes_failed: int = 0
    bad_frames: int = 0
    cut_off: int = 0


def next_channel() -> int:
    """Return a number that no connection of this process has had."""
    return next(_channels)


def descriptor_of(part: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came through; -1 if libzmq does not know it."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def is_automatic(routing_id: bytes) -> bool:
    """Return whether libzmq gave the routing id. A client could choose the id of another, and receive its frames."""
    return len(routing_id) == 5 and routing_id[0] == 0


def is_older(routing_id: bytes, other: bytes) -> bool:
    """Return whether libzmq gave ``routing_id`` before ``other``.

    libzmq's own routing ids are a zero byte and a counter of four bytes, which wraps around.
    """
    age = int.from_bytes(other[1:], "big") - int.from_bytes(routing_id[1:], "big")
    return 0 < age % (1 << 32) < 1 << 31
