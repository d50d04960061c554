"""Sizes and counts that bound what a peer can make us do. All sizes in bytes."""

from typing import Final

from protocol.messages import Kind

MIB: Final = 1 << 20

SOCKET_MAX_FRAME: Final = 16 * MIB
"""ZMQ_MAXMSGSIZE of every socket. libzmq closes the connection of a peer that exceeds it."""

MAX_FRAME: Final[dict[Kind, int]] = {
    Kind.HELLO: 16 << 10,
    Kind.GENERATE: 4 * MIB,
    Kind.CANCEL: 64,
    Kind.CREDIT: 64,
    Kind.CALL: 4 * MIB,  # a text to tokenize
    Kind.PING: 64,
    Kind.PONG: 64,
    Kind.WELCOME: MIB,
    Kind.ACCEPTED: 64 << 10,
    Kind.EVENTS: 8 * MIB,
    Kind.ERROR: 64 << 10,
    Kind.REPLY: 8 * MIB,
    Kind.GOAWAY: 64 << 10,
    Kind.REPORT: 64 << 10,
    Kind.JOB: 12 * MIB,  # a GENERATE's body, and the ids of the answer so far
    Kind.CANCEL_JOB: 64,
    Kind.READY: 64 << 10,
    Kind.SHUTDOWN: 64,
    Kind.PROGRESS: 64 << 10,
    Kind.STATS: 64 << 10,
    Kind.PREFILL: 64,
    Kind.ASK: 4 * MIB + 64,
    Kind.ANSWER: 8 * MIB,
}
"""Largest frame of each kind; a larger one is answered with TOO_LARGE (or dropped and counted), alone."""

MAX_HEAD_CONTAINERS: Final = 4
"""Arrays and maps in a frame's head (the frame itself, GENERATE's route). 1 MiB of empty maps would become 72 MiB."""

MAX_BODY_CONTAINERS: Final = 20_000
"""Arrays and maps in a body: a long chat has some thousand messages."""

MAX_ROUTE_KEYS: Final = 16
MAX_INDEX: Final = 65_536
"""Events in one EVENTS frame."""
UNCOUNTED_EVENTS: Final = 64 << 10
"""Size of an EVENTS frame up to which its arrays need not be counted: the worst becomes 2 MiB of objects."""

MAX_STRING: Final = 256
"""Characters of a string in a frame's head: a model's name, a verb."""

MAX_U64: Final = (1 << 64) - 1

MODEL_NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""What a model may be called. Names are looked up in the configured table and never joined into a path."""

SUPERVISOR_NAME: Final = "supervisor"
"""No model may be called so: it is what the supervisor's own log is called."""

STREAM_WINDOW: Final = 256
"""Events a stream may be ahead of its client's grants (WELCOME says so)."""

IPC_PATH_MAX: Final = 107
"""Longest path of a Unix socket on Linux (sun_path is 108 bytes with its NUL)."""
