"""POST /v1/responses."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers
from gateway.asking import begin, named, trace_ids_of, waits_for
from gateway.http.body import read_json
from gateway.http.callers import caller_of
from gateway.http.errors import ApiError, for_caller
from gateway.http.event_stream import EventStream, StreamedAnswer, WholeAnswer
from gateway.http.keep_alive import KeepAlive, comment
from gateway.http.notes import notes_of
from gateway.openai.models import default_model
from gateway.openai.options import read_model
from gateway.responses.events import ResponseEvents
from gateway.responses.objects import ResponseObject
from gateway.responses.options import read_request
from gateway.responses.sealing import Sealer, can_seal
from gateway.responses.stored_items import StoredItems
from protocol.client.answers import Progress
from protocol.client.async_streams import AsyncStream
from protocol.errors import WireError
from protocol.process.gateway_settings import GatewaySettings


async def respond(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/responses."""
    settings: GatewaySettings = request.app.state.settings
    keep_alive: KeepAlive = request.app.state.keep_alive
    stored: StoredItems = request.app.state.stored_items
    caller, notes = caller_of(request), notes_of(request)
    body = await read_json(request, settings.max_body, caller)
    body["input"] = given = stored.input_of(caller.key_id, body)
    stores = settings.stored_items > 0 and body.get("store") is not False
    body["model"] = await default_model(request, read_model(body.get("model")))
    sealer = Sealer(bytes.fromhex(settings.seal_secret), caller.key_id, body["model"])
    asked = read_request(body, notes, sealer.unseal, stores=stores)
    wanted = asked.wanted
    if asked.seals and not can_seal():
        notes.change("include: reasoning.encrypted_content")
    seals = asked.seals and can_seal()
    response = ResponseObject(wanted.model, asked.echoed, asked.namespaces, sealer if seals else None)
    trace_ids = trace_ids_of(request, response.id)

    def keep(ended: dict[str, Any]) -> None:
        if stores:
            stored.keep(caller.key_id, given, ended)

    async def stream(events: EventStream) -> None:
        shape = ResponseEvents(response, keep)
        progress: list[Progress | None] = [None]
        streams: tuple[AsyncStream, ...] = ()

        def silence() -> bytes:
            return shape.silence() if settings.keepalive == "chunk" else comment(waits_for(streams, progress[0]))

        try:
            with keep_alive.keeping(events, silence), named(wanted):
                streams = await begin(request, caller, wanted, [{}], progress, trace_ids, keeps=stores)
                await _send(events, shape, Answers(streams, wanted.tools))
        except (ApiError, WireError) as e:
            if not events.begun:
                raise
            await events.send(shape.fail(for_caller(e)))

    async def whole() -> Response:
        with named(wanted):
            answers = Answers(await begin(request, caller, wanted, [{}], None, trace_ids, keeps=stores), wanted.tools)
            (parsed,) = await answers.complete()
        ended = response.whole(parsed, answers.usages[0])
        keep(ended)
        return Response(orjson.dumps(ended), media_type="application/json")

    return StreamedAnswer(stream) if wanted.stream else WholeAnswer(whole)


async def _send(events: EventStream, shape: ResponseEvents, answers: Answers) -> None:
    """Send the events of an answer as it is generated."""
    async for piece in answers:
        data = shape.parts(piece.parts)
        if piece.finish_reason is not None:
            data += shape.finish(piece.finish_reason, answers.usages[0])
        if data:
            await events.send(data)
