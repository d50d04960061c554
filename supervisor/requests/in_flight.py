"""The record of one accepted request, and the effects of scheduling: plain data."""

from dataclasses import InitVar, dataclass, field

from supervisor.keys.rights import OWNER, Identity
from supervisor.requests.fair_queue import Account
from supervisor.requests.request_progress import RequestProgress
from supervisor.requests.route import Route
from supervisor.requests.send_buffer import SendBuffer
from supervisor.requests.stories import MOST_STEPS, NOT_ENDED, RequestEnd, RequestRecord, Step

PROBATION = 4
"""Events after which a request has shown that it did not kill its worker. The supervisor may have seen fewer events
than the dead worker had computed. The step in which the worker died brought none. On a GPU the next step may have been
queued already. The events of the last step or two may have been lost on their way out of the process. A step brings at
most one event of a request, however many tokens are in it (with speculation there are several)."""


@dataclass(slots=True)  # not frozen: a frozen one takes three times as long to make, and every token needs one
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
    """Effect: requests wait for a model, and one of its unloaded workers has to be loaded for them."""

    model: str


Effect = ToClient | ToWorker | Wake
Awaited = tuple[tuple[str, int], ...]
"""The models that have to make room before another one can be loaded, each with the number of its requests that run."""


@dataclass(slots=True, eq=False)
class InFlight(RequestProgress):
    """One accepted request. RequestProgress has the fields that change with every event.

    channel, request   the client's connection, and the number that the client gave the request
    cost               tokens of the prompt, estimated from its bytes
    account            the party's account in the fair queue
    party              the client that takes a turn with this request, in the queue and when its constraint is compiled,
                       and that is charged for it: its channel, or a number that all requests of a key share
    accepted, started  monotonic seconds: when the request was accepted, and when a worker was first given it
    window             events that may go to the client before it grants any credit
    held               events that wait for credit, in order
    worker             the name of the worker that has it, or had it last
    cancelled          whether its client has cancelled it
    resumes            how often it went on in another worker
    begun              number of the first event that is expected from its present worker
    place              for a suspect: how many events it had when a worker died while computing it, or while computing a
                       request with the same payload. None for a request under no suspicion
    alone              whether one more death that is blamed on it makes it poisoned: then it is on probation alone
    parkings           how often a worker gave it back to compile its constraint
    compiler           (worker, generation) of the worker that compiles its constraint, or keeps the compiled one
    charged            whether its account has paid for its prompt
    owner              the identity that asked for it
    defaults           a packed map: the settings of the variant that it asked for. The worker gets it with the job
    usage_place        the place of its counters in the table, 0 if nobody counts
    prompt_tokens      the length of its prompt; None until a worker has reported it
    paid               tokens of the answer that its account has paid for
    advance            credit beyond the window, see ``advance.py``
    steps              what has happened to it, see ``stories.py``
    end                how its worker has ended it, once that is so
    """

    channel: int
    request: int
    model: str
    route: Route
    body: bytes = field(repr=False)  # a fault of the supervisor is logged with the request, but never with its prompt
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
    paid: int = 0
    parkings: int = 0
    compiler: tuple[str, int] | None = None
    charged: bool = False
    owner: Identity = OWNER
    defaults: bytes = field(default=b"", repr=False)
    usage_place: int = 0
    prompt_tokens: int | None = None
    end: RequestEnd = NOT_ENDED
    steps: list[Step] = field(default_factory=list, repr=False)
    reported: int = -1
    """The queue position last reported."""
    told: str = ""
    """What its client was told last of the models that have to make room."""

    def __post_init__(self, window: int) -> None:
        RequestProgress.__init__(self, window, self.route.resume)

    @property
    def key(self) -> tuple[int, int]:
        return self.channel, self.request

    @property
    def id(self) -> str:
        """The text by which the verbs name the request. No other request of this supervisor ever has the same text."""
        return f"{self.channel}-{self.request}"

    def note(self, now: float, step: str, **facts: object) -> None:
        """Note a step of the request's story."""
        if len(self.steps) < MOST_STEPS:
            self.steps.append(Step(now, step, facts))

    def record(self, end: RequestEnd = NOT_ENDED, ended: float | None = None) -> RequestRecord:
        """Return the facts of the request: those so far, or all of them if it has ended.

        end    how it ended. That need not be how its worker has ended it
        ended  when it ended, in monotonic seconds; None if it has not
        """
        tokens = self.delivered_tokens if end.completion_tokens is None else end.completion_tokens
        return RequestRecord(
            self.id, self.route.trace_ids, self.model, self.owner, self.route.priority, self.prompt_tokens, self.cost,
            tokens, self.resumes, self.accepted, self.started, self.first_token, tuple(self.steps), self.route.notes,
            end, ended,
        )  # fmt: skip

    def settle(self) -> None:
        """Charge the account for the tokens that it has not been charged for yet."""
        if self.unpaid:
            self.account.charge(self.unpaid)
            self.paid += self.unpaid
            self.unpaid = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the answer that workers have sent so far, held ones included."""
        return self.paid + self.unpaid

    @property
    def next_seq(self) -> int:
        """Return the number of the next event that is expected from the worker."""
        return self.sent + len(self.held)

    @property
    def is_new(self) -> bool:
        """Return whether its present worker may still be reading the prompt, or has only just begun to answer."""
        return self.next_seq < self.begun + PROBATION

    @property
    def on_probation(self) -> bool:
        """Return whether a death now would be blamed on this suspect: it is new to its worker, or near its place."""
        place = self.place
        return place is not None and (self.is_new or place - PROBATION <= self.next_seq < place + PROBATION)

    @property
    def has_passed(self) -> bool:
        """Return whether the request is under no suspicion, or has passed its probation in its present worker."""
        return self.place is None or self.next_seq >= max(self.begun, self.place) + PROBATION
