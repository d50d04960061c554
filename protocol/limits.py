"""Limits on sizes and counts, so that no peer can use too much memory or time. All sizes are in bytes."""

from typing import Final

from protocol.messages import MESSAGE_CLASSES, MIB, Kind

SOCKET_MAX_FRAME: Final = 16 * MIB
"""ZMQ_MAXMSGSIZE of every socket. libzmq closes the connection of a peer that exceeds it."""

MAX_FRAME: Final[dict[Kind, int]] = {kind: message.largest for kind, message in MESSAGE_CLASSES.items()}
"""Largest frame of each kind. A larger frame is refused with TOO_LARGE, or dropped and counted. The connection stays.

A body of 3 MiB takes at most 18 MiB of memory. The worst case is one text with a single character above U+FFFF. Python
uses four bytes for each character of such a text, and one more for each while it decodes the text.
"""

MAX_HEAD_CONTAINERS: Final = 4
"""Arrays and maps in a frame's head (the frame itself, GENERATE's route). 1 MiB of empty maps would take 72 MiB of
memory."""

MAX_BODY_CONTAINERS: Final = 8192
"""Arrays and maps in a body. A long chat has some thousand messages."""
MAX_BODY_VALUES: Final = 100_000
"""Values of all arrays and maps in a body. A value of three bytes can take 64 bytes of memory."""
MAX_BODY_ARRAY: Final = 65_536
"""Values of one array in a body. MAX_BODY_VALUES does not bound one array, because its values are counted only when the
array is complete."""
MAX_BODY_MAP: Final = 4096
"""Pairs of one map in a body. MAX_BODY_VALUES does not bound one map, because its pairs are counted only when the map
is complete."""
MAX_NAME: Final = 1024
"""Characters of a name in a map of a body."""
UNTRIED_BODY: Final = 1024
"""A body of up to this size is unpacked without a check for completeness first. Nested arrays that announce more values
than they hold take at most 3 MiB in such a body."""

MAX_ROUTE_KEYS: Final = 16
MAX_INDEX: Final = 8192
"""Events in one EVENTS frame."""
UNTRIED_EVENTS: Final = 4096
"""An EVENTS frame of up to this size is unpacked without a check for completeness first. An event takes 6 bytes in the
index. So no array there can have more elements than a sixth of the frame's size, and the worst frame takes 8 MiB."""
UNCOUNTED_EVENTS: Final = 64 << 10
"""The arrays of an EVENTS frame of up to this size are not counted. The objects of the worst frame take 2 MiB."""

MAX_STRING: Final = 256
"""Characters of a string in a frame's head: a model's name, a verb."""

MAX_U64: Final = (1 << 64) - 1

MODEL_NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Pattern of a model's name. Names are looked up in the configured table and never joined into a path."""

SUPERVISOR_NAME: Final = "supervisor"
"""Name of the supervisor's own log. No model may have this name."""

GATEWAY_NAME: Final = "gateway"
"""Name of the HTTP gateway's log. No model may have this name."""

STREAM_WINDOW: Final = 256
"""Credit with which each stream starts, in events. WELCOME states this number."""

IPC_PATH_MAX: Final = 107
"""Longest path of a Unix socket on Linux (sun_path is 108 bytes with its NUL)."""
