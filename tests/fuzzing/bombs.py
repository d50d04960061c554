"""Frames that would cost far more to decode than to send, most of them as large as their kind may be."""

from collections.abc import Iterator

from protocol import limits
from protocol.codec import encode
from protocol.messages import AnswerMessage, Call, Generate, Hello, Kind, Reply
from tests.fuzzing.corpus import DIRECTIONS

ROOM = 3 * limits.MIB - 300
CHAT = b"\xa8messages\x91\x82\xa4role\xa4user\xa7content\xa1x"


def array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


def mapping(pairs: list[bytes]) -> bytes:
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(pairs)


def text(content: bytes) -> bytes:
    return b"\xdb" + len(content).to_bytes(4, "big") + content


def rows(item: bytes, key: bytes = b"\xa1a") -> bytes:
    """Return a packed {key: [[item, item, ...], ...]} of the largest size."""
    count = max(1, ROOM // (len(item) * 65_535))
    return b"\x81" + key + array(count) + (array(65_535) + item * 65_535) * count


def one_wide_character(key: bytes) -> bytes:
    """Return a body with a text that Python stores in four bytes a character, because of its last character."""
    return b"\x81" + key + text(b"a" * (ROOM - 40) + "😀".encode())


BODIES: dict[str, bytes] = {
    "rows of nil": rows(b"\xc0"),
    "rows of numbers": rows(b"\xcd\xff\xff"),
    "rows of large numbers": rows(b"\xcf" + b"\xff" * 8),
    "rows of NaN": rows(b"\xcb\x7f\xf8" + bytes(6)),
    "rows of short strings": rows(b"\xa2xy"),
    "rows of short bins": rows(b"\xc4\x02xy"),
    "rows of empty maps": b"\x81\xa1a" + array(256) + (b"\xdc\x10\x00" + b"\x80" * 4096) * 256,
    "maps of numbers": b"\x81\xa1a" + array(90) + mapping([b"\xa4%04x\xcd\x10\x00" % i for i in range(4096)]) * 90,
    "arrays announced in one another": array(65_536) * 1000,
    "arrays announced in one another, all that is not tried": (b"\xdc\xff\xff" * 341)[: limits.UNTRIED_BODY],
    "maps announced in one another": b"\x81\xa1a" + b"\xde\x0f\xff\xa1a" * 1000,
    "arrays nested": b"\x91" * ROOM,
    "maps nested": b"\x81\xa1a" * (ROOM // 3),
    "unknown fields": mapping([b"\xa4%04x\xc0" % i for i in range(4096)]),
    "unknown fields with long names": mapping([b"\xda\x02\x00" + b"%04x" % i * 128 + b"\xc0" for i in range(4096)]),
    "one wide character in a prompt": one_wide_character(b"\xa6prompt"),
    "one wide character in a name": b"\x81" + text(b"a" * (ROOM - 40) + "😀".encode()) + b"\xc0",
    "messages without anything": b"\x81\xa8messages" + array(8_100) + b"\x80" * 8_100,
    "messages, as many as can be": b"\x81\xa8messages" + array(8_100) + b"\x82\xa4role\xa4user\xa7content\xa1x" * 8_100,
    "messages with unknown fields": b"\x81\xa8messages"
    + array(8_100)
    + b"\x84\xa4role\xa4user\xa7content\xa1x\xa1a\xc0\xa1b\xc0" * 8_100,
    "tools full of strings": b"\x82" + CHAT + b"\xa5tools"
    + array(200) + (b"\x81\xa1a" + array(480) + b"\xa2xy" * 480) * 200,
    "tools full of arrays": b"\x82" + CHAT + b"\xa5tools\x91\x81\xa1a" + array(8_100) + b"\x91\xc0" * 8_100,
    "tools nested": b"\x82" + CHAT + b"\xa5tools\x91" + b"\x81\xa1a" * 1000 + b"\xc0",
    "a schema of strings": b"\x82\xa6prompt\xa1a\xabjson_schema\x81\xa1a" + array(65_000) + b"\xa2xy" * 65_000,
    "a schema of brackets": b"\x82\xa6prompt\xa1a\xabjson_schema" + text(b"[" * 262_000 + b"]" * 262_000),
    "a schema of maps": b"\x82\xa6prompt\xa1a\xabjson_schema" + text(b'{"a":' * 900),
    "a schema of one number": b"\x82\xa6prompt\xa1a\xabjson_schema" + text(b"1" * 524_000),
    "a schema that nests": b"\x82\xa6prompt\xa1a\xabjson_schema" + b"\x81\xa1a" * 1000 + b"\xc0",
    "biases": b"\x82\xa6prompt\xa1a\xaalogit_bias" + mapping([b"\xa4%04d\x01" % i for i in range(1024)]),
    "banned tokens": b"\x82\xa6prompt\xa1a\xadbanned_tokens" + array(65_535) + b"\xcd\x7f\xff" * 65_535,
    "stop strings": b"\x82\xa6prompt\xa1a\xa4stop" + array(65_535) + b"\xa0" * 65_535,
    "an extension": b"\x81\xa1a\xc9\x00\x20\x00\x00\x01" + bytes(2 << 20),
    "logprobs": b"\x81\xa8logprobs" + array(8_100) + b"\x93\xc0\xa0\xc0" * 8_100,
}  # fmt: skip
EVENTS = b"\x96\x01\x12\x01\x01"
FRAMES: dict[str, bytes] = {
    "events without end": EVENTS
    + array(8_192) + (b"\x95" + (b"\xcf" + b"\x0f" * 8) * 2 + bytes(3)) * 8_192 + b"\xc4\0",
    "events announced in one another": EVENTS + array(65_536) * 1000,
    "events announced in one another, all that is not tried": (EVENTS
    + b"\xdc\x02\xa0" * 2000)[: limits.UNTRIED_EVENTS],
    "events of small arrays": EVENTS + array(16) + (array(8_192) + b"\x91\xc0" * 8_192) * 16 + b"\xc4\0",
    "one event of three megabytes": EVENTS + b"\x91\x95\x01\0\0\0" + b"\xce" + ROOM.to_bytes(4, "big")
    + b"\xc6" + ROOM.to_bytes(4, "big") + bytes(ROOM),
    "arrays in a route": b"\x96\x01\x02\x01\xa1a\x81\xa1a" + array(1 << 20) + b"\x80" * (1 << 20) + b"\xc4\0",
    "a frame of sixteen megabytes": encode(Hello(bytes((16 << 20) - 64))),
    "a request id that announces an array": b"\x96\x01\x02\xdd\x05\xf0\x00\x00" + bytes(64),
}  # fmt: skip


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, direction, frame) for every bomb in every kind of frame that can carry it."""
    for name, body in BODIES.items():
        carriers = {
            "client_to_supervisor": (Generate(1, "m", {}, body), Call(1, "tokenize", body)),
            "worker_to_supervisor": (AnswerMessage(1, body),),
            "supervisor_to_client": (Reply(3, body),),
        }
        for direction, messages in carriers.items():
            for message in messages:
                yield f"{name}, in {message.kind.name}", direction, encode(message)
    for name, frame in FRAMES.items():
        for direction, kinds in DIRECTIONS.items():
            if Kind(frame[2]) in kinds:
                yield name, direction, frame
