"""The answers of a chat in parts: text, reasoning and calls of tools. Every API writes its own shapes of them.

The worker says with the first event of an answer how the model writes reasoning and calls (``StreamBase.format``). So
the gateway needs no knowledge of a model before an answer begins, also if the request itself has the model loaded.
"""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from protocol.answer_formats.parser import AnswerParser, MarkerPair
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning, Text, Tool
from protocol.client.answers import Delta, TokenLogprob
from protocol.client.async_client import AsyncChoices, AsyncStream
from protocol.messages import FinishReason

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer with at least one call. The worker calls it "stop"."""


class Piece(NamedTuple):
    """A piece of one answer.

    answer         the number of the answer
    parts          what the model has written, in its order. They may be none, while a marker may begin
    logprobs       one for each new token, if the request asked for them
    finish_reason  with the last piece: one of protocol.messages.FinishReason, or TOOL_CALLS
    """

    answer: int
    parts: list[Part]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


def is_plain(format: dict[str, Any], tools: Sequence[Tool]) -> bool:
    """Return whether an answer of this format is text and nothing else, so that no parser has to read it.

    format  ``StreamBase.format``
    """
    if format.get("reasoning") is not None or format.get("headers") is not None:
        return False
    return not tools or format.get("tools") is None


class AnswerReader:
    """Parses one answer.

    reasoning_tokens  tokens of the reasoning. A token that completes no part counts with the parts that come next. If
                      tokens complete both reasoning and other parts, the number of characters decides how many count
    """

    def __init__(self, stream: AsyncStream, tools: Sequence[Tool]) -> None:
        self.stream, self._tools = stream, tools
        self._parser: AnswerParser | None = None
        self._is_plain: bool | None = None
        self._undecided = 0
        self._called = False
        self.ended = False
        self.reasoning_tokens = 0

    def read(self, delta: Delta) -> list[Part]:
        """Return the parts that a delta completes."""
        if self._is_plain is None:
            self._begin()
        if self._parser is None:
            return [Text(delta.text)] if delta.text else []
        parts = self._parser.feed(delta.text) if delta.text else []
        self._note(parts, len(delta.token_ids))
        return parts

    def continues(self, delta: Delta) -> type[Reasoning] | type[Text] | None:
        """Return what a delta just continues: then its text is the only part, and it need not be read. None if it has
        to be. Few steps, because this runs for each token."""
        if self._parser is None or (kind := self._parser.continues(delta.text)) is None:
            return None
        if kind is Reasoning:
            self.reasoning_tokens += self._undecided + len(delta.token_ids)
        self._undecided = 0
        return kind

    def end(self) -> tuple[list[Part], str]:
        """Return the last parts, and the finish reason, of an answer that has ended."""
        self.ended = True
        parts = [] if self._parser is None else self._parser.finish()
        self._note(parts, 0)
        reason = self.stream.finish_reason or FinishReason.CANCELLED
        return parts, TOOL_CALLS if self._called and reason == FinishReason.STOP else reason

    def _begin(self) -> None:
        known = self.stream.format
        self._is_plain = is_plain(known, self._tools)
        if not self._is_plain:
            markers = known.get("reasoning")
            calls = known.get("tools")
            self._parser = AnswerParser(
                tool_format=known.get("headers") if calls is None else calls,
                tools=() if calls is None else self._tools,
                reasoning=None if markers is None else MarkerPair(*markers),
                inside_reasoning=bool(known.get("inside")),
            )

    def _note(self, parts: list[Part], tokens: int) -> None:
        self._undecided += tokens
        if not parts:
            return
        if len(parts) > 1 or isinstance(parts[0], CallStart | Reasoning):
            reasoned = sum(_length(part) for part in parts if isinstance(part, Reasoning))
            if reasoned:
                self.reasoning_tokens += math.ceil(self._undecided * reasoned / sum(map(_length, parts)))
            self._called = self._called or any(isinstance(part, CallStart) for part in parts)
        self._undecided = 0


def _length(part: Part) -> int:
    match part:
        case Text(text) | Reasoning(text) | CallArguments(_, text) | CallStart(_, text):
            return len(text)
    return 0


class Answers:
    """The answers of a chat, while they are generated. Iterate with ``async for`` for ``Piece`` objects.

    streams  the answers' streams, whose requests had ``with_format``
    tools    the tools that the model may call
    readers  read one answer each. A caller that takes the deltas from a stream itself gives them to its reader

    The iteration raises the error of a request as ``AsyncChoices`` does. If a task that waits for the next piece is
    cancelled, the requests are cancelled, too.
    """

    def __init__(self, streams: tuple[AsyncStream, ...], tools: Sequence[Tool]) -> None:
        self._choices = AsyncChoices(streams, None, tell_ends=True)
        self.readers = [AnswerReader(stream, tools) for stream in streams]
        self.streams = streams

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while True:
            index, delta = await self._choices.__anext__()
            if not self.readers[index].ended:
                return self._piece(index, delta)

    def _piece(self, index: int, delta: Delta) -> Piece:
        reader = self.readers[index]
        parts = reader.read(delta)
        reason: str | None = None
        if reader.stream.finish_reason is not None:
            last, reason = reader.end()
            parts = parts + last
        return Piece(index, parts, delta.logprobs, reason)

    @property
    def usages(self) -> list[dict[str, Any]]:
        """Return the usage of each answer, as ``Completion.usage``, with ``reasoning_tokens`` if there are any."""
        return [
            reader.stream.usage | ({"reasoning_tokens": reader.reasoning_tokens} if reader.reasoning_tokens else {})
            for reader in self.readers
        ]

    async def complete(self) -> "list[ParsedAnswer]":
        """Read all answers to their ends, and return them by index."""
        whole = [ParsedAnswer() for _ in self.streams]
        async for piece in self:
            whole[piece.answer].add(piece)
        return whole


@dataclass(slots=True)
class Block:
    """Neighbouring parts of one kind, put together.

    pieces  of the text, of the reasoning, or of the call's arguments
    name    the name of the tool that is called
    id      the id of the call; None if the model gave none
    """

    kind: Literal["text", "reasoning", "call"]
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    id: str | None = None

    @property
    def text(self) -> str:
        """The whole text. The arguments of a call are a JSON object, unless the answer was cut within them."""
        return "".join(self.pieces)


@dataclass(slots=True)
class ParsedAnswer:
    """A complete answer: its blocks in the order in which the model wrote them."""

    blocks: list[Block] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    _calls: dict[int, Block] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        for part in piece.parts:
            match part:
                case Text(text):
                    self._last("text").pieces.append(text)
                case Reasoning(text):
                    self._last("reasoning").pieces.append(text)
                case CallStart(index, name, call_id):
                    self._calls[index] = call = Block("call", name=name, id=call_id)
                    self.blocks.append(call)
                case CallArguments(index, json):
                    self._calls[index].pieces.append(json)
                case CallEnd():
                    pass
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason

    def _last(self, kind: Literal["text", "reasoning"]) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    def joined(self, kind: Literal["text", "reasoning"]) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """Return the calls in their order."""
        return [block for block in self.blocks if block.kind == "call"]
