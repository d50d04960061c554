"""POST /v1/responses."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import Answers, Block, ParsedAnswer
from gateway.asking import begin, named, trace_ids_of, waits_for
from gateway.http.answers import EventStream, KeepAlive, StreamedAnswer, WholeAnswer, comment, notes_of
from gateway.http.body import caller_and_body
from gateway.http.errors import ApiError, error_body, for_caller
from gateway.openai.answers import finish_reason
from gateway.openai.models import default_model
from gateway.openai.requests import read_model
from gateway.responses.requests import Sealer, StoredItems, can_seal, read_request
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning
from protocol.client.answers import Progress
from protocol.client.async_client import AsyncStream
from protocol.errors import WireError
from protocol.messages import FinishReason
from protocol.process.worker_spec import GatewaySettings

# The JSON of responses and of their items in OpenAI's Responses API.


PREFIX: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""The beginning of the ids of items of each kind."""
_INCOMPLETE: Final = {FinishReason.LENGTH: "max_output_tokens", FinishReason.BANNED: "content_filter"}


def new_id(prefix: str) -> str:
    """Return a new id with 128 random bits, such as ``resp_...``. Nobody can guess the id of what is kept."""
    return f"{prefix}_{secrets.token_hex(16)}"


def part_of(block: Block) -> dict[str, Any]:
    """Return the only part of an item's content."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def usage_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the ``usage`` of a response. ``given``: the usage as ``Answers.usages`` has it."""
    prompt, completion = given.get("prompt_tokens", 0), given.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": given.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": given.get("reasoning_tokens", 0)},
        "total_tokens": prompt + completion,
    }


class ResponseObject:
    """The object of one response, which changes while the answer is generated.

    id          its id, such as ``resp_...``
    model       the name of the model
    echoed      keys that repeat the request
    namespaces  (namespace, name) of functions that belong to a namespace, by the names that the model sees
    sealer      encrypts the reasoning, if the request asked for that
    """

    def __init__(
        self,
        model: str,
        echoed: dict[str, Any],
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        sealer: Sealer | None = None,
    ) -> None:
        self._namespaces, self._sealer = namespaces, sealer
        self.id = new_id("resp")
        self._about = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._echoed = echoed

    def item_of(self, block: Block, item_id: str, call_id: str, status: str) -> dict[str, Any]:
        """Return an item of the output. ``call_id``: the id of the call, if the item is one."""
        if block.kind == "call":
            namespace, name = self._namespaces.get(block.name, (None, block.name))
            item: dict[str, Any] = {
                "id": item_id,
                "type": "function_call",
                "status": status,
                "call_id": call_id,
                "name": name,
                "arguments": block.text,
            }
            return item if namespace is None else item | {"namespace": namespace}
        content = [part_of(block)] if block.pieces else []
        if block.kind == "text":
            return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        item = {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self._sealer is None:
            return item
        return item | {"encrypted_content": self._sealer.seal(block.text) if status != "in_progress" else None}

    def name_of(self, block: Block) -> str:
        """Return the name of the function that a call calls, without its namespace."""
        return self._namespaces.get(block.name, ("", block.name))[1]

    def begun(self) -> dict[str, Any]:
        """Return the response before its first item."""
        return self._shown("in_progress", [], None)

    def ended(self, reason: str, output: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete response. Raises ApiError if somebody else cancelled it.

        reason  the finish reason, as ``Piece.finish_reason``
        usage   as ``Answers.usages`` has it
        """
        finish_reason(reason)
        status = "incomplete" if reason in _INCOMPLETE else "completed"
        shown = self._shown(status, output, usage_of(usage)) | {"completed_at": int(time.time())}
        if reason in _INCOMPLETE:
            shown["incomplete_details"] = {"reason": _INCOMPLETE[reason]}
        return shown

    def failed(self, error: ApiError | WireError, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response that an error ended. ``error``: the error that the caller may be told."""
        told = error_body(error)["error"]
        return self._shown("failed", output, None) | {"error": {"code": told["code"], "message": told["message"]}}

    def whole(self, answer: ParsedAnswer, usage: dict[str, Any]) -> dict[str, Any]:
        """Return a response that is not streamed."""
        cut = answer.finish_reason in _INCOMPLETE
        last = len(answer.blocks) - 1
        output = [
            self.item_of(
                block,
                new_id(PREFIX[block.kind]),
                block.id or new_id("call"),
                "incomplete" if cut and i == last else "completed",
            )
            for i, block in enumerate(answer.blocks)
        ]
        return self.ended(answer.finish_reason, output, usage)

    def _shown(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return (
            self._about
            | {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": usage}
            | self._echoed
        )


def is_cut(reason: str) -> bool:
    """Return whether an answer with this finish reason is incomplete."""
    return reason in _INCOMPLETE


# The events of a streamed response, in the order that OpenAI's client packages check.


_TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}
"""The name of each kind of text in the events' types."""


class ResponseEvents:
    """The events of one response. They have one open item at a time.

    Every event has a number. The numbers begin with 0 and have no gap.

    keep  is given the complete response before its last event is sent, which is when a client may refer to it
    """

    def __init__(self, response: ResponseObject, keep: Callable[[dict[str, Any]], None]) -> None:
        self._response, self._keep = response, keep
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._item_id = self._call_id = ""

    def silence(self) -> bytes:
        """Return an event without content, which keeps a silent stream open."""
        return self.begin() or self._event("response.in_progress", {"response": self._response.begun()})

    def begin(self) -> bytes:
        """Return the events that begin the response, unless they were sent."""
        if self._number:
            return b""
        begun = {"response": self._response.begun()}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def parts(self, parts: Iterable[Part]) -> bytes:
        """Return the events of the next parts."""
        return b"".join([self._part(part) for part in parts])

    def finish(self, reason: str, usage: dict[str, Any]) -> bytes:
        """Return the events that end the response. Raises ApiError if somebody else cancelled it.

        reason  the finish reason, as ``Piece.finish_reason``
        usage   as ``Answers.usages`` has it
        """
        finish_reason(reason)  # before the open item is closed: an error has to close it, too
        begun = self.begin()
        closed = self._close("incomplete" if is_cut(reason) else "completed")
        response = self._response.ended(reason, self._output, usage)
        self._keep(response)
        return begun + closed + self._event(f"response.{response['status']}", {"response": response})

    def fail(self, error: ApiError | WireError) -> bytes:
        """Return the events that end the response with an error, which the caller may be told."""
        begun = self.begin()
        closed = self._close("incomplete")
        return begun + closed + self._event("response.failed", {"response": self._response.failed(error, self._output)})

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallStart):
            return self._start(Block("call", name=part.name, id=part.id))
        if isinstance(part, CallArguments):
            return self._delta("response.function_call_arguments.delta", part.json)
        if isinstance(part, CallEnd):
            return self._close("completed")
        kind: Literal["text", "reasoning"] = "reasoning" if isinstance(part, Reasoning) else "text"
        opened = b"" if self._open is not None and self._open.kind == kind else self._start(Block(kind))
        return opened + self._delta(f"response.{_TEXTS[kind]}.delta", part.text)

    def _start(self, block: Block) -> bytes:
        """Close the open item, if there is one, and open another one."""
        before = self.begin() + self._close("completed")
        self._open = block
        self._item_id = new_id(PREFIX[block.kind])
        self._call_id = block.id or new_id("call")
        item = self._response.item_of(block, self._item_id, self._call_id, "in_progress")
        added = self._event("response.output_item.added", {"output_index": len(self._output), "item": item})
        if block.kind == "call":
            return before + added
        return before + added + self._of_part("response.content_part.added", {"part": part_of(block)})

    def _close(self, status: str) -> bytes:
        """Return the events that complete the open item."""
        block, self._open = self._open, None
        if block is None:
            return b""
        if block.kind == "call":
            call = {"name": self._response.name_of(block), "arguments": block.text}
            ended = self._of_item("response.function_call_arguments.done", call)
        else:
            done = {"text": block.text} if block.kind == "reasoning" else {"text": block.text, "logprobs": []}
            ended = self._of_part(f"response.{_TEXTS[block.kind]}.done", done)
            ended += self._of_part("response.content_part.done", {"part": part_of(block)})
        item = self._response.item_of(block, self._item_id, self._call_id, status)
        ended += self._event("response.output_item.done", {"output_index": len(self._output), "item": item})
        self._output.append(item)
        return ended

    def _delta(self, kind: str, text: str) -> bytes:
        assert self._open is not None
        self._open.pieces.append(text)
        fields: dict[str, Any] = {"delta": text}
        if self._open.kind == "call":
            return self._of_item(kind, fields)
        return self._of_part(kind, fields | ({"logprobs": []} if self._open.kind == "text" else {}))

    def _of_part(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._of_item(kind, {"content_index": 0} | fields)

    def _of_item(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._event(kind, {"item_id": self._item_id, "output_index": len(self._output)} | fields)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))


async def respond(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/responses."""
    settings: GatewaySettings = request.app.state.settings
    keep_alive: KeepAlive = request.app.state.keep_alive
    stored: StoredItems = request.app.state.stored_items
    (caller, body), notes = await caller_and_body(request), notes_of(request)
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
