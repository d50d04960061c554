"""The wire contract, written once. Everything else about the wire follows from this file, so all messages stand in it,
although it is long.

One ZeroMQ frame per message; the frame is one msgpack array ``[version, kind, fields..., body]``. Fields are routing
data that the supervisor reads; a body is a ``bin`` that holds msgpack in turn and is decoded at the ends only.

    client → supervisor                                     supervisor → client
    HELLO     [1,  1, body{library}]                        WELCOME  [1, 16, body{server, session, window, ...}]
    GENERATE  [1,  2, request, model, route{}, body{}]      ACCEPTED [1, 17, request, body{model, queue_position}]
    CANCEL    [1,  3, request]                              EVENTS   [1, 18, channel, generation, index, body]
    CREDIT    [1,  4, request, events]                      ERROR    [1, 19, request, body{code, name, message, ...}]
    CALL      [1,  5, call, verb, body{}]                   REPLY    [1, 20, call, body{result} or body{error}]
    PING      [1,  6, nonce]                                PONG     [1,  7, nonce]
    PONG      [1,  7, nonce]                                PING     [1,  6, nonce]
                                                            GOAWAY   [1, 22, body{reason}]
                                                            REPORT   [1, 23, request, body{phase, ...}]
    supervisor → worker                                     worker → supervisor
    JOB        [1, 32, channel, request, carry{}, body]     HELLO    [1,  1, body{pid, build}]
    CANCEL_JOB [1, 33, channel, request]                    READY    [1, 34, body{context, max_jobs, ...}]
    SHUTDOWN   [1, 35]                                      PROGRESS [1, 36, body{phase, done, total}]
    ASK        [1, 39, ask, verb, body]                     STATS    [1, 37, body{}]
                                                            PREFILL  [1, 38, channel, request, done, total]
                                                            ANSWER   [1, 40, ask, body{result} or body{error}]
                                                            PARKED   [1, 41, channel, request]
                                                            COMPILED [1, 42, channel, request, party, milliseconds]
                                                            EVENTS   as above; the supervisor forwards it whole

docs/wire-protocol.md is the protocol between clients and the supervisor, for people who write a client. Its tables are
generated from the classes below, from ``protocol.bodies`` (the maps in the bodies), ``protocol.request`` (the body of
GENERATE), ``protocol.errors`` and ``protocol.limits``. A description of a message, an element or a key stands at its
definition only.

Between the supervisor and its workers, which are always of the same version:

* ``channel`` is the supervisor's number for a client connection, ``request`` the client's number for the request.
* ``carry`` of JOB is what a former worker left of the answer: ``seq`` (number of the next event), ``token_ids`` (those
  that were delivered: bin, u32 little endian), ``resumes`` (how often it went on), ``queue_ms``, ``progress`` (bool).
  Unset are 0, none, 0, 0 and false.
* PARKED gives a job back: the worker compiles its constraint first, and meanwhile the request holds no slot. COMPILED
  says that the job may be sent again, and what processor time the constraint took. It comes, too, for a request that
  was cancelled meanwhile, unless the compilation had not begun.
* ``party`` in ``carry`` is whose turn a compilation takes and who pays for it: the channel, or over TCP a number that
  all connections of one key have. ``stay`` (bool) says that the job must not be parked again.
* ASK hands a client's CALL to a worker: verbs ``tokenize`` {prompt | messages} and ``detokenize`` {token_ids}.
* The supervisor keeps the token ids of an event for resuming, without knowing what they mean: it reads the index only.
"""

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, ClassVar, NamedTuple

VERSION = 1
"""Major version of the protocol, first element of every frame."""


class Kind(IntEnum):
    """Second element of every frame."""

    HELLO = 1
    GENERATE = 2
    CANCEL = 3
    CREDIT = 4
    CALL = 5
    PING = 6
    PONG = 7
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


class EventFlag(IntFlag):
    """Third element of an index entry."""

    FIRST = 1
    """The first event of its request that holds tokens."""
    FINISHED = 2
    """Terminal: the request ended as asked."""
    ERROR = 4
    """Terminal: the request ended with an error."""


QUESTION_VERBS = frozenset({"tokenize", "detokenize"})
"""Verbs of CALL that a worker answers, see ``protocol.questions``. Named here for the supervisor, which would start
more slowly if it imported what checks them."""

ROUTE_KEYS = ("resume", "priority", "queue_ms", "ttft_ms", "deadline_ms", "affinity", "progress")
"""Keys of ``route``, in GENERATE."""

TERMINAL = int(EventFlag.FINISHED | EventFlag.ERROR)
"""Both terminal flags. A plain integer: with an IntFlag, looking at an event's flags costs a call into Python."""


class FinishReason:
    """Values of ``finish_reason`` in a FINISHED event."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """max_tokens was reached."""
    BANNED = "banned_strings"
    """Every way on that the model found leads to a banned string, or no token is left to draw: the answer so far."""
    CANCELLED = "cancelled"
    """The client cancelled."""


class EventEntry(NamedTuple):
    """One entry of an EVENTS index."""

    request: int
    seq: int
    """The event's number within the request: 0, 1, 2 and so on, without a gap."""
    flags: int
    """Bits, see below."""
    tokens: int
    """Token ids with which the event's bytes begin."""
    length: int
    """Bytes of the event: its ids, 4 bytes each, and its map."""


# Bodies hold prompts and answers: what is logged about a message must not show them.


@dataclass(frozen=True, slots=True)
class Hello:
    """Begin the session. It is the first message of a connection and is sent once.

    GENERATE and CALL may follow without waiting for WELCOME. The supervisor refuses a second HELLO, and every other
    message that comes before a HELLO that it has taken. Over TCP, HELLO must come within 5 seconds.
    """

    kind: ClassVar[Kind] = Kind.HELLO
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Generate:
    """Ask a model for an answer.

    The supervisor answers with ERROR of this number, and no request came to be, or with ACCEPTED. After ACCEPTED come
    EVENTS, of which exactly one is terminal. The supervisor reads all elements but the body. The worker reads the body,
    so what is wrong in the body is told by an error event after ACCEPTED.
    """

    kind: ClassVar[Kind] = Kind.GENERATE
    request: int
    """The client's number for the request: 1 to 2^64 - 1. Use each number once per connection."""
    model: str
    """The model's name, at most 256 characters."""
    route: dict[str, Any]
    """What the supervisor itself reads. Every key is optional. It may be empty, and must be there."""
    body: bytes = field(repr=False)
    """The prompt and the options."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request. Its terminal event still comes: FINISHED with the finish_reason `cancelled`, or another end that
    was faster.

    Events that were held for want of credit come before the terminal event, and need no credit any more. CANCEL of a
    number that is unknown, or of a request that has ended, is ignored: repeating it does nothing.
    """

    kind: ClassVar[Kind] = Kind.CANCEL
    request: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Allow the supervisor to send more events of one request. CREDIT of a number that is unknown is ignored."""

    kind: ClassVar[Kind] = Kind.CREDIT
    request: int
    events: int
    """How many events more. What goes beyond `window` of WELCOME is not counted."""


@dataclass(frozen=True, slots=True)
class Call:
    """Ask the supervisor something, or give it an order. It is answered by exactly one REPLY with the same number."""

    kind: ClassVar[Kind] = Kind.CALL
    call: int
    """The client's number for the call: 1 to 2^64 - 1. The supervisor copies it into REPLY. Replies may come in another
    order than the calls."""
    verb: str
    """One of the verbs below, at most 256 characters."""
    body: bytes = field(repr=False)
    """The parameters, by name. Unknown names are refused."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask the other side for a PONG. Either side may send it, at any time after HELLO."""

    kind: ClassVar[Kind] = Kind.PING
    nonce: int
    """Any number. PONG repeats it."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer PING. The supervisor answers messages of one connection in order, so everything that it sent before PONG
    has arrived before PONG."""

    kind: ClassVar[Kind] = Kind.PONG
    nonce: int
    """The number in PING."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer HELLO: the session has begun."""

    kind: ClassVar[Kind] = Kind.WELCOME
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer GENERATE: the request will get exactly one terminal event. ACCEPTED comes before every event and REPORT of
    the request."""

    kind: ClassVar[Kind] = Kind.ACCEPTED
    request: int
    body: bytes = field(repr=False)


@dataclass(slots=True)  # not frozen: that makes it three times as dear, and there is one for every token
class Events:
    """Bring the events of one step of the engine for this connection: of several requests, in any number.

    The bytes of the events lie one after the other in the body, in the order of the index. The bytes of one event are
    its token ids (u32, little endian) and then one msgpack map: that of a delta, or, by the terminal flags, that of
    FINISHED or of ERROR.
    """

    kind: ClassVar[Kind] = Kind.EVENTS
    channel: int
    """The supervisor's number for the connection. Ignore it."""
    generation: int
    """The number of the worker's process; 0 where the supervisor has put the frame together. It may change within a
    request. Ignore it."""
    index: list[EventEntry]
    """One entry for each event. The lengths add up to the length of the body."""
    body: bytes = field(repr=False)
    """The bytes of the events. This body is no map."""


@dataclass(frozen=True, slots=True)
class Error:
    """Refuse a frame, or say why the connection ends.

    ERROR with a number refuses the GENERATE of that number: no request came to be. It never names a request that was
    accepted and has not ended. ERROR of request 0 ends no stream by itself. With ``refused`` it answers a frame that is
    neither a CALL nor a GENERATE with a free number. Without ``refused`` it is about the connection, which is of no
    more use.
    """

    kind: ClassVar[Kind] = Kind.ERROR
    request: int
    """The number of the refused GENERATE, or 0."""
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer CALL."""

    kind: ClassVar[Kind] = Kind.REPLY
    call: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GoAway:
    """Say that the supervisor is shutting down. Requests that it has accepted are still finished, as long as its drain
    lasts; new ones are refused with `draining`. Then the connection ends."""

    kind: ClassVar[Kind] = Kind.GOAWAY
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Report:
    """Say how far a request is that asked for it with ``progress``, until its first token.

    REPORT has no number in the sequence of events, and needs no credit. One may be left out when the next one
    supersedes it.
    """

    kind: ClassVar[Kind] = Kind.REPORT
    request: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobMessage:
    kind: ClassVar[Kind] = Kind.JOB
    channel: int
    request: int
    carry: dict[str, Any]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CancelJob:
    kind: ClassVar[Kind] = Kind.CANCEL_JOB
    channel: int
    request: int


@dataclass(frozen=True, slots=True)
class Ready:
    kind: ClassVar[Kind] = Kind.READY
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Shutdown:
    kind: ClassVar[Kind] = Kind.SHUTDOWN


@dataclass(frozen=True, slots=True)
class Progress:
    kind: ClassVar[Kind] = Kind.PROGRESS
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stats:
    kind: ClassVar[Kind] = Kind.STATS
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    kind: ClassVar[Kind] = Kind.PREFILL
    channel: int
    request: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ask:
    kind: ClassVar[Kind] = Kind.ASK
    ask: int
    verb: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    kind: ClassVar[Kind] = Kind.ANSWER
    ask: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Parked:
    kind: ClassVar[Kind] = Kind.PARKED
    channel: int
    request: int


@dataclass(frozen=True, slots=True)
class Compiled:
    kind: ClassVar[Kind] = Kind.COMPILED
    channel: int
    request: int
    party: int
    milliseconds: int


Message = (
    Hello | Generate | Cancel | Credit | Call | Ping | Pong | Welcome | Accepted | Events | Error | Reply | GoAway
    | Report | JobMessage | CancelJob | Ready | Shutdown | Progress | Stats | Prefill | Ask | Answer | Parked
    | Compiled
)  # fmt: skip

MESSAGE_CLASSES: dict[Kind, type[Message]] = {
    cls.kind: cls
    for cls in (
        Hello, Generate, Cancel, Credit, Call, Ping, Pong, Welcome, Accepted, Events, Error, Reply, GoAway,
        Report, JobMessage, CancelJob, Ready, Shutdown, Progress, Stats, Prefill, Ask, Answer,
        Parked, Compiled,
    )
}  # fmt: skip

NUMBERED = frozenset(
    {Kind.GENERATE, Kind.CANCEL, Kind.CREDIT, Kind.CALL, Kind.ACCEPTED, Kind.ERROR, Kind.REPLY, Kind.REPORT}
)
"""Kinds whose third element is the client's number of a request or of a call."""

CLIENT_TO_SUPERVISOR = frozenset({Kind.HELLO, Kind.GENERATE, Kind.CANCEL, Kind.CREDIT, Kind.CALL, Kind.PING, Kind.PONG})
SUPERVISOR_TO_CLIENT = frozenset(
    {Kind.WELCOME, Kind.ACCEPTED, Kind.EVENTS, Kind.ERROR, Kind.REPLY, Kind.GOAWAY, Kind.REPORT, Kind.PING, Kind.PONG}
)
SUPERVISOR_TO_WORKER = frozenset({Kind.JOB, Kind.CANCEL_JOB, Kind.SHUTDOWN, Kind.ASK})
WORKER_TO_SUPERVISOR = frozenset(
    {
        Kind.HELLO, Kind.READY, Kind.PROGRESS, Kind.STATS, Kind.EVENTS, Kind.PREFILL, Kind.ANSWER, Kind.PARKED,
        Kind.COMPILED,
    }
)  # fmt: skip
