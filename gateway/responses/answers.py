"""POST /v1/responses."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers
from gateway.asking import begin, named, trace_ids_of, waits_for, with_model
from gateway.http.body import read_json
from gateway.http.callers import caller_of
from gateway.http.errors import ApiError, for_caller
from gateway.http.event_stream import EventStream, StreamedAnswer, WholeAnswer
from gateway.http.keep_alive import KeepAlive, comment
from gateway.http.notes import notes_of
from gateway.responses.events import ResponseEvents
from gateway.responses.objects import ResponseObject
from gateway.responses.options import read_request
from gateway.supervisor_link import SupervisorLink
from protocol.client.answers import Progress
from protocol.client.async_streams import AsyncStream
from protocol.errors import WireError
from protocol.process.gateway_settings import GatewaySettings


async def respond(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/responses. Nothing of the response is kept when it has been sent."""
    settings: GatewaySettings = request.app.state.settings
    link: SupervisorLink = request.app.state.link
    keep_alive: KeepAlive = request.app.state.keep_alive
    caller = caller_of(request)
    asked = read_request(await read_json(request, settings.max_body, caller), notes_of(request))
    wanted = await with_model(request, asked.wanted)
    response = ResponseObject(wanted.model, asked.echoed)
    trace_ids = trace_ids_of(request, response.id)

    async def stream(events: EventStream) -> None:
        shape = ResponseEvents(response)
        progress: list[Progress | None] = [None]
        streams: tuple[AsyncStream, ...] = ()

        def silence() -> bytes:
            return shape.silence() if settings.keepalive == "chunk" else comment(waits_for(streams, progress[0]))

        try:
            with keep_alive.keeping(events, silence), named(wanted):
                streams = begin(link.client, caller, wanted, [{}], progress, trace_ids)
                await _send(events, shape, Answers(streams, wanted.tools))
        except (ApiError, WireError) as e:
            if not events.begun:
                raise
            await events.send(shape.fail(for_caller(e)))

    async def whole() -> Response:
        with named(wanted):
            answers = Answers(begin(link.client, caller, wanted, [{}], None, trace_ids), wanted.tools)
            (parsed,) = await answers.complete()
        return Response(orjson.dumps(response.whole(parsed, answers.usages[0])), media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)


async def _send(events: EventStream, shape: ResponseEvents, answers: Answers) -> None:
    """Send the events of an answer as it is generated."""
    async for piece in answers:
        data = shape.parts(piece.parts)
        if piece.finish_reason is not None:
            data += shape.finish(piece.finish_reason, answers.usages[0])
        if data:
            await events.send(data)
