"""The records that scheduling works on, and its effects: plain data."""

from dataclasses import InitVar, dataclass, field

from supervisor.requests.fair_queue import Account
from supervisor.requests.held import HeldEvents
from supervisor.requests.phase import Phase
from supervisor.requests.route import Route
from supervisor.requests.stream import Stream


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


@dataclass(slots=True, eq=False)
class InFlight(Stream):
    """One accepted request. ``sent`` events have gone to the client; ``held`` ones wait for credit, in order. What
    changes with every event is Stream's.

    accepted, started  monotonic seconds: of acceptance, and of the first time that a worker was given it
    cost               tokens of the prompt, estimated from its bytes
    window             events that may go to the client before it grants any
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
    window: InitVar[int]
    held: HeldEvents = field(repr=False)
    worker: str = ""
    started: float | None = None
    cancelled: bool = False
    resumes: int = 0
    strikes: int = 0
    alone: bool = False
    reported: int = -1
    """The queue position last reported."""

    def __post_init__(self, window: int) -> None:
        Stream.__init__(self, window, self.route.resume)

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
