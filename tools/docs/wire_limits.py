"""Describe the errors and the limits of the wire."""

from protocol import limits
from protocol.attribute_docs import attribute_docs
from protocol.bodies import APPEARS, Where
from protocol.chat import DEEPEST
from protocol.errors import ErrorCode
from protocol.messages import CLIENT_TO_SUPERVISOR, SUPERVISOR_TO_CLIENT
from supervisor.ports import listeners
from supervisor.ports.floods import ArrivalLimits
from supervisor.requests import request
from supervisor.requests.credit import MOST_UNREAD, SendBufferLimits
from tools.docs.markdown import GENERATED, table, text

MIB = 1 << 20


def errors() -> str:
    """Return the table of the places where errors can appear. ``error_table`` explains the errors themselves."""
    places = attribute_docs(Where)
    rows = []
    for place in Where:
        names = [f"[`{code.wire_name}`](#{code.wire_name})" for code in ErrorCode if place in APPEARS[code]]
        rows.append((str(place), text(places[place.name]), ", ".join(names)))
    note = GENERATED.format(source="protocol/bodies.py")
    return note + "\n\n" + table(("where", "what it means", "errors"), rows) + "\n"


def most() -> str:
    """Return the tables of limits."""
    holds, arrivals = SendBufferLimits(), ArrivalLimits()
    kinds = sorted(CLIENT_TO_SUPERVISOR | SUPERVISOR_TO_CLIENT)
    frames: dict[int, list[str]] = {}
    for kind in kinds:
        frames.setdefault(limits.MAX_FRAME[kind], []).append(kind.name)
    parts = [
        GENERATED.format(source="protocol/limits.py and the constants of supervisor/"),
        "A frame beyond the limit of its kind is answered with `too_large`, and the connection goes on. A frame beyond "
        f"{size(limits.SOCKET_MAX_FRAME)} ends the connection without an answer.",
        table(("largest frame", "kinds"), [(size(most), ", ".join(names)) for most, names in sorted(frames.items())]),
        "Within the head of a frame. Beyond it: `bad_frame`.",
        table(
            ("what", "most"),
            [
                ("arrays and maps in the head (the frame itself is one)", str(limits.MAX_HEAD_CONTAINERS)),
                ("keys of `route`", str(limits.MAX_ROUTE_KEYS)),
                ("characters of a string in the head", str(limits.MAX_STRING)),
            ],
        ),
        "Within a body. Beyond it: `invalid_request` for GENERATE, else `bad_frame`.",
        table(
            ("what", "most"),
            [
                ("arrays and maps", str(limits.MAX_BODY_CONTAINERS)),
                ("values of all arrays and maps", str(limits.MAX_BODY_VALUES)),
                ("values of one array", str(limits.MAX_BODY_ARRAY)),
                ("keys of one map", str(limits.MAX_BODY_MAP)),
                ("characters of a key", str(limits.MAX_NAME)),
                ("maps and arrays within one another in `tools` and the like", str(DEEPEST)),
            ],
        ),
        f"One EVENTS frame has at most {limits.MAX_INDEX} events.",
        "Of a connection:",
        table(
            ("what", "most", "beyond it"),
            [
                ("events of a stream without credit", "0", "they are held"),
                ("held events of a stream", size(holds.of_stream), "this stream ends with `slow_consumer`"),
                ("held events of a connection, or of a key", size(holds.of_party),
                 "the largest stream ends with `slow_consumer`"),
                ("held events of all connections", size(holds.of_all), "the largest stream ends with `slow_consumer`"),
                ("time that held events wait for a client", f"{holds.stall_s:g} s (`supervisor.stall`)",
                 "this stream ends with `slow_consumer`"),
                ("windows of credit in advance before a PONG", str(MOST_UNREAD), "events are held"),
                ("questions (`tokenize`, `detokenize`) without an answer",
                 f"{request.MOST_OF_PARTY} of a connection or of a key, {request.MOST} in all, for each"
                 " worker",
                 "`overloaded`"),
                ("messages that wait to be handled", str(arrivals.messages_of_connection),
                 "the connection ends with `rate_limited`"),
                ("bytes of messages that wait to be handled", size(arrivals.bytes_of_connection),
                 "the connection ends with `rate_limited`"),
                ("over TCP: time until HELLO", f"{listeners.HELLO_S:g} s", "the connection ends"),
                ("over TCP: bytes that the client has not read", size(listeners.MAX_BEHIND), "the connection ends"),
                ("over TCP: connections of a key", str(listeners.MAX_CONNECTIONS_OF_KEY), "`rate_limited`"),
            ],
        ),
        "The queue of a model is bounded by `max_queue` and `max_queue_tokens` of models.yaml (`overloaded`). A key is "
        "bounded by its own limits (`rate_limited`).",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def size(count: int) -> str:
    """Return a number of bytes for people."""
    if count % MIB == 0:
        return f"{count // MIB} MiB"
    return f"{count >> 10} KiB" if count % 1024 == 0 else f"{count} bytes"
