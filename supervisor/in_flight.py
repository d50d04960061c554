"""The records that scheduling works on, and its effects: plain data."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import WireError
from protocol.messages import EventEntry


@dataclass(frozen=True, slots=True)
class ToClient:
    """Effect: send a frame to a client connection."""

    channel: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Effect: send a frame to the present worker of a model."""

    model: str
    frame: bytes


Effect = ToClient | ToWorker


class Phase(Enum):
    WAITING = "waiting"
    """In the model's queue."""
    RUNNING = "running"
    """The worker has its job."""
    ENDED = "ended"
    """The client has its terminal event, or is gone; the worker still has to let go of the job."""
    HELD = "held"
    """The worker has finished; the client still has to grant credit for the last events."""


@dataclass(slots=True, eq=False)
class InFlight:
    """One accepted request. ``sent`` events have gone to the client; ``held`` ones wait for credit, in order."""

    channel: int
    request: int
    model: str
    body: bytes
    credit: int
    phase: Phase = Phase.WAITING
    sent: int = 0
    delivered_tokens: int = 0
    held: list[tuple[EventEntry, bytes]] = field(default_factory=list)
    held_bytes: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.channel, self.request


@dataclass(slots=True)
class ModelQueue:
    """What one model has to do. ``refusal`` is None while new requests are taken."""

    limit: int
    refusal: WireError | None
    capacity: int = 0
    generation: int = 0
    waiting: deque[InFlight] = field(default_factory=deque)
    waiting_bytes: int = 0
    running: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    tokens: int = 0
    finished: int = 0
    errors: int = 0
