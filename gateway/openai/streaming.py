"""Send the answers of OpenAI's API as server-sent events, while they are generated."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from answer_formats.parser import Tool
from answer_formats.parts import Reasoning, Text
from gateway.answering import Answers, Piece, is_plain
from gateway.http.event_stream import EventStream
from gateway.openai.chunks import DONE, Shape, usage_of
from gateway.openai.logprobs import TextOffset, chat_logprobs, completion_logprobs
from gateway.openai.options import Wanted
from gateway.openai.prompts import EchoedPrompt
from protocol.client.answers import Delta
from protocol.client.async_streams import AsyncChoices, AsyncStream


async def send_answers(
    events: EventStream,
    streams: tuple[AsyncStream, ...],
    shape: Shape,
    wanted: Wanted,
    echoed: Callable[[int], Awaitable[EchoedPrompt]] | None = None,
) -> None:
    """Send the pieces of the answers as they come, and the end of each answer with its last piece.

    echoed  returns the prompt of an answer, if answers begin with their prompts. It is called once the answer has begun
    """
    sending = _Sending(events, streams, shape, bool(wanted.options.get("logprobs")))
    alone = len(streams) == 1 and not sending.with_logprobs
    if not shape.is_chat:
        await (sending.one_text() if alone and echoed is None else sending.texts(echoed))
        usages = usages_of(streams)
    elif alone:
        usages = await sending.one_chat(wanted.tools)
    else:
        answers = Answers(streams, wanted.tools)
        async for piece in answers:
            await sending.piece(piece)
        usages = answers.usages
    if wanted.include_usage:
        sending.last.append(shape.totals(usage(usages, wanted.n), timings_of(streams)))
    await sending.send([*sending.last, DONE])


class _Sending:
    """Sends the events of one request. The first event has the beginnings of all answers before it.

    last  chunks that the caller sends together with the end of the stream
    """

    def __init__(
        self, events: EventStream, streams: tuple[AsyncStream, ...], shape: Shape, with_logprobs: bool
    ) -> None:
        self._events, self._streams, self._shape = events, streams, shape
        self.with_logprobs = with_logprobs
        self.last: list[bytes] = []
        shape.beginning = b"".join(shape.begin(index) for index in range(len(streams)))

    async def send(self, chunks: Sequence[bytes]) -> None:
        if chunks:
            begun, self._shape.beginning = self._shape.beginning, b""
            await self._events.send(b"".join((begun, *chunks)))

    async def one_text(self) -> None:
        """Send the only answer, which is text."""
        stream, send, shape = self._streams[0], self._events.send, self._shape
        async for delta in stream:  # as few steps as possible: this runs for each token
            if delta.text:
                await send(shape.beginning + shape.piece(0, delta.text))
                shape.beginning = b""
        self.last.append(shape.finish(0, stream.finish_reason or ""))

    async def one_chat(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Send the only answer of a chat, and return its usage. The first event says whether it is text only."""
        stream, send, shape = self._streams[0], self._events.send, self._shape
        first = await anext(stream, Delta("", ()))
        if is_plain(stream.format, tools):
            if first.text:
                await self.send([shape.piece(0, first.text)])
            await self.one_text()
            return usages_of(self._streams)
        answers = Answers(self._streams, tools)
        reader = answers.readers[0]
        await self.send(shape.parts(0, reader.read(first)))
        async for delta in stream:  # as few steps as possible: this runs for each token
            kind = reader.continues(delta)
            if kind is Text:
                chunk = shape.piece(0, delta.text)
            elif kind is Reasoning:
                chunk = shape.reasoning(0, delta.text)
            elif not (chunk := b"".join(shape.parts(0, reader.read(delta)))):
                continue
            await send(shape.beginning + chunk)
            shape.beginning = b""
        last, reason = reader.end()
        self.last += [*shape.parts(0, last), shape.finish(0, reason)]
        return answers.usages

    async def texts(self, echoed: Callable[[int], Awaitable[EchoedPrompt]] | None) -> None:
        """Send the answers of a completion, perhaps with log-probabilities, perhaps behind their prompts."""
        offsets = [TextOffset() for _ in self._streams]
        prompts: dict[int, EchoedPrompt] = {}
        echoing = set(range(len(self._streams))) if echoed is not None else set()
        async for index, delta in AsyncChoices(self._streams, None, tell_ends=True):
            chunks = []
            if index in echoing and echoed is not None:
                if (prompt := prompts.get(index)) is None:
                    prompt = prompts[index] = await echoed(index)
                if delta.prompt is not None:
                    shown = prompt.logprobs(delta.prompt)
                    chunks.append(self._shape.piece(index, prompt.place.take(), shown))
                # Without an answer, the last piece of the prompt and the end may be read together.
                if delta.prompt is None or self._streams[index].finish_reason is not None:
                    if rest := prompt.place.take(rest=True):
                        chunks.append(self._shape.piece(index, rest))
                    offsets[index] = TextOffset(len(prompt.text))
                    echoing.remove(index)
            if delta.text or delta.logprobs:
                logprobs = completion_logprobs(delta.logprobs, offsets[index]) if self.with_logprobs else None
                chunks.append(self._shape.piece(index, delta.text, logprobs))
            if (reason := self._streams[index].finish_reason) is not None:
                chunks.append(self._shape.finish(index, reason))
            await self.send(chunks)

    async def piece(self, piece: Piece) -> None:
        """Send a piece of a chat's answer."""
        shape = self._shape
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
        chunks = shape.parts(piece.answer, piece.parts, logprobs)
        if piece.finish_reason is not None:
            chunks.append(shape.finish(piece.answer, piece.finish_reason))
        await self.send(chunks)


def usages_of(streams: Sequence[AsyncStream]) -> list[dict[str, Any]]:
    """Return the usage of each answer."""
    return [stream.usage for stream in streams]


def usage(usages: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """Return the usage of all answers. A prompt counts once, however many answers it has."""
    return usage_of(usages[i : i + n] for i in range(0, len(usages), n))


def timings_of(streams: Sequence[AsyncStream]) -> dict[str, Any]:
    """Return the timings of the only answer. Several answers have none in common."""
    return streams[0].timings if len(streams) == 1 else {}
