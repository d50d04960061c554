"""Sizes and counts that bound what a peer can make us do. All sizes in bytes."""

from typing import Final

from protocol.kinds import MIB as MIB
from protocol.kinds import Kind
from protocol.messages import MESSAGE_CLASSES

SOCKET_MAX_FRAME: Final = 16 * MIB
"""ZMQ_MAXMSGSIZE of every socket. libzmq closes the connection of a peer that exceeds it."""

MAX_FRAME: Final[dict[Kind, int]] = {kind: message.largest for kind, message in MESSAGE_CLASSES.items()}
"""Largest frame of each kind; a larger one is answered with TOO_LARGE (or dropped and counted), alone.

A body of 3 MiB becomes at most 18: one text with a single character beyond the first 65,536 takes four bytes for each
of its characters, and one more while it is decoded.
"""

MAX_HEAD_CONTAINERS: Final = 4
"""Arrays and maps in a frame's head (the frame itself, GENERATE's route). 1 MiB of empty maps would become 72 MiB."""

MAX_BODY_CONTAINERS: Final = 8192
"""Arrays and maps in a body: a long chat has some thousand messages."""
MAX_BODY_VALUES: Final = 100_000
"""Values of all arrays and maps in a body. Three bytes each, they can become 64 in memory."""
MAX_BODY_ARRAY: Final = 65_536
"""Values of one array in a body, and ..."""
MAX_BODY_MAP: Final = 4096
"""... of one map. Either is counted when it is complete."""
MAX_NAME: Final = 1024
"""Characters of a name in a map of a body."""
UNTRIED_BODY: Final = 1024
"""Size of a body up to which it need not be looked through first: arrays in it that announce more than there is, one
in another, take 3 MiB at most."""

MAX_ROUTE_KEYS: Final = 16
MAX_INDEX: Final = 8192
"""Events in one EVENTS frame."""
UNTRIED_EVENTS: Final = 4096
"""As UNTRIED_BODY, of an EVENTS frame: an event takes 6 bytes in the index, so that no array there can have more than a
sixth of the frame's size, and the worst is 8 MiB."""
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
