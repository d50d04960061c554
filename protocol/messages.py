"""The wire contract, written once. Everything else about the wire follows from this file.

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

* ``request`` is the client's own number for a request: 1 to 2**64-1, used once per connection. 0 names no request.
  ``channel`` is the supervisor's number for the connection.
* The first message of a connection is HELLO, whose body is a map; a second HELLO is refused. GENERATE may follow
  without waiting for WELCOME. A new connection is a new session: nothing survives a reconnect.
* GENERATE is answered by ERROR (no request came to be) or by ACCEPTED, then delta events, then exactly one event
  flagged FINISHED or ERROR. Nothing follows it.
* ERROR names a request only to refuse the GENERATE of that number. It never names a request that was accepted and has
  not ended: a stream ends by its events, or with the connection. An ERROR of request 0 ends no stream by itself.
* The supervisor answers every frame that it refuses, however many there are. A GENERATE is answered by ERROR with its
  number, a CALL by REPLY with its number. Any other frame, and one whose number cannot be read, is answered by ERROR
  of request 0, whose body says what could be read of the frame: ``refused {kind?, number?}``, the frame's second and
  third element. A GENERATE with the number of a request in flight is answered in this way, too, by
  ``duplicate_request`` with ``refused {kind: 2, number}``. The request in flight goes on.
* An ERROR of request 0 without ``refused`` is about the connection, which is of no more use: the key was revoked, say,
  or the client has set a routing id.
* ``route`` of GENERATE is what the supervisor itself needs to know. Unknown keys are refused by name. All are optional:
    resume       bool, default true: when its worker dies, the answer goes on in another, no token twice, none missing
    priority     "interactive", "normal" (default) or "batch"
    queue_ms     longest wait for a worker, ttft_ms for the first token, deadline_ms for the end; 1 to 86,400,000,
                 from acceptance on. A request that takes longer ends with queue_timeout or deadline_exceeded
    affinity     up to 256 characters: requests with the same key go to the same worker, where their prefix is cached;
                 unset, the beginning of the prompt stands for it
    progress     bool, default false: send REPORT until the first token
* REPORT tells how far a request is that asked for it: ``{phase: "queued", queue_position}`` (0 is next), ``{phase:
  "loading", part, done, total}`` while its model is loaded (parts as the engine names them, such as "loading" and
  "warmup", in units of its own), ``{phase: "compiling"}`` when the request's constraint has to be compiled first, or
  ``{phase: "prefill", done, total}`` in tokens. It stands outside the sequence of events, and one may be left out.
* ``carry`` of JOB is what a former worker left of the answer: ``seq`` (number of the next event), ``token_ids`` (those
  that were delivered: bin, u32 little endian), ``resumes`` (how often it went on), ``queue_ms``, ``progress`` (bool).
  Unset are 0, none, 0, 0 and false.
* PARKED gives a job back: the worker compiles its constraint first, and meanwhile the request holds no slot. COMPILED
  says that the job may be sent again, and what processor time the constraint took. It comes, too, for a request that
  was cancelled meanwhile, unless the compilation had not begun.
* ``party`` in ``carry`` is whose turn a compilation takes and who pays for it: the channel, or over TCP a number that
  all connections of one key have. ``stay`` (bool) says that the job must not be parked again.
* ASK hands a client's CALL to a worker: verbs ``tokenize`` {prompt | messages} and ``detokenize`` {token_ids}.
* ``index`` is ``[[request, seq, flags, tokens, length], ...]``, one entry an event: its number within the request
  (gapless from 0), EventFlag bits, how many token ids it holds, how many bytes of the body are its own. The events'
  bytes lie one after the other; each is ``tokens`` ids (u32, little endian), then one msgpack map:
    delta     {text, logprobs?}
    FINISHED  {text?, logprobs?, finish_reason, usage{prompt_tokens, completion_tokens, cached_tokens?, draft_accepted?,
              draft_rejected?, resumes?}, timings{queue_ms, prefill_ms, decode_ms, tokens_per_s}}
    ERROR     {error{code, name, message, retryable, field?, retry_after_ms?}, delivered_tokens?}
* ``logprobs``, if the request asked for them, has one entry for each of the event's ids, ``[logprob, bytes, top]``: the
  natural logarithm of its probability by the model alone (before penalties, bias and temperature), what it adds to the
  text (a bin: UTF-8, of which a character may be incomplete), and the likeliest tokens there, best first, as
  ``[[id, logprob, bytes], ...]``.
* Text need not arrive with its ids: characters that may begin a stop string come with later ones, and token healing
  begins an answer with text that has no id.
* Credit: a stream starts with ``window`` events (WELCOME) and gains what CREDIT grants. A stream without credit has its
  events held, up to a bound, and then ends with ``slow_consumer``; a terminal event needs no credit. One CREDIT grants
  ``window`` events at most. Credit may be granted in advance: of what goes beyond ``window``, a connection can use 32
  windows before it has to answer a PING, which shows that it reads.
* PING is answered by PONG with the same nonce, by either side.
* Names in a map are strings; a bin in the place of one is refused. ``stop`` may be one string for an array of one.
* Over TCP (CURVE, for keys on a list) one socket takes what the two over ipc take. What the connection's key has no
  right to is refused as ``forbidden``, a request beyond its limits as ``rate_limited``. When a key is revoked, each of
  its requests ends with ``unauthorized``, and then the connection does (ERROR of request 0).
* A client that sends faster than the supervisor handles is told so (ERROR of request 0, ``rate_limited``), and then its
  connection ends.
* Frames beyond 16 MiB are cut off by libzmq itself (the connection closes); see ``protocol.limits`` for the rest.
* A client must not let libzmq reconnect: the old session's requests are gone, and what the client sends would reach a
  new session that has not said HELLO. Nor may it forbid reconnecting by ``ZMQ_RECONNECT_IVL=-1``, or set
  ``ZMQ_IMMEDIATE=1``: with either, libzmq drops at the end of a connection what had arrived and was not read yet, whole
  answers among it. Instead it sets ``ZMQ_RECONNECT_IVL`` to a very long time (1,000,000,000 ms), reads what has come
  after the monitor has told of the end (DISCONNECTED), closes the socket, and connects with a new one.
* Over ipc a client sends nothing before it knows that its own user listens: SO_PEERCRED of the descriptor that the
  monitor's CONNECTED tells. Another user may have put a socket of hers in the supervisor's place.
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
    flags: int
    tokens: int
    length: int


# Bodies hold prompts and answers: what is logged about a message must not show them.


@dataclass(frozen=True, slots=True)
class Hello:
    kind: ClassVar[Kind] = Kind.HELLO
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Generate:
    kind: ClassVar[Kind] = Kind.GENERATE
    request: int
    model: str
    route: dict[str, Any]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    kind: ClassVar[Kind] = Kind.CANCEL
    request: int


@dataclass(frozen=True, slots=True)
class Credit:
    kind: ClassVar[Kind] = Kind.CREDIT
    request: int
    events: int


@dataclass(frozen=True, slots=True)
class Call:
    kind: ClassVar[Kind] = Kind.CALL
    call: int
    verb: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ping:
    kind: ClassVar[Kind] = Kind.PING
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    kind: ClassVar[Kind] = Kind.PONG
    nonce: int


@dataclass(frozen=True, slots=True)
class Welcome:
    kind: ClassVar[Kind] = Kind.WELCOME
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    kind: ClassVar[Kind] = Kind.ACCEPTED
    request: int
    body: bytes = field(repr=False)


@dataclass(slots=True)  # not frozen: that makes it three times as dear, and there is one for every token
class Events:
    kind: ClassVar[Kind] = Kind.EVENTS
    channel: int
    generation: int
    index: list[EventEntry]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Error:
    kind: ClassVar[Kind] = Kind.ERROR
    request: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    kind: ClassVar[Kind] = Kind.REPLY
    call: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GoAway:
    kind: ClassVar[Kind] = Kind.GOAWAY
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Report:
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
