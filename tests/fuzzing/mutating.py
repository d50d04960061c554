"""Frames made from valid ones: changed, cut, spliced, and with msgpack tokens that announce the largest sizes.

Half of the frames are changed in their body only, and get a correct length of the body. Otherwise nearly all frames
would be refused for that length.
"""

import random
from collections.abc import Sequence

import msgpack

TOKENS = (
    b"\xc0", b"\xc1", b"\xc2", b"\x00", b"\x7f", b"\xff", b"\xcc\xff", b"\xcd\xff\xff", b"\xce\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xd3" + b"\xff" * 8, b"\xca\x7f\xc0\0\0", b"\xca\x7f\x80\0\0",
    b"\xcb\x7f\xf8" + bytes(6), b"\xcb\xff\xf0" + bytes(6), b"\xcb\x00" + bytes(6) + b"\x01", b"\x80", b"\x81", b"\x8f",
    b"\x90", b"\x91", b"\x9f", b"\xa0", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa4\xf0\x9f\x98\x80", b"\xbf",
    b"\xc4\x00", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x00\x05", b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x01\x00",
    b"\xd6\xff\0\0\0\0", b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\x01\x00\x00", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 40, b"\xdc\xff\xff" * 40,
)  # fmt: skip
"""Values and headers at the limits of msgpack."""
_LONGEST = 4096


class Mutator:
    """An endless source of frames. Equal seeds and corpora give equal frames."""

    def __init__(self, corpus: Sequence[bytes], seed: int) -> None:
        self._chance = random.Random(seed)
        self._corpus = list(corpus)
        self._split = [parts for frame in corpus if (parts := _split(frame)) is not None]

    def frame(self) -> bytes:
        """Return the next mutated frame."""
        draw = self._chance.random
        if draw() < 0.5 and self._split:
            head, body = self._split[int(draw() * len(self._split))]
            body = self._mutated(body)
            size = len(body)
            return head + (b"\xc4" + bytes((size,)) if size < 256 else b"\xc5" + size.to_bytes(2, "big")) + body
        return self._mutated(self._corpus[int(draw() * len(self._corpus))])

    def _mutated(self, frame: bytes) -> bytes:
        draw = self._chance.random
        mutable = bytearray(frame)
        for _ in range(1 + int(draw() * 3)):
            size = len(mutable)
            at, what = int(draw() * (size + 1)), int(draw() * 8)
            if what <= 1 and at < size:
                mutable[at] = int(draw() * 256)
            elif what == 2 and at < size:
                mutable[at] ^= 1 << int(draw() * 8)
            elif what <= 4:
                token = TOKENS[int(draw() * len(TOKENS))]
                mutable[at : at + (len(token) if what == 3 else 0)] = token
            elif what == 5:
                del mutable[at : at + 1 + int(draw() * 8)]
            elif what == 6:
                other = self._corpus[int(draw() * len(self._corpus))]
                start = int(draw() * len(other))
                mutable[at : at + int(draw() * 8)] = other[start : start + 1 + int(draw() * 32)]
            elif draw() < 0.2:
                del mutable[at:]
            else:
                mutable[at:at] = mutable[at : at + 16] * (1 + int(draw() * 8))
        return bytes(mutable[:_LONGEST])


def _split(frame: bytes) -> tuple[bytes, bytes] | None:
    """Return (head, body) of a frame that ends with a body, else None.

    The head followed by another body, packed as a msgpack bin, is a frame again.
    """
    try:
        values = msgpack.unpackb(frame)
    except Exception:  # a test vector of malformed frames
        return None
    if not isinstance(values, list) or not isinstance(values[-1], bytes):
        return None
    packed = msgpack.packb(values[-1])
    return (frame[: -len(packed)], values[-1]) if frame.endswith(packed) else None
