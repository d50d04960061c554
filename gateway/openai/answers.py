"""Serve the requests for chats and completions: ask the supervisor, and send the answers in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of
from gateway.http.event_stream import EventStream, StreamedAnswer, WholeAnswer
from gateway.http.keep_alive import KeepAlive, OpenStream, comment
from gateway.openai.chunks import DONE, Shape, chat_logprobs, completion_logprobs, finish_reason, usage_of
from gateway.openai.options import Wanted, read_chat, read_completion
from protocol.client.answers import Progress, TokenLogprob
from protocol.client.async_client import AsyncClient
from protocol.client.async_streams import AsyncChoices, AsyncStream
from protocol.process.gateway_settings import GatewaySettings

Prompt = dict[str, Any]
"""The option that holds a prompt: ``messages``, ``prompt`` or ``token_ids``."""


async def chat(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/chat/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    wanted = read_chat(await read_json(request, settings.max_body))
    return _answer(request, caller, wanted, [{}], is_chat=True)


async def completion(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    prompts, wanted = read_completion(await read_json(request, settings.max_body))
    given = [{"prompt": each} if isinstance(each, str) else {"token_ids": each} for each in prompts]
    return _answer(request, caller, wanted, given, is_chat=False)


def _answer(
    request: Request, caller: Caller, wanted: Wanted, prompts: Sequence[Prompt], *, is_chat: bool
) -> StreamedAnswer | WholeAnswer:
    client: AsyncClient = request.app.state.link.client
    keep_alive: KeepAlive = request.app.state.keep_alive
    shape = Shape(wanted.model, is_chat=is_chat, include_usage=wanted.include_usage)

    async def stream(events: EventStream) -> None:
        progress: list[Progress | None] = [None]
        silent = OpenStream(events, lambda: comment(progress[0]))
        keep_alive.streams.add(silent)
        try:
            streams = _begin(client, caller, wanted, prompts, progress)
            await _stream(events, streams, shape, wanted)
        finally:
            keep_alive.streams.discard(silent)

    async def whole() -> Response:
        streams = _begin(client, caller, wanted, prompts, None)
        answers = await AsyncChoices(streams, None).complete()
        return Response(shape.whole(answers, _usage(streams, wanted.n)), media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)


def _begin(
    client: AsyncClient,
    caller: Caller,
    wanted: Wanted,
    prompts: Sequence[Prompt],
    progress: list[Progress | None] | None,
) -> tuple[AsyncStream, ...]:
    """Send the requests, and return their streams: for each prompt ``n``, one after the other.

    progress  a list of one: the newest report of any request is put there
    """

    def report(_: int, new: Progress) -> None:
        assert progress is not None
        progress[0] = new

    tell = None if progress is None else report
    streams: list[AsyncStream] = []
    for prompt in prompts:
        options: Any = wanted.options | prompt | caller.on_behalf_of()
        streams += client.choices(wanted.model, n=wanted.n, on_progress=tell, **options).streams
    return tuple(streams)


async def _stream(events: EventStream, streams: tuple[AsyncStream, ...], shape: Shape, wanted: Wanted) -> None:
    """Send the pieces of the answers as they come, then their ends."""
    begun = b"".join(shape.begin(index) for index in range(len(streams)))
    if len(streams) == 1 and not wanted.options.get("logprobs"):
        async for delta in streams[0]:  # as few steps as possible: this runs for each token
            if delta.text:
                await events.send(begun + shape.piece(0, delta.text))
                begun = b""
    else:
        sent = [0] * len(streams)
        async for index, delta in AsyncChoices(streams, None):
            if delta.text or delta.logprobs:
                logprobs = _logprobs(shape, delta.logprobs, sent[index]) if wanted.options.get("logprobs") else None
                sent[index] += len(delta.text)
                await events.send(begun + shape.piece(index, delta.text, logprobs))
                begun = b""
    parts = [shape.finish(index, finish_reason(stream.finish_reason or "")) for index, stream in enumerate(streams)]
    if wanted.include_usage:
        timings = streams[0].timings if len(streams) == 1 else {}
        parts.append(shape.totals(_usage(streams, wanted.n), timings))
    await events.send(b"".join((begun, *parts, DONE)))


def _logprobs(shape: Shape, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    return chat_logprobs(entries) if shape.is_chat else completion_logprobs(entries, offset)


def _usage(streams: Sequence[AsyncStream], n: int) -> dict[str, Any]:
    """Return the usage of all answers. A prompt counts once, however many answers it has."""
    each = [usage_of(stream.usage for stream in streams[first : first + n]) for first in range(0, len(streams), n)]
    if len(each) == 1:
        return each[0]
    return usage_of([]) | {
        key: sum(one[key] for one in each) for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
