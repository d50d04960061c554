from typing import Any

from supervisor.requests.queue import WorkerSlot
from supervisor.requests.request_phase import RequestPhase

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
    first_token: float
    holds: bool
    @property
    def counters(self) -> memoryview | None: ...
    def __init__(self, credit: int, resumable: bool) -> None: ...
    def count_in(self, counters: memoryview) -> None: ...

class FastPath:
    def take(self, frame: bytes, worker_slot: WorkerSlot | Any, now: float = 0.0) -> int | None:
        """Return the channel that a whole frame goes to, and note its events as sent to this worker slot's requests.

        Return None for a frame that does not take the fast path. Then nothing has changed.
        """
