from typing import Any

from supervisor.requests.phase import Phase
from supervisor.requests.seats import Seat

SOURCES: int

class Stream:
    phase: Phase
    ids: bytearray
    resumable: bool
    credit: int
    sent: int
    delivered_tokens: int
    unpaid: int
    has_tokens: bool
    holds: bool

    def __init__(self, credit: int, resumable: bool) -> None: ...

class Usual:
    def look(self, frame: bytes, seat: Seat | Any) -> int | None:
        """The channel that a frame goes to whole, if it is a usual one of this seat, whose requests then know it for
        sent; else None, and nothing has changed."""
