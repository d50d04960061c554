"""Decoding any bytes gives a message or a FrameError, and never takes much memory."""

import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.codec import (
    EventWriter,
    check_size,
    decode,
    decode_events,
    encode,
    is_events,
    kind_of,
    pack_body,
    pack_event,
    split_events,
    unpack_body,
    unpack_event,
)
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import EventEntry, Events, Generate, Kind, Message
from tests.protocol.test_vectors import VALID

ALL = frozenset(Kind)
FRAMES = [bytes.fromhex(vector["hex"]) for vector in VALID]
MIB = limits.MIB

U64 = st.integers(0, limits.MAX_U64)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), limits.MAX_U64) | st.floats(allow_nan=False) | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
EVENTS = st.lists(
    st.tuples(U64, U64, st.integers(0, 7), st.lists(st.integers(0, (1 << 32) - 1), max_size=5), st.text())
)


def try_to_decode(frame: bytes) -> Message | None:
    """Decode bytes from a socket in every way that the product does. Any exception other than FrameError is a bug."""
    refused = None
    try:
        kind_of(frame)
        message = decode(frame, ALL)
    except FrameError as e:
        refused = e
    if refused is not None:
        assert refused.code in (ErrorCode.BAD_FRAME, ErrorCode.BAD_VERSION, ErrorCode.UNSUPPORTED, ErrorCode.TOO_LARGE)
        assert 0 <= refused.number <= limits.MAX_U64
        return None
    if isinstance(message, Events):
        for entry, event in split_events(message):
            try:
                unpack_event(entry, event)
            except FrameError:
                pass
    elif isinstance(body := getattr(message, "body", b"\x80"), bytes):
        try:
            WireError.from_wire(unpack_body(body))
        except FrameError:
            pass
    return message


@settings(max_examples=400)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91")
@example(b"\x93\x01\x03")
def test_any_bytes(frame: bytes) -> None:
    try_to_decode(frame)


@settings(max_examples=400)
@given(st.sampled_from(list(Kind)), st.integers(0, 15), st.binary(max_size=100))
def test_any_bytes_behind_a_valid_start(kind: Kind, elements: int, rest: bytes) -> None:
    try_to_decode(bytes([0x90 + elements, 1, kind]) + rest)


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.data())
def test_mutated_frames(frame: bytes, data: st.DataObject) -> None:
    mutable = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutable) - 1)) if mutable else 0
        match data.draw(st.sampled_from(["set", "cut", "insert", "end"])):
            case "set" if mutable:
                mutable[at] = data.draw(st.integers(0, 255))
            case "cut":
                del mutable[at : at + data.draw(st.integers(1, 5))]
            case "insert":
                mutable[at:at] = data.draw(st.binary(min_size=1, max_size=5))
            case _:
                del mutable[at:]
    message = try_to_decode(bytes(mutable))
    if message is not None:
        # an accepted frame can be encoded again, and decodes to an equal message (compared as bytes, since NaN != NaN)
        assert encode(decode(encode(message), ALL)) == encode(message)


@given(U64, st.text(max_size=limits.MAX_STRING), st.dictionaries(st.text(max_size=9), JSON, max_size=4))
def test_bodies_and_heads_come_back(request: int, model: str, body: dict[str, object]) -> None:
    message = Generate(request, model, {"resume": True}, pack_body(body))
    decoded = decode(encode(message), ALL)
    assert decoded == message
    assert unpack_body(message.body) == body


@given(EVENTS, U64)
def test_events_come_back(events: list[tuple[int, int, int, list[int], str]], channel: int) -> None:
    packed = [pack_event(ids, {"text": text}) for *_, ids, text in events]
    index = [EventEntry(r, s, f, len(ids), len(p)) for (r, s, f, ids, _), p in zip(events, packed, strict=True)]
    decoded = decode(encode(Events(channel, 1, index, b"".join(packed))), ALL)
    assert isinstance(decoded, Events)
    assert decoded.index == index
    assert all(type(entry) is EventEntry for entry in decoded.index)
    for (entry, event), (*_, ids, text) in zip(split_events(decoded), events, strict=True):
        assert unpack_event(entry, event) == (tuple(ids), {"text": text})


@given(EVENTS, st.lists(st.tuples(st.integers(3, 200), st.integers(0, 255)), max_size=3))
def test_events_are_read_alike_on_both_roads(
    events: list[tuple[int, int, int, list[int], str]], changes: list[tuple[int, int]]
) -> None:
    """The supervisor's shorter decoder refuses the same frames as the other one, for the same reasons."""
    packed = [pack_event(ids, {"text": text}) for *_, ids, text in events]
    index = [EventEntry(r, s, f, len(ids), len(p)) for (r, s, f, ids, _), p in zip(events, packed, strict=True)]
    frame = bytearray(encode(Events(1, 1, index, b"".join(packed))))
    for at, value in changes:
        frame[at % (len(frame) - 3) + 3] = value  # after the bytes that say that it is EVENTS
    assert is_events(bytes(frame))

    def outcome(read: Callable[[bytes], Message]) -> object:
        try:
            return read(bytes(frame))
        except FrameError as e:
            return e.code, str(e)

    assert outcome(decode_events) == outcome(lambda raw: decode(raw, ALL))


def test_events_that_are_too_large_are_refused_on_both_roads() -> None:
    frame = b"\x96\x01\x12" + bytes(limits.MAX_FRAME[Kind.EVENTS] - 2)
    for read in (decode_events, lambda raw: decode(raw, ALL)):
        with pytest.raises(FrameError) as e:
            read(frame)
        assert e.value.code is ErrorCode.TOO_LARGE
    assert not any(is_events(raw) for raw in (b"", b"\x96\x01", b"\x96\x01\x13", b"\xdc\x00\x06\x01\x12"))


@given(st.lists(st.tuples(U64, st.lists(st.integers(0, (1 << 32) - 1), max_size=3), JSON), max_size=4), U64, U64)
def test_the_writer_of_many_events_writes_the_same_bytes(
    events: list[tuple[int, list[int], object]], channel: int, generation: int
) -> None:
    writer = EventWriter()
    packed = [writer.event(ids, {"text": "é", "other": other}) for _, ids, other in events]
    assert packed == [pack_event(ids, {"text": "é", "other": other}) for _, ids, other in events]
    index = [EventEntry(r, 1, 0, len(ids), len(p)) for (r, ids, _), p in zip(events, packed, strict=True)]
    body = b"".join(packed)
    assert writer.frame(channel, generation, index, body) == encode(Events(channel, generation, index, body))


def test_an_event_that_cannot_be_written_leaves_the_writer_as_it_was() -> None:
    writer = EventWriter()
    for token_ids, fields in [([1], {"text": "half", "x": object()}), ([-1], {}), ([1 << 32], {}), ([1, -1], {})]:
        with pytest.raises((TypeError, OverflowError, struct.error)):
            writer.event(token_ids, fields)
    assert writer.event([7], {"text": "a"}) == pack_event([7], {"text": "a"})


def array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


EMPTY_MAPS = array(MIB) + b"\x80" * MIB
EMPTY_MAPS_IN_ROWS = b"\x81\xa1a" + array(256) + (b"\xdc\x10\x00" + b"\x80" * 4096) * 256
GENERATE = b"\x96\x01\x02\x01\xa1a"
EVENTS_HEAD = b"\x96\x01\x12\x01\x01"


@pytest.mark.parametrize(
    "refused",
    [
        lambda: decode(GENERATE + EMPTY_MAPS + b"\xc4\x00", ALL),
        lambda: decode(GENERATE + b"\x81\xa1a" + EMPTY_MAPS + b"\xc4\x00", ALL),
        lambda: decode(b"\x96\x01\x02" + b"\x91" * MIB, ALL),
        lambda: decode(GENERATE + b"\x81\xa1a" * (MIB // 3), ALL),
        lambda: decode(EVENTS_HEAD + array(16) + (array(32768) + b"\x91\xc0" * 32768) * 16 + b"\xc4\x00", ALL),
        lambda: unpack_body(EMPTY_MAPS),
        lambda: unpack_body(EMPTY_MAPS_IN_ROWS),
        lambda: unpack_body(b"\x91" * MIB),
        lambda: unpack_body(b"\x81\xa1a" * (MIB // 3)),
    ],
    ids=[
        "maps in the head", "maps in the route", "arrays nested in the head", "maps nested in the route",
        "arrays in an index", "maps for a body", "rows of maps in a body", "arrays nested in a body",
        "maps nested in a body",
    ],
)  # fmt: skip
def test_a_mebibyte_of_small_things_costs_little(refused: Callable[[], object]) -> None:
    """Without a bound, a mebibyte of empty maps becomes 72 MiB of objects."""
    tracemalloc.start()
    try:
        with pytest.raises(FrameError) as raised:
            refused()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert raised.value.code is ErrorCode.BAD_FRAME
    assert peak < 6 * MIB


def test_every_kind_has_a_size_limit_below_the_sockets() -> None:
    assert set(limits.MAX_FRAME) == ALL
    for kind, limit in limits.MAX_FRAME.items():
        assert limit < limits.SOCKET_MAX_FRAME
        check_size(b"x" * limit, kind)
        with pytest.raises(FrameError, match=f"{kind.name} of {limit + 1} bytes: at most {limit} are allowed") as e:
            check_size(b"x" * (limit + 1), kind)
        assert e.value.code is ErrorCode.TOO_LARGE


def test_an_error_survives_the_wire() -> None:
    error = WireError(ErrorCode.OVERLOADED, "the queue is full", field="model", retry_after_ms=20)
    back = WireError.from_wire(unpack_body(pack_body(error.to_wire())))
    assert (back.code, back.message, back.field, back.retry_after_ms) == (303, "the queue is full", "model", 20)
    long = WireError(ErrorCode.CONTEXT_OVERFLOW, "the prompt has 9 tokens", overflow=(9, 8))
    assert WireError.from_wire(unpack_body(pack_body(long.again().to_wire()))).overflow == (9, 8)
    assert WireError.from_wire(long.to_wire() | {"context": "8"}).overflow is None
    newer = WireError.from_wire({"code": 9999, "name": "quota_exceeded", "message": "too much"})
    assert (newer.code, newer.message) == (ErrorCode.INTERNAL, "quota_exceeded: too much")
