"""The record of one accepted request, the account that pays for it, and the effects of scheduling: plain data."""

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal

from protocol.codec import encode, pack_error, pack_reply
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import ASKING, Error, Kind, Message, Reply
from protocol.process.compiled import find
from protocol.process.shown import masked_values
from protocol.values import Length, ReadWith, Then, Unfit, Within, hints_of, read, reader
from supervisor.config.spelling import seconds_of, spelled, spelled_name
from supervisor.keys.rights import OWNER, TOKEN_ID, TOKEN_ID_RULE, Identity
from supervisor.requests.counters import Counters
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.stories import MOST_STEPS, NOT_ENDED, RequestEnd, RequestRecord, TimedStep

# The fields of a request that change with every event.
#
# If the compiled module can be used (see ``protocol.process.compiled``), the class is ``fast_path.RequestProgress``.
# Its fields are C's own, and ``fast_path`` reads and writes them without Python.
#
# phase             where the request is
# resumable         whether another worker may go on with it. Only then ``ids`` are kept
# credit            events that may go to the client before it grants more
# sent              events that have gone to the client
# delivered_tokens  tokens in those events
# unpaid            tokens that the client's account has not been charged for yet
# has_tokens        whether any token has come
# first_token       when the first token came, in monotonic seconds; 0 before it
# holds             whether events wait for the client's credit. Read for every event
# ids               token ids of the answer so far, those of held events included (u32, little endian)
# counters          the numbers of the ledger to which tokens are added as they go to the client, see
#                   ``counters``. None: nobody counts. Set by ``count_in``


class PlainRequestProgress:
    __slots__ = (
        *("counters", "credit", "delivered_tokens", "has_tokens", "holds", "ids", "phase", "resumable", "sent"),
        *("first_token", "unpaid"),
    )

    def __init__(self, credit: int, resumable: bool) -> None:
        self.phase, self.ids, self.credit, self.resumable = RequestPhase.WAITING, bytearray(), credit, resumable
        self.sent = self.delivered_tokens = self.unpaid = 0
        self.has_tokens = self.holds = False
        self.first_token = 0.0
        self.counters: Counters | None = None

    def count_in(self, counters: Counters) -> None:
        self.counters = counters


if TYPE_CHECKING:
    from supervisor.requests.fast_path import RequestProgress as RequestProgress
else:
    compiled = find("supervisor.requests.fast_path")
    RequestProgress = PlainRequestProgress if compiled is None else compiled.RequestProgress


# Check the ``route`` of a GENERATE: the part of a request that the supervisor itself reads. Pure.


MAX_MS = 86_400_000
"""One day. No client waits for longer."""
MAX_AFFINITY = 256
MOST_TRACE_IDS = 4
MAX_TRACE_ID = 128
MOST_NOTES = 32
MAX_NOTE = 256
MAX_STAY_S = 366 * 86_400
"""One year. For a longer time a client asks for ever, with a negative number."""


def _of(hint: Any, rule: str) -> ReadWith:
    """Return the reader of values of a type, which are called ``rule`` in words. None is no such value."""
    check = reader(hint)

    def how(value: Any) -> Any:
        try:
            return check(value, False)
        except Unfit:
            raise ValueError(f"must be {rule}") from None

    return ReadWith(how, rule)


def _texts(most: int, longest: int) -> ReadWith:
    hint = Annotated[tuple[Annotated[str, Length(1, longest)], ...], Length(1, most)]
    return _of(hint, f"a list of 1 to {most} strings of 1 to {longest} characters each")


def _token_id(token_id: str) -> str:
    if not TOKEN_ID.fullmatch(token_id):
        raise ValueError(TOKEN_ID_RULE)
    return token_id


def _stay(keep_alive: Any) -> float:
    """Return the seconds that a value of ``keep_alive`` means, infinity for ever. Raises ValueError."""
    seconds = keep_alive if type(keep_alive) in (int, float) else None
    if type(keep_alive) is str:
        positive = keep_alive.removeprefix("-")
        seconds = 0 if positive == "0" else seconds_of(positive, several=True)
        seconds = -seconds if seconds is not None and positive != keep_alive else seconds
    if seconds is None or not seconds <= MAX_STAY_S:
        raise ValueError("is no time")
    return math.inf if seconds < 0 else float(seconds)


_BOOL = _of(bool, "true or false")
_MS = _of(Annotated[int, Within(1, MAX_MS)], f"milliseconds, an integer from 1 to {MAX_MS}")
_STAY = f"seconds up to {MAX_STAY_S}, or a duration such as 5m; 0: at once, negative: never"
_TTL = _of(Annotated[int, Within(1, MAX_STAY_S)], f"seconds, an integer from 1 to {MAX_STAY_S}")
_PRIORITY = _of(Literal["interactive", "normal", "batch"], "one of interactive, normal, batch")
_AFFINITY = _of(Annotated[str, Length(1, MAX_AFFINITY)], f"a string of 1 to {MAX_AFFINITY} characters")


@dataclass(frozen=True, slots=True)
class Route:
    """The keys of ``route``, in GENERATE, as ``protocol.bodies.RouteKeys`` describes them. None is no limit.

    keep_alive  seconds, infinity for ever
    """

    resume: Annotated[bool, _BOOL] = True
    priority: Annotated[str, _PRIORITY] = "normal"
    queue_ms: Annotated[int | None, _MS] = None
    ttft_ms: Annotated[int | None, _MS] = None
    deadline_ms: Annotated[int | None, _MS] = None
    affinity: Annotated[str | None, _AFFINITY] = None
    progress: Annotated[bool, _BOOL] = False
    keep_alive: Annotated[float | None, _of(Annotated[Any, Then(_stay)], _STAY)] = None
    ttl: Annotated[int | None, _TTL] = None
    on_behalf_of: Annotated[str | None, _of(Annotated[str, Then(_token_id)], TOKEN_ID_RULE)] = None
    trace_ids: Annotated[tuple[str, ...], _texts(MOST_TRACE_IDS, MAX_TRACE_ID)] = ()
    notes: Annotated[tuple[str, ...], _texts(MOST_NOTES, MAX_NOTE)] = ()


_EMPTY = Route()


def read_route(given: dict[str, Any]) -> Route:
    """Return the route that a client has given. Raises RequestError, which names the key, its value and the allowed
    values."""
    if not given:
        return _EMPTY
    try:
        route = read(Route, given)
    except Unfit as e:
        key, value, problem = e.flaws[0].path[0], e.flaws[0].value, e.flaws[0].problem
        if isinstance(problem, str):
            raise RequestError(f"{key} is {spelled(value)}: {problem}", field=f"route.{key}") from None
        known = ", ".join(hints_of(Route))
        message = f"unknown routing key {spelled_name(key)}: known are {known}; all else stands in the body"
        raise RequestError(message, field=f"route.{key[:64]}" if isinstance(key, str) else "route") from None
    if "keep_alive" in given and "ttl" in given:
        raise RequestError("ttl says what keep_alive says: leave out one of them", field="route.ttl")
    return route


def stay_of(given: dict[str, Any]) -> tuple[float, str] | None:
    """Return how long a client wants its model to stay loaded, and the key of the route that says so. None: unset.

    The time is in seconds without a request. Infinity means for ever. Raises RequestError as ``read_route`` does.
    """
    for key in ("keep_alive", "ttl"):
        if key in given:
            return float(getattr(read_route(given), key)), key
    return None


# Hold the events of a stream that wait for credit, as joined bytes and three numbers for each event. Pure.


EVENT_COST = 12
"""Bytes of memory that a held event takes beside its own bytes."""
_FIELDS = 3


class SendBuffer:
    """A queue of the events of one stream. Their sequence numbers are consecutive, so they are not kept.

    A deque of (entry, bytes) would take 250 bytes for each event: six times the event of a token itself.
    """

    __slots__ = ("_at", "_body", "_bytes_at", "_numbers")

    def __init__(self) -> None:
        self._numbers = array("I")  # (flags, tokens, length) of each event
        self._body = bytearray()
        self._at = 0  # numbers before this one have been taken out,
        self._bytes_at = 0  # and bytes before this one

    def __len__(self) -> int:
        return (len(self._numbers) - self._at) // _FIELDS

    @property
    def cost(self) -> int:
        """Return the bytes that the queue takes."""
        return len(self._body) - self._bytes_at + EVENT_COST * len(self)

    def add(self, flags: int, tokens: int, event: bytes) -> None:
        self._numbers.extend((flags, tokens, len(event)))
        self._body += event

    def take(self, count: int) -> tuple[list[tuple[int, int, int]], bytes]:
        """Remove the first ``count`` events. Return (flags, tokens, length) of each, and their bytes joined."""
        entries = list(self._triples(count))
        size = sum(length for _, _, length in entries)
        body = bytes(memoryview(self._body)[self._bytes_at : self._bytes_at + size])
        self._at += _FIELDS * count
        self._bytes_at += size
        if 2 * self._at >= len(self._numbers):  # so at most one byte is moved for each byte that was taken
            del self._numbers[: self._at], self._body[: self._bytes_at]
            self._at = self._bytes_at = 0
        return entries, body

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _triples(self, count: int) -> Iterator[tuple[int, int, int]]:
        numbers = self._numbers
        for at in range(self._at, self._at + _FIELDS * count, _FIELDS):
            yield numbers[at], numbers[at + 1], numbers[at + 2]


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
class LoadForRequests:
    """Effect: requests wait for a model, and one of its unloaded workers has to be loaded for them."""

    model: str


Effect = ToClient | ToWorker | LoadForRequests
Awaited = tuple[tuple[str, int], ...]
"""The models that have to make room before another one can be loaded, each with the number of its requests that run."""


MOST_EMPTY = 64
"""Accounts without waiting requests that may always stay in the heap of a priority."""


@dataclass(slots=True, eq=False)
class Band:
    """One priority.

    served   tokens that were computed for it, divided by its weight
    clock    ``served`` of the account that was chosen last
    waiting  requests that wait
    """

    weight: int
    served: float = 0.0
    clock: float = 0
    waiting: int = 0
    accounts: dict[int, "Account"] = field(default_factory=dict)
    heap: list[tuple[float, int, "Account"]] = field(default_factory=list)
    """(served, tie, account) of the accounts with requests waiting, and of some whose requests were all cancelled.
    ``served`` may be outdated: then it is too low."""

    def compact(self) -> None:
        """Remove accounts without waiting requests from the heap, if most of it may be such accounts.

        Otherwise they would stay until they are first in the heap. A place in the queue takes time for each of them.
        """
        if len(self.heap) <= MOST_EMPTY + 2 * self.waiting:
            return
        for _, _, account in self.heap:
            account.in_heap = bool(account.requests)
        self.heap = [entry for entry in self.heap if entry[2].in_heap]
        heapq.heapify(self.heap)


@dataclass(slots=True, eq=False)
class Account:
    """One client within one priority. ``served``: tokens that were computed for it."""

    band: Band
    served: float = 0
    requests: list["InFlight"] = field(default_factory=list)
    """The requests that wait, in order. A list, because most accounts have none, and an empty deque takes 600 bytes."""
    in_heap: bool = False

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for this client."""
        self.served += tokens
        # A new client begins at the share of the clients that wait. Otherwise a stream of new clients could keep those
        # waiting for ever.
        self.band.clock += tokens / max(1, len(self.band.heap))
        self.band.served += tokens / self.band.weight


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
    verb               of the message that made it, see ``Generate``
    defaults           a packed map: the settings of the variant that it asked for. The worker gets it with the job
    usage_place        the place of its counters in the table, 0 if nobody counts
    prompt_tokens      the length of its prompt; None until a worker has reported it
    paid               tokens of the answer that its account has paid for
    advance            credit beyond the window, see ``credit``
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
    verb: str = ""
    defaults: bytes = field(default=b"", repr=False)
    usage_place: int = 0
    prompt_tokens: int | None = None
    end: RequestEnd = NOT_ENDED
    steps: list[TimedStep] = field(default_factory=list, repr=False)
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
            self.steps.append(TimedStep(now, step, facts))

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


# The queue between the classes that decide and the loop that acts. Pure.
#
# The scheduler, the life cycle, turnovers and the keys' rights decide what has to be done, and add it here as effects.
# Nothing happens at that moment. When the handler of a message, an exit or a timer has returned, the loop takes all
# effects out. It carries them out in the order in which they were decided (``supervisor.loop``).


@dataclass(frozen=True, slots=True)
class EndConnection:
    """Effect: tell a client why its connection ends, and end it. Effects that came before reach the client first."""

    channel: int
    error: WireError


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """Effect: the state of a worker has changed, so a turnover may be able to go on."""


QueuedEffect = Effect | EndConnection | WorkerChanged


class EffectQueue(deque[QueuedEffect]):
    """The effects that have yet to be carried out, in the order in which they were decided. Only the loop's
    EffectRunner takes them out."""


# Make the message that answers a refused frame. Pure. ``protocol.messages`` (ERROR) states the rule.


def refusal(error: WireError, kind: Kind | None, number: int, *, runs: bool) -> Error | Reply:
    """Return the message that answers a refused frame.

    A client ends the request that an ERROR names. So only a message that makes a request is answered by an ERROR with
    its number, and only while no accepted request has that number.

    kind, number  of the refused frame, see ``codec.named``
    runs          whether a request of this connection with that number was accepted and has not ended
    """
    if kind is Kind.CALL and number:
        return Reply(number, pack_reply({"error": masked_values(error.to_wire())}))
    if kind in ASKING and number and not runs:
        return Error(number, pack_error(error))
    refused = {} if kind is None else {"kind": int(kind), **({"number": number} if number else {})}
    return Error(0, pack_reply({**masked_values(error.to_wire()), "refused": refused}))


def number_of(message: Message) -> int:
    """Return the number of the request or call that a client's message names, 0 if it names none."""
    number: int = getattr(message, "request", getattr(message, "call", 0))
    return number


# Make short digests of long byte strings, which only have to be recognized again. Pure.


try:
    # hashlib has the same function, but also loads OpenSSL. That takes 3.5 MB and 12 ms, and nothing here needs it.
    from _blake2 import blake2b
except ImportError:  # this Python was built without the module
    from hashlib import blake2b


def digest(content: bytes, key: bytes = b"") -> bytes:
    """Return the digest of ``content``, 16 bytes. Another ``key`` (at most 64 bytes) makes another digest."""
    return blake2b(content, digest_size=16, key=key).digest()


# Remember which client asked a worker a question (tokenize, detokenize), until the worker has answered. Pure.


MOST = 256
"""The most questions that a worker may have to answer at once."""
MOST_OF_PARTY = 32
"""The most questions of one client that a worker may have to answer at once."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The client that has asked.

    channel  the number of its connection
    call     the number that it gave the call
    party    its party, as in ``InFlight``: its channel, or the number of a key
    """

    channel: int
    call: int
    party: int

    def reply(self, body: bytes) -> ToClient:
        """Return the effect that sends the client its answer."""
        return ToClient(self.channel, encode(Reply(self.call, body)))


class PendingQueries:
    """The questions that workers have yet to answer."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: dict[str, dict[int, Asker]] = {}

    def begin(self, worker: str, asker: Asker) -> int:
        """Note a question and return its number. Raises WireError (OVERLOADED) if too many are open."""
        asked = self._open.setdefault(worker, {})
        own = sum(other.party == asker.party for other in asked.values())
        if len(asked) >= MOST or own >= MOST_OF_PARTY:
            message = (
                f"{worker} has {len(asked)} questions to answer (at most {MOST}), {own} of this client (at most "
                f"{MOST_OF_PARTY}): try later"
            )
            raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=100)
        number = next(self._ids)
        asked[number] = asker
        return number

    def answered(self, worker: str, number: int) -> Asker | None:
        """Take note of an answer. Return the client that asked, or None if no client waits for this answer."""
        return self._open.get(worker, {}).pop(number, None)

    def worker_gone(self, worker: str) -> list[Asker]:
        """Forget the questions that a dead worker cannot answer. Return the clients that asked them."""
        return list(self._open.pop(worker, {}).values())
