from collections.abc import Callable
from typing import Any

from protocol.messages import EventEntry
from protocol.process.sockets import AnySocket
from protocol.process.worker_spec import ProgressLease

SOURCES: int

class JobCursor:
    seq: int
    tokens: int

    def __init__(self, channel: int, request: int, seq: int, tokens: int) -> None: ...
    @property
    def channel(self) -> int: ...
    @property
    def request(self) -> int: ...

class Outbox:
    """The compiled twin of ``link.PlainOutbox``.

    Its fast path takes a NewTokens of one of the jobs if its token ids fit four bytes, its text can be encoded, and it
    has no log-probabilities.
    """

    def __init__(self, socket: AnySocket, generation: int, most_events: int, most_bytes: int) -> None: ...
    def steps(
        self, step: Callable[[], list[Any]], lease: ProgressLease, jobs: dict[int, Any], until: float
    ) -> tuple[list[Any], int]: ...
    def take(self, events: list[Any], first: int, jobs: dict[int, Any]) -> int: ...
    def queue(self, channel: int, entry: EventEntry, event: bytes) -> None: ...
    def answer(self, frame: bytes) -> None: ...
    def flush(self) -> None: ...
    @property
    def unsent(self) -> bool: ...
