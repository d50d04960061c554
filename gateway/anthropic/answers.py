"""POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers
from gateway.anthropic.blocks import MessageEvents, new_id, stop_of, usage_of, whole_message
from gateway.anthropic.requests import MessagesRequest, read_request
from gateway.asking import begin, named, trace_ids_of, with_model
from gateway.http.answers import EventStream, KeepAlive, StreamedAnswer, WholeAnswer, notes_of
from gateway.http.body import caller_and_body
from protocol.client.answers import token_ids_in
from protocol.client.request_options import tokenize_params

_RENDERED = ("messages", "tools", "template_kwargs", "add_generation_prompt", "continue_final_message")
"""Options that the chat template reads."""


async def messages(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/messages."""
    keep_alive: KeepAlive = request.app.state.keep_alive
    caller, body = await caller_and_body(request)
    asked = read_request(body, notes_of(request))
    wanted = await with_model(request, asked.wanted)
    asked = replace(asked, wanted=wanted)
    message_id = new_id("msg")
    trace_ids = trace_ids_of(request, message_id)

    async def stream(events: EventStream) -> None:
        shape = MessageEvents(message_id, wanted.model, thinking=asked.thinking)
        with keep_alive.keeping(events, shape.silence), named(wanted):
            streams = await begin(request, caller, wanted, [{}], None, trace_ids)
            await _send(events, shape, Answers(streams, wanted.tools), asked)

    async def whole() -> Response:
        with named(wanted):
            answers = Answers(await begin(request, caller, wanted, [{}], None, trace_ids), wanted.tools)
            (parsed,) = await answers.complete()
        stop = _stop(asked, answers, parsed.finish_reason)
        usage = usage_of(answers.usages[0])
        message = whole_message(message_id, wanted.model, parsed, stop, usage, thinking=asked.thinking)
        return Response(orjson.dumps(message), media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)


async def count_tokens(request: Request) -> WholeAnswer:
    """POST /v1/messages/count_tokens: the tokens of a conversation as the model's chat template renders it."""
    caller, body = await caller_and_body(request)
    wanted = read_request(body, notes_of(request), counts=True).wanted
    given: dict[str, Any] = {name: wanted.options.get(name) for name in _RENDERED}

    async def compute() -> Response:
        with named(wanted):
            reply = await request.app.state.link.ask(caller, "tokenize", **tokenize_params(wanted.model, given))
        return Response(orjson.dumps({"input_tokens": len(token_ids_in(reply))}), media_type="application/json")

    return WholeAnswer(compute)


async def _send(events: EventStream, shape: MessageEvents, answers: Answers, asked: MessagesRequest) -> None:
    """Send the events of an answer as it is generated."""
    async for piece in answers:
        if answers.streams[0].prompt_tokens is not None:
            shape.prompt_tokens = answers.streams[0].prompt_tokens
        data = shape.parts(piece.parts)
        if piece.finish_reason is not None:
            data += shape.finish(_stop(asked, answers, piece.finish_reason), usage_of(answers.usages[0]))
        if data:
            await events.send(data)


def _stop(asked: MessagesRequest, answers: Answers, reason: str) -> dict[str, Any]:
    """Return ``stop_reason`` and ``stop_sequence`` of the answer, which has ended for this reason."""
    tokens = answers.usages[0].get("completion_tokens", 0)
    return stop_of(reason, answers.streams[0].stop_string, cut=tokens < asked.max_tokens)
