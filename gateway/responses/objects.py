"""The JSON of responses and of their items in OpenAI's Responses API."""

import secrets
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gateway.answering import Block, ParsedAnswer
from gateway.http.errors import ApiError, error_body
from gateway.openai.chunks import finish_reason
from gateway.responses.sealing import Sealer
from protocol.errors import WireError
from protocol.messages import FinishReason

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
