"""Serve the requests for chats and completions: ask the supervisor, and send the answers in OpenAI's shapes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers
from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of
from gateway.http.event_stream import EventStream, StreamedAnswer, WholeAnswer
from gateway.http.keep_alive import KeepAlive, OpenStream, comment
from gateway.openai.chunks import Shape
from gateway.openai.models import default_model
from gateway.openai.options import Wanted, read_chat, read_completion
from gateway.openai.streaming import send_answers, timings_of, usage, usages_of
from gateway.supervisor_link import SupervisorLink
from protocol.client.answers import Progress
from protocol.client.async_client import AsyncClient
from protocol.client.async_streams import AsyncChoices, AsyncStream
from protocol.errors import WireError
from protocol.process.gateway_settings import GatewaySettings

Prompt = dict[str, Any]
"""The option that holds a prompt: ``messages``, ``prompt`` or ``token_ids``."""


async def chat(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/chat/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    wanted = await _with_model(request, read_chat(await read_json(request, settings.max_body, caller)))
    return _answer(request, caller, wanted, [{}], is_chat=True)


async def completion(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    prompts, wanted = read_completion(await read_json(request, settings.max_body, caller))
    wanted = await _with_model(request, wanted)
    given = [{"prompt": each} if isinstance(each, str) else {"token_ids": each} for each in prompts]
    return _answer(request, caller, wanted, given, is_chat=False)


async def _with_model(request: Request, wanted: Wanted) -> Wanted:
    """Return the request with the name of the default model, if its sender has named none.

    The answer repeats the name that the sender has written. Without one, it has to name the model that answers.
    """
    return wanted if wanted.model else replace(wanted, model=await default_model(request, wanted.model))


def _answer(
    request: Request, caller: Caller, wanted: Wanted, prompts: Sequence[Prompt], *, is_chat: bool
) -> StreamedAnswer | WholeAnswer:
    settings: GatewaySettings = request.app.state.settings
    link: SupervisorLink = request.app.state.link
    keep_alive: KeepAlive = request.app.state.keep_alive
    shape = Shape(
        wanted.model, is_chat=is_chat, include_usage=wanted.include_usage, reasoning_key=settings.reasoning_key
    )

    async def stream(events: EventStream) -> None:
        progress: list[Progress | None] = [None]
        streams: tuple[AsyncStream, ...] = ()

        def silence() -> bytes:
            return shape.silence() if settings.keepalive == "chunk" else comment(_waits_for(streams, progress[0]))

        silent = OpenStream(events, silence)
        keep_alive.streams.add(silent)
        try:
            with _named(wanted):
                streams = _begin(link.client, caller, wanted, prompts, progress)
                await send_answers(events, streams, shape, wanted)
        finally:
            keep_alive.streams.discard(silent)

    async def whole() -> Response:
        with _named(wanted):
            streams = _begin(link.client, caller, wanted, prompts, None)
            if is_chat:
                answers = Answers(streams, wanted.tools)
                parsed = await answers.complete()
                body = shape.whole_chat(parsed, usage(answers.usages, wanted.n), timings_of(streams))
            else:
                texts = await AsyncChoices(streams, None).complete()
                body = shape.whole(texts, usage(usages_of(streams), wanted.n), timings_of(streams))
        return Response(body, media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)


def _waits_for(streams: Sequence[AsyncStream], newest: Progress | None) -> Progress | None:
    """Return what a request waits for: the newest report, or else its first place in the queue. None: for tokens."""
    if not streams or any(stream.text for stream in streams):
        return None
    if newest is None and (accepted := streams[-1].accepted):
        return Progress("queued", accepted.get("queue_position"))
    return newest


@contextmanager
def _named(wanted: Wanted) -> Iterator[None]:
    """Give the errors of a request the names of the fields that its sender used."""
    try:
        yield
    except WireError as e:
        e.field = wanted.names.get(e.field or "", e.field)
        raise


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
    try:
        for prompt in prompts:
            options: Any = wanted.options | prompt | caller.on_behalf_of()
            streams += client.choices(wanted.model, n=wanted.n, on_progress=tell, **options).streams
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return tuple(streams)
