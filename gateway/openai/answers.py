"""Serve the requests for chats and completions: ask the supervisor, and send the answers in OpenAI's shapes."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers
from gateway.asking import Prompt, begin, named, trace_ids_of, waits_for, with_model
from gateway.http.body import read_json
from gateway.http.callers import Caller, caller_of
from gateway.http.event_stream import EventStream, StreamedAnswer, WholeAnswer
from gateway.http.keep_alive import KeepAlive, LoadLines, comment
from gateway.http.notes import notes_of
from gateway.openai.chunks import Shape
from gateway.openai.options import Wanted, read_chat, read_completion
from gateway.openai.prompts import EchoedPrompt, WholePrompt, whole_prompt
from gateway.openai.streaming import send_answers, timings_of, usage, usages_of
from gateway.supervisor_link import SupervisorLink
from protocol.client.answers import Progress, text_in
from protocol.client.async_streams import AsyncChoices, AsyncStream
from protocol.client.request_builder import pack_token_ids
from protocol.process.gateway_settings import GatewaySettings


async def chat(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/chat/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    wanted = await with_model(
        request, read_chat(await read_json(request, settings.max_body, caller), notes_of(request))
    )
    return _answer(request, caller, wanted, [{}], is_chat=True)


async def completion(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/completions."""
    settings: GatewaySettings = request.app.state.settings
    caller = caller_of(request)
    prompts, wanted = read_completion(await read_json(request, settings.max_body, caller), notes_of(request))
    wanted = await with_model(request, wanted)
    given = [{"prompt": each} if isinstance(each, str) else {"token_ids": each} for each in prompts]
    return _answer(request, caller, wanted, given, is_chat=False)


def _answer(
    request: Request, caller: Caller, wanted: Wanted, prompts: Sequence[Prompt], *, is_chat: bool
) -> StreamedAnswer | WholeAnswer:
    settings: GatewaySettings = request.app.state.settings
    link: SupervisorLink = request.app.state.link
    keep_alive: KeepAlive = request.app.state.keep_alive
    shape = Shape(
        wanted.model, is_chat=is_chat, include_usage=wanted.include_usage, reasoning_key=settings.reasoning_key
    )
    trace_ids = trace_ids_of(request, shape.id)

    async def echoed(index: int) -> EchoedPrompt:
        """Return the prompt of an answer that has begun, so that a worker can turn its ids into text."""
        prompt = prompts[index // wanted.n]
        text = prompt.get("prompt")
        if text is None:
            params = {"model": wanted.model, "token_ids": pack_token_ids(prompt["token_ids"])}
            text = text_in(await link.call(caller, "detokenize", **params))
        options = wanted.options
        return EchoedPrompt(text, options.get("top_logprobs") or 0 if options.get("logprobs") else None)

    async def prompt_of(index: int, stream: AsyncStream) -> WholePrompt:
        return await whole_prompt(stream.prompt, await echoed(index) if wanted.echo else None, wanted.vllm_top)

    async def stream(events: EventStream) -> None:
        progress: list[Progress | None] = [None]
        streams: tuple[AsyncStream, ...] = ()

        def silence() -> bytes:
            return shape.silence() if settings.keepalive == "chunk" else comment(waits_for(streams, progress[0]))

        lines = LoadLines(wanted.model)

        def news() -> bytes:
            if not (line := lines.next(waits_for(streams, progress[0]))):
                return b""
            begun, shape.beginning = shape.beginning, b""
            return begun + shape.reasoning(0, line)

        tells = is_chat and settings.progress == "reasoning"
        with keep_alive.keeping(events, silence, news if tells else None), named(wanted):
            streams = await begin(request, caller, wanted, prompts, progress, trace_ids, keeps=wanted.echo)
            await send_answers(events, streams, shape, wanted, echoed if wanted.echo else None)

    async def whole() -> Response:
        with named(wanted):
            streams = await begin(request, caller, wanted, prompts, None, trace_ids, keeps=wanted.echo)
            if is_chat:
                answers = Answers(streams, wanted.tools)
                parsed = await answers.complete()
                counts, times = usage(answers.usages, wanted.n), timings_of(streams)
                body = shape.whole_chat(parsed, counts, times, await prompt_of(0, streams[0]))
            else:
                texts = await AsyncChoices(streams, None).complete()
                shown = [await prompt_of(index, stream) for index, stream in enumerate(streams)]
                body = shape.whole(texts, usage(usages_of(streams), wanted.n), timings_of(streams), shown)
        return Response(body, media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)
