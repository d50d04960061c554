"""Encode messages as bytes, and decode bytes to messages, within limits. Every failure is a FrameError.

``decode`` is for frames, and ``unpack_body`` for bodies. Hostile bytes cost at most 20 MB and 50 ms. msgpack itself
limits nesting to 1024 levels. This module counts containers and their values, so that many small containers cannot take
much memory. It finds incomplete bytes before it makes any object from them. The reason is that msgpack allocates the
announced size of an array: 5 KB of nested arrays would take 80 MiB.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from struct import pack, unpack_from
from typing import Any, cast, get_origin

import msgpack

from protocol import limits
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import MESSAGE_CLASSES, NUMBERED, VERSION, EventEntry, Events, Kind, Message

# Say why msgpack refused bytes, in the words of the wire protocol.
#
# The exceptions of msgpack itself name classes of Python, or say nothing.


_BEYOND = re.compile(r"(\d+) exceeds max_(array|map|str|bin|ext)_len\((\d+)\)")
_MEASURED = {
    "array": "an array of {} elements",
    "map": "a map of {} pairs",
    "str": "a string of {} bytes",
    "bin": "a bin of {} bytes",
}


def why_refused(error: Exception) -> str:
    """Return why bytes could not be unpacked, without repeating any of them.

    error  the exception that unpacking raised. If it is a plain ValueError that msgpack did not raise, its message is
           returned unchanged
    """
    if isinstance(error, msgpack.FormatError):
        return "not msgpack: it holds the byte 0xc1, which begins no value"
    if isinstance(error, msgpack.StackError):
        return "arrays and maps are nested too deeply"
    if isinstance(error, msgpack.ExtraData):
        return "not one msgpack value: there are more bytes behind the first value"
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8: send other bytes as a bin"
    message = str(error)
    if isinstance(error, msgpack.OutOfData) or message == "Unpack failed: incomplete input":
        return "not complete msgpack: the bytes end where a value is expected"
    if "is not allowed for map key" in message:
        return "a map has a key that is neither a string nor a bin"
    if (beyond := _BEYOND.fullmatch(message)) is not None:
        found, what, most = beyond.groups()
        if what == "ext":
            return "a value of an extension type, of which this protocol has none"
        return f"{_MEASURED[what].format(found)}: at most {most} are allowed here"
    return message if type(error) is ValueError else "not msgpack of the shape that is expected here"


Buffer = bytes | memoryview
"""The types of a received frame. With a view, a frame that is too large is refused without a copy."""

_packb = partial(msgpack.packb, use_bin_type=True)
_EVENTS = int(Kind.EVENTS)
_EVENTS_HEAD = bytes((0x96, VERSION, _EVENTS))
_LARGEST_EVENTS = limits.MAX_FRAME[Kind.EVENTS]
# Like EventEntry(*entry), but without a call into Python: this is the supervisor's hottest path.
_as_entry: Callable[[tuple[int, ...]], EventEntry] = partial(tuple.__new__, EventEntry)


def _plain(hint: Any) -> type:
    return dict if get_origin(hint) is dict else hint


_FIELD_TYPES: dict[Kind, tuple[tuple[str, type], ...]] = {
    kind: tuple((field.name, _plain(field.type)) for field in fields(cast(Any, message)))
    for kind, message in MESSAGE_CLASSES.items()
    if kind is not Kind.EVENTS
}
"""The names and types of the fields of each kind. EVENTS is left out, because it has a decoder of its own."""


class _Budget:
    """A hook of msgpack that counts containers and the values in them, and refuses too many of either."""

    __slots__ = ("containers", "values")

    def __init__(self, containers: int, values: int = limits.MAX_BODY_VALUES) -> None:
        self.containers, self.values = containers, values

    def __call__(self, container: Any) -> Any:
        self.containers -= 1
        self.values -= len(container)
        if self.containers < 0:
            raise ValueError("too many arrays and maps")
        if self.values < 0:
            raise ValueError("too many values in arrays and maps")
        return container


class _LongBudget(_Budget):
    """A hook that also refuses long names in a map. An error that quotes such a name would be as long as the name."""

    __slots__ = ()

    def __call__(self, container: Any) -> Any:
        if type(container) is dict and (longest := max(map(len, container), default=0)) > limits.MAX_NAME:
            raise ValueError(f"a name of {longest} characters in a map (at most {limits.MAX_NAME})")
        return super().__call__(container)


def _try(packed: Buffer) -> None:
    """Raise the error of msgpack if a value is not complete. No object is made from the value."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed), read_size=1)
    unpacker.feed(packed)
    unpacker.skip()


def encode(message: Message) -> bytes:
    """Return the frame of a message. The receiver checks the limits. Clients call ``check_size`` as well."""
    head: list[Any] = [VERSION, int(message.kind)]
    if isinstance(message, Events):
        head += [message.channel, message.generation, message.index, message.body]
    else:
        head += [getattr(message, name) for name, _ in _FIELD_TYPES[message.kind]]
    frame: bytes = _packb(head)
    return frame


def check_size(frame: Buffer, kind: Kind) -> None:
    """Raise FrameError (TOO_LARGE) with the size and the limit if the frame is larger than its kind may be."""
    limit = limits.MAX_FRAME[kind]
    if len(frame) > limit:
        raise FrameError(
            ErrorCode.TOO_LARGE,
            f"{kind.name} of {len(frame)} bytes: at most {limit} are allowed; shorten the request",
            field="frame",
        )


def kind_of(frame: Buffer) -> Kind:
    """Return the kind of a frame, from its first three bytes. Raises FrameError if the kind is unknown."""
    if len(frame) < 3 or not 0x92 <= frame[0] <= 0x9F:
        raise FrameError(ErrorCode.BAD_FRAME, "not a msgpack array of at most 15 elements [version, kind, ...]")
    if frame[1] != VERSION:
        raise FrameError(ErrorCode.BAD_VERSION, f"protocol version {frame[1]}: this side speaks {VERSION}")
    try:
        return Kind(frame[2])
    except ValueError:
        raise FrameError(ErrorCode.UNSUPPORTED, f"message kind {frame[2]} is unknown here") from None


def decode(frame: Buffer, allowed: frozenset[Kind]) -> Message:
    """Return the message in a frame.

    allowed  the kinds that this socket takes in this direction

    Raises FrameError: BAD_FRAME, BAD_VERSION, UNSUPPORTED (kind unknown or not for this socket), TOO_LARGE; never
    another exception, whatever the bytes are. The FrameError holds the frame's kind and the number that it names.
    """
    kind = kind_of(frame)
    try:
        if kind not in allowed:
            raise FrameError(ErrorCode.UNSUPPORTED, f"{kind.name} is not taken here")
        check_size(frame, kind)
        if kind is Kind.EVENTS:
            return _decode_events(frame)
        try:
            values = msgpack.unpackb(
                frame,
                max_array_len=16,
                max_map_len=limits.MAX_ROUTE_KEYS,
                max_str_len=4 * limits.MAX_STRING,
                max_ext_len=0,
                list_hook=(budget := _Budget(limits.MAX_HEAD_CONTAINERS)),
                object_hook=budget,
            )
        except (
            Exception
        ) as e:  # ValueError and its subclasses, TypeError for odd keys: no error of hostile bytes may escape
            raise FrameError(ErrorCode.BAD_FRAME, f"{kind.name}: {why_refused(e)}") from None
        return _build(kind, values)
    except FrameError as e:
        e.kind, e.number = named(frame)
        raise


def _build(kind: Kind, values: list[Any]) -> Message:
    fields = _FIELD_TYPES[kind]
    if len(values) != 2 + len(fields):
        raise FrameError(ErrorCode.BAD_FRAME, f"{kind.name} has {len(values)} elements, not {2 + len(fields)}")
    for (name, wanted), value in zip(fields, values[2:], strict=True):
        # A bool is an int in Python, and not on the wire.
        if type(value) is not wanted:
            raise FrameError(
                ErrorCode.BAD_FRAME,
                f"{kind.name}: {name} is {_type_name(type(value))}, not {_type_name(wanted)}",
                field=name,
            )
        if isinstance(value, int) and not 0 <= value <= limits.MAX_U64:
            raise FrameError(ErrorCode.BAD_FRAME, f"{kind.name}: {name} is not a u64", field=name)
        if isinstance(value, str) and len(value) > limits.MAX_STRING:
            raise FrameError(
                ErrorCode.BAD_FRAME, f"{kind.name}: {name} is longer than {limits.MAX_STRING} characters", field=name
            )
    return MESSAGE_CLASSES[kind](*values[2:])


def named(frame: Buffer) -> tuple[Kind | None, int]:
    """Return the kind of a frame that cannot be decoded, and the number of the request or call that it names.

    The kind is None if it cannot be read. The number is 0 if it cannot be read, or if frames of this kind have none.
    """
    try:
        kind = kind_of(frame)
    except FrameError:
        return None, 0
    if kind not in NUMBERED:
        return kind, 0
    unpacker = msgpack.Unpacker(max_buffer_size=16)  # this limits announced lengths, too
    unpacker.feed(frame[:16])
    try:
        unpacker.read_array_header()
        number = [unpacker.unpack() for _ in range(3)][2]
    except Exception:
        return kind, 0
    return kind, number if type(number) is int and 0 <= number <= limits.MAX_U64 else 0


def is_events(frame: bytes) -> bool:
    """Return whether a frame begins like EVENTS. False for an EVENTS frame that is not in the shortest form."""
    return frame.startswith(_EVENTS_HEAD)


def decode_events(frame: bytes) -> Events:
    """Decode a frame for which ``is_events`` is true. It is faster than ``decode``, and every token passes here."""
    if len(frame) > _LARGEST_EVENTS:
        check_size(frame, Kind.EVENTS)
    return _decode_events(frame)


def _decode_events(frame: Buffer) -> Events:
    try:
        if len(frame) > limits.UNTRIED_EVENTS:
            _try(frame)
        values = msgpack.unpackb(
            frame,
            max_array_len=min(limits.MAX_INDEX, len(frame) // 6 + 6),
            max_map_len=0,
            max_ext_len=0,
            max_str_len=0,
            use_list=False,
            # Counting costs more than the rest of a small frame, and a small frame cannot amount to much.
            list_hook=_Budget(limits.MAX_INDEX + 2, 6 * limits.MAX_INDEX + 6)
            if len(frame) > limits.UNCOUNTED_EVENTS
            else None,
        )
        _, _, channel, generation, index, body = values
        if type(body) is not bytes or type(channel) is not int or type(generation) is not int:
            raise ValueError("a field has the wrong type")
        if type(index) is not tuple or channel < 0 or generation < 0:
            raise ValueError("a field has the wrong type")
        entries, total = [], 0
        for entry in index:
            request, seq, flags, tokens, length = entry
            # The bitwise or of the five is negative if any of them is.
            if (
                not (type(request) is type(seq) is type(flags) is type(tokens) is type(length) is int)
                or type(entry) is not tuple
                or request | seq | flags | tokens | length < 0
            ):
                raise ValueError("an index entry holds something else than five unsigned integers")
            if flags > 255:
                raise ValueError("an event has flags that are unknown here")
            if 4 * tokens > length:
                raise ValueError("an event is shorter than its token ids")
            total += length
            entries.append(_as_entry(entry))
        if total != len(body):
            raise ValueError(f"the index accounts for {total} bytes, the body has {len(body)}")
    except Exception as e:  # as in decode
        raise FrameError(ErrorCode.BAD_FRAME, f"EVENTS: {why_refused(e)}") from None
    return Events(channel, generation, entries, body)


def pack_body(value: dict[str, Any]) -> bytes:
    """Return a body: one msgpack map."""
    body: bytes = _packb(value)
    return body


def unpack_body(body: bytes) -> dict[str, Any]:
    """Return the map in a body. Raises FrameError (BAD_FRAME) for anything else."""
    try:
        kind = _Budget
        if len(body) > limits.UNTRIED_BODY:
            _try(body)
            kind = _LongBudget
        value = msgpack.unpackb(
            body,
            max_ext_len=0,
            max_map_len=limits.MAX_BODY_MAP,
            max_array_len=min(limits.MAX_BODY_ARRAY, len(body)),
            list_hook=(budget := kind(limits.MAX_BODY_CONTAINERS)),
            object_hook=budget,
        )
    except Exception as e:
        raise FrameError(ErrorCode.BAD_FRAME, f"body: {why_refused(e)}", field="body") from None
    if type(value) is not dict:
        raise FrameError(ErrorCode.BAD_FRAME, f"body: {_type_name(type(value))}, not a map", field="body")
    return value


def pack_reply(value: dict[str, Any]) -> bytes:
    """Return the body of a REPLY or an ERROR.

    These may quote paths, and the name of a file need not be text. What is no text becomes an escape such as \\udcff.
    """
    body: bytes = _packb(value, unicode_errors="backslashreplace")
    return body


def pack_error(error: WireError) -> bytes:
    """Return the body of an ERROR message."""
    return pack_reply(error.to_wire())


def pack_event(token_ids: Iterable[int], fields: dict[str, Any]) -> bytes:
    """Return the bytes of one event: the ids (u32, little endian), then the map."""
    ids = tuple(token_ids)
    return pack(f"<{len(ids)}I", *ids) + pack_body(fields)


class EventWriter:
    """A faster form of ``pack_event`` and ``encode`` for EVENTS. All frames share one buffer.

    Use it in one thread only, and never in a finalizer, which may run while an event is being packed into the buffer.
    """

    def __init__(self) -> None:
        self._pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack

    def event(self, token_ids: Sequence[int], fields: dict[str, Any]) -> bytes:
        """Return the bytes of one event, as ``pack_event`` makes them."""
        if len(token_ids) == 1:
            return token_ids[0].to_bytes(4, "little") + self._pack(fields)
        return pack(f"<{len(token_ids)}I", *token_ids) + self._pack(fields)

    def frame(self, channel: int, generation: int, index: Sequence[EventEntry], body: bytes) -> bytes:
        """Return the frame of an EVENTS message, as ``encode`` makes it."""
        return self._pack((VERSION, _EVENTS, channel, generation, index, body))


def split_events(message: Events) -> list[tuple[EventEntry, bytes]]:
    """Return every event of a frame with its bytes, in order."""
    slices, at = [], 0
    for entry in message.index:
        slices.append((entry, message.body[at : at + entry.length]))
        at += entry.length
    return slices


def unpack_event(entry: EventEntry, event: bytes) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return (token ids, map) of the bytes of one event. Raises FrameError (BAD_FRAME)."""
    ids = unpack_from(f"<{entry.tokens}I", event)
    return ids, unpack_body(event[4 * entry.tokens :])


def _type_name(kind: type) -> str:
    names = {int: "an integer", str: "a string", bytes: "a bin", dict: "a map", list: "an array", bool: "a boolean"}
    return names.get(kind, "null" if kind is type(None) else kind.__name__)
