from collections.abc import Callable
from typing import Protocol

import zmq

from supervisor.requests.queue import WorkerSlot

class _Addressed(Protocol):
    routing_id: bytes

SOURCES: int

class Relay:
    def __init__(
        self,
        back: zmq.Socket[bytes],
        front: zmq.Socket[bytes],
        connections: dict[int, _Addressed],
        slot_of: Callable[[bytes], WorkerSlot | None],
    ) -> None:
        """Pass frames on from the ROUTER for workers to the ROUTER for clients.

        connections  the clients' connections by channel. The relay looks them up and never changes this map
        slot_of      returns the worker slot of the worker that has a routing id; None if Python handles all its frames
        """

    def take(self, limit: int) -> tuple[int, bytes | None, bytes | None, bool]:
        """Take at most ``limit`` frames from workers, and pass them on. Stop early if none waits, or at the first frame
        that does not take the fast path.

        Returns (number of frames taken, sender of that frame, that frame, whether more parts of it follow). The sender
        is None if there is no such frame. The frame is None also if it has several parts. Raises ZMQError for a socket
        that is closed.
        """
