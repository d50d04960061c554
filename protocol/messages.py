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

``protocol.kinds`` has the number of each kind. The class of a kind in ``protocol.client_messages``,
``protocol.worker_messages`` or ``protocol.events`` has the fields, the direction and the largest size. A message, an
element or a key is described at its definition only. docs/wire-protocol.md is for people who write a client. Its tables
are generated from these classes, from ``protocol.bodies`` (the maps in the bodies), ``protocol.request`` (the body of
GENERATE), ``protocol.errors`` and ``protocol.limits``.
"""

from typing import Final

from protocol.client_messages import (
    Accepted,
    Call,
    Cancel,
    Credit,
    Error,
    Generate,
    GoAway,
    Hello,
    Ping,
    Pong,
    Reply,
    Report,
    Welcome,
)
from protocol.events import TERMINAL, EventEntry, EventFlag, Events, FinishReason
from protocol.kinds import MESSAGE_CLASSES, VERSION, Kind, Message, Way
from protocol.worker_messages import (
    AnswerMessage,
    Ask,
    CancelJob,
    Compiled,
    JobMessage,
    Parked,
    Prefill,
    ProgressMessage,
    Ready,
    SetLogStyle,
    Shutdown,
    Sleep,
    Slept,
    Stats,
    Wake,
    Woke,
)

__all__ = [
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

NUMBERED: Final = frozenset(
    kind
    for kind, message in MESSAGE_CLASSES.items()
    if next(iter(message.__annotations__), None) in ("request", "call")
)
"""Kinds whose third element is the client's number of a request or of a call."""
