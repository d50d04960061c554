"""Write down a session in hex: the frames that the codec makes, and the meaning of each of their bytes."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import fields

from protocol.codec import encode, pack_body, pack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import (
    Accepted,
    Call,
    Cancel,
    Credit,
    Error,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    Welcome,
)
from tools.docs.markdown import GENERATED

WIDTH = 16
"""Bytes in one line."""
COLUMN = 66
"""Column where the meaning begins."""
Row = tuple[int, bytes, str]
"""(depth, bytes, meaning)"""


def _events(*events: tuple[int, EventFlag | int, tuple[int, ...], dict[str, object]]) -> Events:
    """Return EVENTS of request 1, as a worker makes it."""
    packed = [pack_event(ids, keys) for _, _, ids, keys in events]
    index = [
        EventEntry(1, seq, int(flags), len(ids), len(event))
        for (seq, flags, ids, _), event in zip(events, packed, strict=True)
    ]
    return Events(3, 1, index, b"".join(packed))


MODEL = {"name": "letters", "state": "ready", "context": 2048, "chat": False}
USAGE = {"prompt_tokens": 8, "completion_tokens": 5}
TIMINGS = {"queue_ms": 0.25}
END: dict[str, object] = {"text": "", "finish_reason": "stop", "usage": USAGE, "timings": TIMINGS}
SESSION: tuple[tuple[str, Message], ...] = (
    ("The client is connected and has seen that its own user listens.", Hello(pack_body({"library": "example/1.0"}))),
    (
        "The supervisor begins the session.",
        Welcome(
            pack_body(
                {
                    "server": "modelctl 0.1.0",
                    "session": "5f1d2c3b4a596877",
                    "window": 256,
                    "max_frame": 16 << 20,
                    "models": [MODEL],
                }
            )
        ),
    ),
    (
        "The client asks the model `letters` to sort letters.",
        Generate(
            1, "letters", {"priority": "interactive"},
            pack_body({"prompt": "sort: d b a c ->", "max_tokens": 32, "temperature": 0.0}),
        ),
    ),
    ("The request is accepted.", Accepted(1, pack_body({"model": "letters", "queue_position": 0}))),
    ("The first token.", _events((0, EventFlag.FIRST, (269,), {"text": " a"}))),
    (
        "Two events of the request in one frame. The second one holds two tokens, as with speculation.",
        _events((1, 0, (289,), {"text": " b"}), (2, 0, (288, 436), {"text": " c d"})),
    ),
    ("The supervisor looks whether the client is there.", Ping(0)),
    ("The client answers.", Pong(0)),
    ("The end. Its one token, end of sequence, has no text.", _events((3, EventFlag.FINISHED, (2,), END))),
)  # fmt: skip
OTHERS: tuple[tuple[str, Message], ...] = (
    ("The client has consumed 128 events of request 1 and grants as many.", Credit(1, 128)),
    ("The client cancels request 1.", Cancel(1)),
    ("The client asks to cancel a request by its name.", Call(2, "cancel_request", pack_body({"id": "12-3"}))),
    ("The supervisor answers the call.", Reply(2, pack_body({"result": {}}))),
    (
        "The supervisor refuses the GENERATE of request 3.",
        Error(
            3,
            pack_body(
                WireError(
                    ErrorCode.MODEL_NOT_FOUND, "no model 'leters' is configured: there is letters", field="model"
                ).to_wire()
            ),
        ),
    ),
)  # fmt: skip
FROM_CLIENT = (Hello, Generate, Cancel, Credit, Call, Pong)


def transcript() -> str:
    """Return the session, and single frames of other kinds."""
    parts = [GENERATED.format(source="tools/docs/wire_transcript.py by the codec")]
    parts += [_shown(sentence, message) for sentence, message in SESSION]
    parts += [
        "Frames that did not occur in this session:",
        *(_shown(sentence, message) for sentence, message in OTHERS),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(sentence: str, message: Message) -> str:
    arrow = "client → supervisor" if isinstance(message, FROM_CLIENT) else "supervisor → client"
    lines = [f"{arrow}: {message.kind.name}, {len(encode(message))} bytes"]
    for depth, octets, meaning in explain(message):
        chunks = [octets[at : at + WIDTH] for at in range(0, len(octets), WIDTH)] or [b""]
        for number, chunk in enumerate(chunks):
            text = f"{'   ' * depth}{chunk.hex(' ')}"
            lines.append(f"{text:<{COLUMN}}{meaning}" if number == 0 else text)
    return f"{sentence}\n\n```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def explain(message: Message) -> Iterator[Row]:
    """Yield the bytes of a message's frame in order, with their meaning."""
    frame = encode(message)
    names = [element.name for element in fields(message) if element.name != "kind"]  # type: ignore[arg-type]
    reader = _Reader(frame)
    yield from reader.value(0, "the message: ")
    yield from reader.value(1, "version ")
    yield 1, reader.take(1), f"kind {int(message.kind)}, {message.kind.name}"
    for name in names:
        if name == "index" and isinstance(message, Events):
            yield from reader.value(1, "index: ")
            for entry in message.index:
                yield from reader.value(2, "entry: ")
                for part in entry._fields:
                    yield from reader.value(3, f"{part} ", flags=part == "flags")
        elif name == "body":
            yield from reader.header(1, "body: ")
            if not isinstance(message, Events):
                yield from reader.value(2, "")
                continue
            for entry in message.index:
                if entry.tokens:
                    ids = reader.take(4 * entry.tokens)
                    text = ", ".join(map(str, struct.unpack(f"<{entry.tokens}I", ids)))
                    yield 2, ids, f"ids of event {entry.seq}: {text}"
                yield from reader.value(2, f"map of event {entry.seq}: ")
        else:
            yield from reader.value(1, f"{name} ")
    assert reader.at == len(frame), "bytes were left over"


class _Reader:
    """A parser that takes a frame apart, value by value. It knows only the forms of msgpack that the codec writes."""

    def __init__(self, frame: bytes) -> None:
        self.frame, self.at = frame, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.frame[self.at - count : self.at]

    def header(self, depth: int, label: str) -> Iterator[Row]:
        """Yield the head of a bin: its form and its length."""
        first = self.frame[self.at]
        octets = self.take(1 + {0xC4: 1, 0xC5: 2, 0xC6: 4}[first])
        yield depth, octets, f"{label}bin of {int.from_bytes(octets[1:], 'big')} bytes"

    def value(self, depth: int, label: str, *, flags: bool = False) -> Iterator[Row]:
        """Yield one value: a row for a scalar, more for an array or a map."""
        first = self.frame[self.at]
        if first & 0xF0 == 0x80:
            yield depth, self.take(1), f"{label}map of {first & 0x0F}"
            for _ in range(first & 0x0F):
                yield from self.value(depth + 1, "")
                yield from self.value(depth + 2, "")
        elif first & 0xF0 == 0x90:
            yield depth, self.take(1), f"{label}array of {first & 0x0F}"
            if label == "":
                for _ in range(first & 0x0F):
                    yield from self.value(depth + 1, "")
        elif first & 0xE0 == 0xA0 or first == 0xD9:
            head = self.take(1 if first != 0xD9 else 2)
            text = self.take(first & 0x1F if first != 0xD9 else head[1])
            yield depth, head + text, f'{label}"{text.decode()}"'
        else:
            octets, number = self._scalar(first)
            names = [str(flag.name) for flag in EventFlag if flags and int(number) & flag]
            yield depth, octets, f"{label}{number}{': ' + ', '.join(names) if names else ''}"

    def _scalar(self, first: int) -> tuple[bytes, int | float | bool | str]:
        if first < 0x80:
            return self.take(1), first
        size, read = _SCALARS[first]
        octets = self.take(1 + size)
        return octets, read(octets[1:])


def _unsigned(octets: bytes) -> int:
    return int.from_bytes(octets, "big")


_SCALARS: dict[int, tuple[int, Callable[[bytes], int | float | bool | str]]] = {
    0xC0: (0, lambda _: "null"),
    0xC2: (0, lambda _: "false"),
    0xC3: (0, lambda _: "true"),
    0xCB: (8, lambda octets: struct.unpack(">d", octets)[0]),
    0xCC: (1, _unsigned),
    0xCD: (2, _unsigned),
    0xCE: (4, _unsigned),
    0xCF: (8, _unsigned),
}
