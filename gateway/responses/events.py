"""The events of a streamed response, in the order that OpenAI's client packages check."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import orjson

from answer_formats.parts import CallArguments, CallEnd, CallStart, Part, Reasoning
from gateway.answering import Block
from gateway.http.errors import ApiError
from gateway.openai.chunks import finish_reason
from gateway.responses.objects import PREFIX, ResponseObject, is_cut, new_id, part_of
from protocol.errors import WireError

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
