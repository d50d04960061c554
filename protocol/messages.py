"""The wire contract. Other modules import messages, kinds and flags from here.

One ZeroMQ frame holds one message. The frame is one msgpack array ``[version, kind, fields..., body]``. The supervisor
reads the fields and passes the body on. A body is a ``bin`` that holds msgpack in turn. Only the two ends decode it.

    client → supervisor                                     supervisor → client
    HELLO     [1,  1, body{library}]                        WELCOME  [1, 16, body{server, session, window, ...}]
    GENERATE  [1,  2, request, model, route{}, body{}]      ACCEPTED [1, 17, request, body{model, queue_position}]
    CANCEL    [1,  3, request]                              EVENTS   [1, 18, channel, generation, index, body]
    CREDIT    [1,  4, request, events]                      ERROR    [1, 19, request, body{code, name, message, ...}]
    CALL      [1,  5, call, verb, body{}]                   REPLY    [1, 20, call, body{result} or body{error}]
    PING      [1,  6, nonce]                                PONG     [1,  7, nonce]
    PONG      [1,  7, nonce]                                PING     [1,  6, nonce]
    EMBED     [1,  8, as GENERATE]
    RERANK    [1,  9, as GENERATE]
                                                            GOAWAY   [1, 22, body{reason}]
                                                            REPORT   [1, 23, request, body{phase, ...}]
    supervisor → worker                                     worker → supervisor
    JOB        [1, 32, channel, request, carry{}, body]     HELLO    [1,  1, body{pid, build}]
    CANCEL_JOB [1, 33, channel, request]                    READY    [1, 34, body{context, max_jobs, ...}]
    SHUTDOWN   [1, 35]                                      PROGRESS [1, 36, body{phase, done, total, unit}]
    ASK        [1, 39, ask, verb, body]                     STATS    [1, 37, body{}]
    SLEEP      [1, 43]                                      SLEPT    [1, 45, body{refused, seconds, host_bytes}]
    WAKE       [1, 44]                                      WOKE     [1, 46, body{seconds, host_bytes}]
                                                            PREFILL  [1, 38, channel, request, done, total]
                                                            ANSWER   [1, 40, ask, body{result} or body{error}]
                                                            PARKED   [1, 41, channel, request]
                                                            COMPILED [1, 42, channel, request, party, milliseconds]
                                                            EVENTS   as above; the supervisor forwards it whole

``protocol.messages`` has the number of each kind. The class of a kind in ``protocol.messages``,
``protocol.messages`` or ``protocol.messages`` has the fields, the direction and the largest size. A message, an
element or a key is described at its definition only. docs/wire-protocol.md is for people who write a client. Its tables
are generated from these classes, from ``protocol.bodies`` (the maps in the bodies), ``protocol.request`` (the body of
GENERATE), ``protocol.errors`` and ``protocol.limits``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Flag, IntEnum, IntFlag, auto
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast, dataclass_transform

# The kinds of messages, and the decorator that registers a class for a kind.
#
# Other modules import ``Kind`` and ``Message`` from ``protocol.messages``.


VERSION: Final = 1
"""Major version of the protocol, first element of every frame."""


class Kind(IntEnum):
    """The second element of every frame."""

    HELLO = 1
    GENERATE = 2
    CANCEL = 3
    CREDIT = 4
    CALL = 5
    PING = 6
    PONG = 7
    EMBED = 8
    RERANK = 9
    WELCOME = 16
    ACCEPTED = 17
    EVENTS = 18
    ERROR = 19
    REPLY = 20
    GOAWAY = 22
    REPORT = 23
    JOB = 32
    CANCEL_JOB = 33
    READY = 34
    SHUTDOWN = 35
    PROGRESS = 36
    STATS = 37
    PREFILL = 38
    ASK = 39
    ANSWER = 40
    PARKED = 41
    COMPILED = 42
    SLEEP = 43
    WAKE = 44
    SLEPT = 45
    WOKE = 46
    LOG_STYLE = 47


KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Way(Flag):
    """The direction of a message."""

    CLIENT_TO_SUPERVISOR = auto()
    SUPERVISOR_TO_CLIENT = auto()
    SUPERVISOR_TO_WORKER = auto()
    WORKER_TO_SUPERVISOR = auto()


class Message:
    """A message of any kind. The fields of a subclass are the elements of the frame after the kind, in the same order.

    kind     the second element of the frame
    ways     the directions in which a message of this kind may go
    largest  most bytes of a frame of this kind. The receiver refuses a larger frame
    """

    __slots__ = ()
    kind: ClassVar[Kind]
    ways: ClassVar[Way]
    largest: ClassVar[int]


MESSAGE_CLASSES: Final[dict[Kind, type[Message]]] = {}
"""The class of each kind. The decorator ``message`` fills it in."""
_M = TypeVar("_M", bound=Message)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(kind: Kind, ways: Way, *, largest: int, frozen: bool = True) -> Callable[[type[_M]], type[_M]]:
    """Register a class as the message of a kind, and make it a dataclass. See ``Message`` for the arguments.

    frozen  a frozen instance takes three times as long to make. EVENTS is not frozen: there is one for every token
    """

    def register(cls: type[_M]) -> type[_M]:
        cls.kind, cls.ways, cls.largest = kind, ways, largest
        made = dataclass(frozen=frozen, slots=True)(cls)
        MESSAGE_CLASSES[kind] = made
        return made

    return register


# The messages between clients and the supervisor, except EVENTS. Import them from ``protocol.messages``.
#
# Bodies hold prompts and answers, which no log may show: so ``repr`` of a message leaves out its body.


@message(Kind.HELLO, Way.CLIENT_TO_SUPERVISOR | Way.WORKER_TO_SUPERVISOR, largest=16 * KIB)
class Hello(Message):
    """Begin the session. It is the first message of a connection and is sent once.

    GENERATE and CALL may follow without waiting for WELCOME. The supervisor refuses a second HELLO, and every message
    before HELLO. Over TCP, HELLO must come within 5 seconds.
    """

    body: bytes = field(repr=False)


@message(Kind.GENERATE, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)
class Generate(Message):
    """Ask a model for an answer.

    The supervisor answers with ACCEPTED, or refuses the request with an ERROR of its number. After ACCEPTED come
    events, of which exactly one, the last, is terminal. The worker reads the body, and reports what is wrong there in
    an error event.
    """

    verb: ClassVar[str] = ""
    request: int
    """The client's number for the request: 1 to 2^64 - 1, each once per connection."""
    model: str
    """A model, an alias, or a variant (`qwen:precise`), at most 256 characters. Empty: `default_model` of
    models.yaml."""
    route: dict[str, Any]
    """Options that the supervisor reads. The map may be empty."""
    body: bytes = field(repr=False)
    """The prompt and the options."""


@message(Kind.EMBED, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)
class Embed(Generate):
    """Ask a model for the vectors of texts.

    What is said of GENERATE holds for EMBED and RERANK, too: the elements, the answers, credit, deadlines, CANCEL and
    exactly one terminal event. Only the body is another one, and the events bring vectors in place of tokens.
    """

    verb: ClassVar[str] = "embed"


@message(Kind.RERANK, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)
class Rerank(Generate):
    """Ask a model how well documents answer a query. All else is as with EMBED. The vector of a document is its
    score, from 0 to 1 with most models."""

    verb: ClassVar[str] = "rerank"


@message(Kind.CANCEL, Way.CLIENT_TO_SUPERVISOR, largest=64)
class Cancel(Message):
    """End a request. Its terminal event still comes: FINISHED with `cancelled`, or another end that was faster. Held
    events come before it. Neither needs credit. The supervisor ignores unknown numbers and ended requests."""

    request: int


@message(Kind.CREDIT, Way.CLIENT_TO_SUPERVISOR, largest=64)
class Credit(Message):
    """Allow the supervisor to send more events of one request. An unknown number is ignored."""

    request: int
    events: int
    """The number of further events. `window` of WELCOME is the most that counts."""


@message(Kind.CALL, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)  # a text to tokenize
class Call(Message):
    """Send the supervisor a query or an order. It answers with exactly one REPLY of the same number.

    Every verb also takes the parameter ``on_behalf_of``, as the route of GENERATE does: the id of the HTTP key for
    which a gateway asks. The rights and models of that key then decide, not those of the connection.
    """

    call: int
    """The client's number for the call, as in GENERATE. REPLY repeats it."""
    verb: str
    """A verb, at most 256 characters."""
    body: bytes = field(repr=False)
    """The parameters, by name. Unknown names are refused."""


@message(Kind.PING, Way.CLIENT_TO_SUPERVISOR | Way.SUPERVISOR_TO_CLIENT, largest=64)
class Ping(Message):
    """Ask the other side for a PONG, at any time after HELLO."""

    nonce: int
    """Any number. PONG repeats it."""


@message(Kind.PONG, Way.CLIENT_TO_SUPERVISOR | Way.SUPERVISOR_TO_CLIENT, largest=64)
class Pong(Message):
    """Answer PING. The supervisor answers in order: what it sent before PONG arrives before PONG."""

    nonce: int
    """The number in PING."""


@message(Kind.WELCOME, Way.SUPERVISOR_TO_CLIENT, largest=MIB)
class Welcome(Message):
    """Answer HELLO. The session has begun."""

    body: bytes = field(repr=False)


@message(Kind.ACCEPTED, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Accepted(Message):
    """Answer GENERATE: the request will get exactly one terminal event. Its events and REPORTs come after ACCEPTED."""

    request: int
    body: bytes = field(repr=False)


@message(Kind.ERROR, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Error(Message):
    """Refuse a frame, or say why the connection ends.

    ERROR with a number refuses the GENERATE of that number, never a request that was accepted and has not ended. ERROR
    of request 0 with ``refused`` answers a frame that is neither a CALL nor a GENERATE with a free number, and ends no
    stream. Without ``refused`` the connection ends.
    """

    request: int
    """The number of the refused GENERATE, or 0."""
    body: bytes = field(repr=False)


@message(Kind.REPLY, Way.SUPERVISOR_TO_CLIENT, largest=3 * MIB)
class Reply(Message):
    """Answer CALL."""

    call: int
    body: bytes = field(repr=False)


@message(Kind.GOAWAY, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class GoAway(Message):
    """Say that the supervisor shuts down. Accepted requests still finish within the drain; new ones get `draining`.
    Then the connection ends."""

    body: bytes = field(repr=False)


@message(Kind.REPORT, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Report(Message):
    """Report the progress of a request until its first token, if the request has the option ``progress``.

    REPORT has no number in the sequence of events, and needs no credit. The supervisor may leave out superseded ones.
    """

    request: int
    body: bytes = field(repr=False)


# The messages between the supervisor and its workers, except EVENTS. Import them from ``protocol.messages``.
#
# The supervisor and its workers are always of the same version. ``channel`` is the supervisor's number for a client
# connection. ``request`` is the client's number for the request. Bodies hold prompts and answers, which no log may
# show: so ``repr`` of a message leaves out its body.


# 12 MiB: the body of a GENERATE, and the token ids of the answer so far.
@message(Kind.JOB, Way.SUPERVISOR_TO_WORKER, largest=12 * MIB)
class JobMessage(Message):
    """Give a request to a worker."""

    channel: int
    request: int
    carry: dict[str, Any]
    """Facts that the worker needs besides the request. A missing key means 0, none or false.

    seq        number of the next event
    token_ids  the tokens that an earlier worker has delivered (bin, u32 little endian). The supervisor keeps them
               without knowing what they mean
    resumes    how many times another worker has taken over the request
    queue_ms   milliseconds that the request has waited
    progress   bool: the client wants reports
    party      a number: the party whose turn a compilation takes, and that is charged for its processor time. It is
               the channel. Over TCP, all connections of one key have the same party
    stay       bool: the worker must not park the job again
    verb       "embed" or "rerank"; missing for GENERATE
    defaults   a packed map (bin) with the settings of the variant that the request names: ``sampling`` and
               ``template_kwargs``, for what the request leaves out
    """
    body: bytes = field(repr=False)


@message(Kind.CANCEL_JOB, Way.SUPERVISOR_TO_WORKER, largest=64)
class CancelJob(Message):
    """End a job that the worker has."""

    channel: int
    request: int


@message(Kind.SHUTDOWN, Way.SUPERVISOR_TO_WORKER, largest=64)
class Shutdown(Message):
    """End the worker's process."""


@message(Kind.SLEEP, Way.SUPERVISOR_TO_WORKER, largest=64)
class Sleep(Message):
    """Give the model's GPU memory back and keep its weights in host memory. The worker has no job, and gets none before
    it has said WOKE. It answers SLEPT."""


@message(Kind.WAKE, Way.SUPERVISOR_TO_WORKER, largest=64)
class Wake(Message):
    """Take the GPU memory again. The worker answers WOKE."""


@message(Kind.LOG_STYLE, Way.SUPERVISOR_TO_WORKER, largest=64)
class SetLogStyle(Message):
    """Write the log in another way from now on, see ``protocol.process.logs.LogStyle``."""

    level: str
    format: str


@message(Kind.SLEPT, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Slept(Message):
    """Say that the model sleeps, or why it cannot sleep."""

    body: bytes = field(repr=False)
    """refused: the reason why the model cannot sleep; empty if it sleeps. seconds: how long that took. host_bytes: the
    host memory that it takes."""


@message(Kind.WOKE, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Woke(Message):
    """Say that the model is awake and can generate."""

    body: bytes = field(repr=False)
    """seconds: how long that took. host_bytes: the host memory that the model still takes."""


@message(Kind.ASK, Way.SUPERVISOR_TO_WORKER, largest=3 * MIB + 64)
class Ask(Message):
    """Hand a client's CALL to a worker: ``tokenize`` {prompt | messages} or ``detokenize`` {token_ids}."""

    ask: int
    verb: str
    body: bytes = field(repr=False)


@message(Kind.ANSWER, Way.WORKER_TO_SUPERVISOR, largest=3 * MIB)
class AnswerMessage(Message):
    """Answer ASK."""

    ask: int
    body: bytes = field(repr=False)


@message(Kind.READY, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Ready(Message):
    """Say that the model is loaded and can generate."""

    body: bytes = field(repr=False)


@message(Kind.PROGRESS, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class ProgressMessage(Message):
    """Report the progress of the load."""

    body: bytes = field(repr=False)


@message(Kind.STATS, Way.WORKER_TO_SUPERVISOR, largest=64 * KIB)
class Stats(Message):
    """Report what the engine does and how much memory it uses."""

    body: bytes = field(repr=False)


@message(Kind.PREFILL, Way.WORKER_TO_SUPERVISOR, largest=64)
class Prefill(Message):
    """Report how many tokens of a request's prompt the engine has computed."""

    channel: int
    request: int
    done: int
    total: int


@message(Kind.PARKED, Way.WORKER_TO_SUPERVISOR, largest=64)
class Parked(Message):
    """Give a job back to the supervisor. The worker then compiles the job's constraint. Meanwhile the request holds no
    slot."""

    channel: int
    request: int


@message(Kind.COMPILED, Way.WORKER_TO_SUPERVISOR, largest=64)
class Compiled(Message):
    """Say that the supervisor may send a parked job again.

    The worker also sends COMPILED for a request that was cancelled meanwhile, if the compilation had begun.
    """

    channel: int
    request: int
    party: int
    """The ``party`` in the job's ``carry``."""
    milliseconds: int
    """Processor time that the compilation took."""


# The message EVENTS, the most frequent one: the events of one step of the engine, for one connection of a client.
#
# Bodies hold prompts and answers, which no log may show: so ``repr`` of a message leaves out its body.


class EventFlag(IntFlag):
    """The third element of an index entry."""

    FIRST = 1
    """The first event of its request that holds tokens."""
    FINISHED = 2
    """Terminal: the request ended as asked."""
    ERROR = 4
    """Terminal: the request ended with an error."""


TERMINAL = int(EventFlag.FINISHED | EventFlag.ERROR)
"""Both terminal flags. This is a plain integer, because testing flags against an IntFlag costs a call into Python."""


class FinishReason:
    """The values of ``finish_reason`` in a FINISHED event."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """max_tokens was reached."""
    BANNED = "banned_strings"
    """Every continuation that the model found leads to a banned string, or no token is left to draw."""
    LOOP = "loop"
    """The answer repeated itself for as many tokens as stop_on_loop says."""
    CANCELLED = "cancelled"
    """The client cancelled."""


class EventEntry(NamedTuple):
    """One entry of an EVENTS index."""

    request: int
    seq: int
    """The number of the event within the request, from 0, without a gap."""
    flags: int
    """Bits, see below."""
    tokens: int
    """The number of token ids at the beginning of the event's bytes."""
    length: int
    """The event's size in bytes: its ids, 4 bytes each, and its map."""


@message(Kind.EVENTS, Way.SUPERVISOR_TO_CLIENT | Way.WORKER_TO_SUPERVISOR, largest=3 * MIB, frozen=False)
class Events(Message):
    """Deliver the events of one step of the engine for this connection. They may belong to several requests.

    The body has the bytes of the events, in the order of the index. The bytes of one event are its token ids (u32,
    little endian) and then one msgpack map: that of FINISHED or ERROR with a terminal flag, else that of a delta.
    """

    channel: int
    """Ignore it: the supervisor's number for the connection."""
    generation: int
    """Ignore it: the number of the worker's process, 0 for a frame that the supervisor made. It may change within a
    request."""
    index: list[EventEntry]
    """One entry for each event. The lengths add up to that of the body."""
    body: bytes = field(repr=False)
    """The bytes of the events, no map."""


__all__ = [
    "ASKING",
    "CLIENT_TO_SUPERVISOR",
    "MESSAGE_CLASSES",
    "NUMBERED",
    "ON_BEHALF_OF",
    "ROUTE_KEYS",
    "SUPERVISOR_TO_CLIENT",
    "SUPERVISOR_TO_WORKER",
    "TERMINAL",
    "VERSION",
    "WORKER_TO_SUPERVISOR",
    "Accepted",
    "AnswerMessage",
    "Ask",
    "Call",
    "Cancel",
    "CancelJob",
    "Compiled",
    "Credit",
    "Embed",
    "Error",
    "EventEntry",
    "EventFlag",
    "Events",
    "FinishReason",
    "Generate",
    "GoAway",
    "Hello",
    "JobMessage",
    "Kind",
    "Message",
    "Parked",
    "Ping",
    "Pong",
    "Prefill",
    "ProgressMessage",
    "Ready",
    "Reply",
    "Report",
    "Rerank",
    "SetLogStyle",
    "Shutdown",
    "Sleep",
    "Slept",
    "Stats",
    "Wake",
    "Welcome",
    "Woke",
]

ROUTE_KEYS: Final[tuple[str, ...]] = (
    "resume",
    "priority",
    "queue_ms",
    "ttft_ms",
    "deadline_ms",
    "affinity",
    "progress",
    "keep_alive",
    "ttl",
    "on_behalf_of",
    "trace_ids",
    "notes",
)
"""Keys of ``route``, in GENERATE."""

ON_BEHALF_OF: Final = "on_behalf_of"
"""A key of ``route``, and a parameter of every verb of CALL: the id of the HTTP key for which a gateway asks."""


def _kinds(way: Way) -> frozenset[Kind]:
    return frozenset(kind for kind, message in MESSAGE_CLASSES.items() if way in message.ways)


CLIENT_TO_SUPERVISOR: Final = _kinds(Way.CLIENT_TO_SUPERVISOR)
SUPERVISOR_TO_CLIENT: Final = _kinds(Way.SUPERVISOR_TO_CLIENT)
SUPERVISOR_TO_WORKER: Final = _kinds(Way.SUPERVISOR_TO_WORKER)
WORKER_TO_SUPERVISOR: Final = _kinds(Way.WORKER_TO_SUPERVISOR)

ASKING: Final = frozenset(kind for kind, message in MESSAGE_CLASSES.items() if issubclass(message, Generate))
"""Kinds of messages that make a request."""

NUMBERED: Final = frozenset(
    kind
    for kind, message in MESSAGE_CLASSES.items()
    if next((str(field.name) for field in fields(cast(Any, message))), "") in ("request", "call")
)
"""Kinds whose third element is the client's number of a request or of a call."""
