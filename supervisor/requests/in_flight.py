"""The records that scheduling works on, and its effects: plain data."""

from dataclasses import InitVar, dataclass, field

from supervisor.requests.fair_queue import Account
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.request_progress import RequestProgress
from supervisor.requests.route import Route
from supervisor.requests.send_buffer import SendBuffer

PROBATION = 4
"""Events with which a request shows that it did not kill its worker. The supervisor may have seen fewer events than
the worker that died had computed: the step in which the worker died brought none, on a GPU the next step may have been
queued already, and the events of the last step or two may have been lost on their way out of the process. A step brings
at most one event of a request, however many tokens are in it (with speculation it has several)."""


@dataclass(slots=True)  # not frozen: that makes it three times as dear, and there is one for every token
class ToClient:
    """Effect: send a frame to a client connection."""

    channel: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Effect: send a frame to one process of a worker, unless that process has ended.

    generation  tells the process from its successors
    """

    worker: str
    generation: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Effect: requests wait, and workers of their model sleep."""

    model: str


Effect = ToClient | ToWorker | Wake


@dataclass(slots=True, eq=False)
class InFlight(RequestProgress):
    """One accepted request. ``sent`` events have gone to the client; ``held`` ones wait for credit, in order. What
    changes with every event is RequestProgress's.

    accepted, started  monotonic seconds: of acceptance, and of the first time that a worker was given it
    cost               tokens of the prompt, estimated from its bytes
    window             events that may go to the client before it grants any
    resumes            how often it went on in another worker
    begun              number of the first event that is due from its present worker
    place              events that it had when a worker died while computing it, or a request just like it: this request
                       is a suspect. None for one that is not
    alone              one more death that is blamed on it makes it poisoned: it is on probation alone
    party              whose turn it is when its constraint is compiled, and who pays for that: its channel, or a number
                       that all connections of a key have
    parkings           how often a worker gave it back to compile its constraint
    compiler           (worker, generation) of the worker that does so, or keeps the constraint for it
    charged            whether its account has paid for its prompt
    advance            credit beyond the window, see ``advance``
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
    held: SendBuffer = field(repr=False)
    worker: str = ""
    started: float | None = None
    cancelled: bool = False
    resumes: int = 0
    begun: int = 0
    place: int | None = None
    advance: int = 0
    alone: bool = False
    party: int = 0
    parkings: int = 0
    compiler: tuple[str, int] | None = None
    charged: bool = False
    reported: int = -1
    """The queue position last reported."""

    def __post_init__(self, window: int) -> None:
        RequestProgress.__init__(self, window, self.route.resume)

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
        return self.phase is RequestPhase.HELD

    @property
    def next_seq(self) -> int:
        """The number of the event that is due from the worker."""
        return self.sent + len(self.held)

    @property
    def is_new(self) -> bool:
        """Whether its present worker may still be reading its prompt, or has only just begun to answer."""
        return self.next_seq < self.begun + PROBATION

    @property
    def on_probation(self) -> bool:
        """Whether a death now would be blamed on this suspect: it is new to its worker, or where it was at a death."""
        place = self.place
        return place is not None and (self.is_new or place - PROBATION <= self.next_seq < place + PROBATION)

    @property
    def has_passed(self) -> bool:
        """Whether the request is under no suspicion, or has passed its probation in its present worker for good."""
        return self.place is None or self.next_seq >= max(self.begun, self.place) + PROBATION
