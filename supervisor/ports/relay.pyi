from collections.abc import Callable
from typing import Protocol

import zmq

from supervisor.requests.worker_slots import WorkerSlot

class _Addressed(Protocol):
    routing_id: bytes

SOURCES: int

class Relay:
    def __init__(
        self,
        back: zmq.Socket[bytes],
        front: zmq.Socket[bytes],
        connections: dict[int, _Addressed],
        seat_of: Callable[[bytes], WorkerSlot | None],
    ) -> None:
        """Between two ROUTERs.

        connections  by channel, of whom can be reached through ``front``; looked up for every frame, never changed
        seat_of      routing id → the worker slot of the worker that has it, None if its frames are not to be passed on
        """

    def take(self, limit: int) -> tuple[int, bytes | None, bytes | None, bool]:
        """Pass on what is usual, until ``limit`` frames were taken in all, nothing waits, or one came that is not.

        Returns (frames taken, that one's sender, its frame, whether more parts of it follow); the sender is None where
        there is none, the frame also where it has several parts. Raises ZMQError for a socket that is closed.
        """
