"""Parse an answer that was divided in many ways."""

import codecs
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.answer_formats.parser import AnswerParser, MarkerPair
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from tests.answer_formats.answers import TOOLS

THINK = MarkerPair("<think>", "</think>")
EVERY = bool(os.environ.get("EVERY_DIVISION"))
"""Whether every division into three pieces is tried. That takes minutes, so it is only done for some answers else."""
DRAWN = 100
"""Number of divisions into three pieces that are drawn of the other answers."""


@dataclass(frozen=True)
class Cut:
    """The arguments of a call that has not ended."""

    text: str


Meant = list[tuple[str, object]]


def put_together(parts: list[Part]) -> Meant:
    """Return neighbouring parts of a kind as one. Check the order of the parts of calls."""
    found: Meant = []
    calls = 0
    arguments: str | None = None
    for part in parts:
        if isinstance(part, CallStart):
            assert arguments is None
            assert part.index == calls
            found.append((part.name, ""))
            arguments = ""
        elif isinstance(part, CallArguments):
            assert arguments is not None
            assert part.index == calls
            assert part.json
            arguments += part.json
        elif isinstance(part, CallEnd):
            assert arguments is not None
            assert part.index == calls
            try:
                found[-1] = (found[-1][0], json.loads(arguments))
            except ValueError:
                found[-1] = (found[-1][0], Cut(arguments))
            calls, arguments = calls + 1, None
        else:
            assert arguments is None
            kind = "text" if isinstance(part, Text) else "reasoning"
            assert isinstance(part, Text | Reasoning)
            assert part.text
            if found and found[-1][0] == kind:
                found[-1] = (kind, str(found[-1][1]) + part.text)
            else:
                found.append((kind, part.text))
    assert arguments is None
    return found


def parsed(
    format: str | None,
    pieces: Sequence[str],
    *,
    inside: bool = False,
    tools: bool = True,
    markers: MarkerPair = THINK,
) -> Meant:
    parser = AnswerParser(tool_format=format, tools=TOOLS if tools else (), reasoning=markers, inside_reasoning=inside)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return put_together([*parts, *parser.finish()])


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def by_bytes(text: str, size: int) -> list[str]:
    """Return the pieces that a decoder of UTF-8 makes of equal numbers of bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    data = text.encode()
    return [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]


def divisions(text: str, seed: int, *, every: bool) -> Iterator[list[str]]:
    """Return every division into one and two pieces, every or some into three, some into many, and such at bytes."""
    size = len(text)
    yield [text]
    yield list(text)
    for at in range(1, size):
        yield divided(text, [at])
    if every:
        for first in range(1, size):
            for second in range(first + 1, size):
                yield divided(text, [first, second])
    rng = random.Random(seed)
    if size > 2:
        for _ in range(DRAWN):
            yield divided(text, sorted(rng.sample(range(1, size), 2)))
    for _ in range(100):
        if size > 1:
            yield divided(text, sorted(rng.sample(range(1, size), min(size - 1, rng.randint(1, 12)))))
    for count in (1, 2, 3, 5, 7):
        yield by_bytes(text, count)


def check_divisions(
    format: str | None,
    text: str,
    meant: Meant,
    *,
    inside: bool = False,
    seed: int = 1,
    every: bool = EVERY,
    tools: bool = True,
    markers: MarkerPair = THINK,
) -> None:
    """Check that an answer has these parts, however it is divided. The pieces stand in the message of a failure."""
    for pieces in divisions(text, seed, every=every):
        found = parsed(format, pieces, inside=inside, tools=tools, markers=markers)
        assert found == meant, (f"seed {seed}", pieces)
