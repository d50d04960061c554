"""The records that scheduling works on, and its effects: plain data."""

from dataclasses import dataclass, field
from enum import Enum

from supervisor.requests.fair_queue import Account
from supervisor.requests.held import HeldEvents
from supervisor.requests.route import Route


@dataclass(slots=True)  # not frozen: that makes it three times as dear, and there is one for every token
class ToClient:
    """Effect: send a frame to a client connection."""

    channel: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Effect: send a frame to the present process of a worker."""

    worker: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Effect: requests wait, and workers of their model sleep."""

    model: str


Effect = ToClient | ToWorker | Wake


class Phase(Enum):
    WAITING = "waiting"
    """In the model's queue: new, or to go on after the death of its worker."""
    RUNNING = "running"
    """A worker has its job."""
    ENDED = "ended"
    """The client has its terminal event, or is gone; the worker still has to let go of the job."""
    HELD = "held"
    """The worker has finished; the client still has to grant credit for the last events."""


@dataclass(slots=True, eq=False)
class InFlight:
    """One accepted request. ``sent`` events have gone to the client; ``held`` ones wait for credit, in order.

    accepted, started  monotonic seconds: of acceptance, and of the first time that a worker was given it
    cost               tokens of the prompt, estimated from its bytes
    holds              whether ``held`` has any (asked for every event)
    ids                what the answer consists of so far (u32 little endian), held included, if it may be resumed
    unpaid             tokens that its account has not been charged for yet
    resumes            how often it went on in another worker
    strikes            deaths of workers that were computing it, or a request just like it
    """

    channel: int
    request: int
    model: str
    route: Route
    body: bytes = field(repr=False)  # a fault of our own is logged, and with it what it was about: never a prompt
    cost: int
    account: Account
    accepted: float
    credit: int
    held: HeldEvents = field(repr=False)
    phase: Phase = Phase.WAITING
    worker: str = ""
    started: float | None = None
    sent: int = 0
    delivered_tokens: int = 0
    has_tokens: bool = False
    holds: bool = False
    unpaid: int = 0
    cancelled: bool = False
    ids: bytearray = field(default_factory=bytearray, repr=False)
    resumes: int = 0
    strikes: int = 0
    alone: bool = False
    reported: int = -1
    """The queue position last reported."""

    @property
    def key(self) -> tuple[int, int]:
        return self.channel, self.request

    def settle(self) -> None:
        """Charge its account."""
        if self.unpaid:
            self.account.charge(self.unpaid)
            self.unpaid = 0

    @property
    def held_terminal(self) -> bool:
        """Whether the last of the held events is the request's end."""
        return self.phase is Phase.HELD

    @property
    def next_seq(self) -> int:
        """The number of the event that is due from the worker."""
        return self.sent + len(self.held)
