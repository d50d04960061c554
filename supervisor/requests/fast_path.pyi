from typing import Any

from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.worker_slots import WorkerSlot

SOURCES: int

class RequestProgress:
    phase: RequestPhase
    ids: bytearray
    resumable: bool
    credit: int
    sent: int
    delivered_tokens: int
    unpaid: int
    has_tokens: bool
    holds: bool

    def __init__(self, credit: int, resumable: bool) -> None: ...

class FastPath:
    def take(self, frame: bytes, worker_slot: WorkerSlot | Any) -> int | None:
        """The channel that a frame goes to whole, if it is a usual one of this worker slot, whose requests then know it for
        sent; else None, and nothing has changed."""
