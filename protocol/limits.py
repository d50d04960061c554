"""Sizes and counts that limit what a peer can cost. All sizes are in bytes."""

from typing import Final

from protocol.kinds import MIB as MIB
from protocol.kinds import Kind
from protocol.messages import MESSAGE_CLASSES

SOCKET_MAX_FRAME: Final = 16 * MIB
"""ZMQ_MAXMSGSIZE of every socket. libzmq closes the connection of a peer that exceeds it."""

MAX_FRAME: Final[dict[Kind, int]] = {kind: message.largest for kind, message in MESSAGE_CLASSES.items()}
"""Largest frame of each kind. Only the larger frame itself is refused with TOO_LARGE, or dropped and counted.

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
"""Values of one array in a body. The array is counted when it is complete."""
MAX_BODY_MAP: Final = 4096
"""Values of one map in a body. The map is counted when it is complete."""
MAX_NAME: Final = 1024
"""Characters of a name in a map of a body."""
UNTRIED_BODY: Final = 1024
"""Size of a body up to which it is unpacked without a first look through it. Arrays in one another that announce more
than they hold take at most 3 MiB in such a body."""

MAX_ROUTE_KEYS: Final = 16
MAX_INDEX: Final = 8192
"""Events in one EVENTS frame."""
UNTRIED_EVENTS: Final = 4096
"""Size of an EVENTS frame up to which it is unpacked without a first look through it. An event takes 6 bytes in the
index. So no array there can have more elements than a sixth of the frame's size, and the worst frame takes 8 MiB."""
UNCOUNTED_EVENTS: Final = 64 << 10
"""Size of an EVENTS frame up to which its arrays are not counted. The worst frame becomes 2 MiB of objects."""

MAX_STRING: Final = 256
"""Characters of a string in a frame's head: a model's name, a verb."""

MAX_U64: Final = (1 << 64) - 1

MODEL_NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Pattern of a model's name. Names are looked up in the configured table and never joined into a path."""

SUPERVISOR_NAME: Final = "supervisor"
"""Name of the supervisor's own log. No model may have this name."""

STREAM_WINDOW: Final = 256
"""Events that a stream may be ahead of its client's grants. WELCOME states this number."""

IPC_PATH_MAX: Final = 107
"""Longest path of a Unix socket on Linux (sun_path is 108 bytes with its NUL)."""
