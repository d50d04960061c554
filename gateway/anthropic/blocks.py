"""The JSON of answers in the shape of Anthropic's API: whole, and as the events of a stream."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from typing import Any, Final, Literal
from uuid import uuid4

import orjson

from gateway.answering import TOOL_CALLS, Block, ParsedAnswer
from gateway.openai.answers import finish_reason
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Part, Reasoning
from protocol.messages import FinishReason

# The signatures of thinking blocks.
#
# Anthropic signs what a model has thought, and clients send the signature back with the block. Claude Code asks for
# blocks without their text (``thinking.display: omitted``). The signature then brings the reasoning back to the model,
# which many templates show it while it calls tools. So nothing has to be kept here. The reasoning is encoded and not
# encrypted: it belongs to the caller.


WITH_TEXT: Final = "modelctl-reasoning-"
"""The beginning of a signature that holds reasoning."""


def signature_of(omitted: str) -> str:
    """Return the signature of a thinking block. ``omitted``: the reasoning that the block does not show."""
    if not omitted:
        return f"modelctl-{uuid4().hex}"
    return WITH_TEXT + urlsafe_b64encode(omitted.encode()).decode()


def reasoning_in(signature: Any) -> str:
    """Return the reasoning that a signature holds. The signatures of other servers hold none."""
    if not isinstance(signature, str) or not signature.startswith(WITH_TEXT):
        return ""
    try:
        return urlsafe_b64decode(signature.removeprefix(WITH_TEXT).encode()).decode()
    except ValueError:  # also a character that is no ASCII, and bytes that are no UTF-8
        return ""


OVERFLOW: Final = "model_context_window_exceeded"
"""The stop reason of an answer that the end of the context has cut, and not the request's ``max_tokens``."""
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.BANNED: "refusal",
    FinishReason.LOOP: "end_turn",
    TOOL_CALLS: "tool_use",
}
Kind = Literal["text", "thinking", "tool_use"]
Thinking = Literal["shown", "signed", "none"]
"""How an answer shows the reasoning: in blocks with its text, in blocks with a signature only, or not at all, as for a
request without ``thinking``."""


def stop_of(reason: str, stop_string: str | None, *, cut: bool) -> dict[str, Any]:
    """Return ``stop_reason`` and ``stop_sequence`` of an answer. Raises ApiError if somebody else cancelled it.

    reason       the finish reason, as ``Piece.finish_reason``
    stop_string  the stop string that ended the answer, or None
    cut          whether the answer had less room in the context than it was to have
    """
    finish_reason(reason)
    if reason == FinishReason.STOP and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    if reason == FinishReason.LENGTH and cut:
        return {"stop_reason": OVERFLOW, "stop_sequence": None}
    return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def usage_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the ``usage`` of an answer. Tokens of the prompt that were in the cache are counted apart.

    given  the usage as ``Answers.usages`` has it
    """
    cached = given.get("cached_tokens", 0)
    usage: dict[str, Any] = {
        "input_tokens": given.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": given.get("completion_tokens", 0),
    }
    if reasoning := given.get("reasoning_tokens"):
        usage["output_tokens_details"] = {"thinking_tokens": reasoning}
    return usage


def new_id(kind: str) -> str:
    """Return a new id, such as ``msg_...``."""
    return f"{kind}_{uuid4().hex[:24]}"


def whole_message(
    message_id: str,
    model: str,
    answer: ParsedAnswer,
    stop: dict[str, Any],
    usage: dict[str, Any],
    *,
    thinking: Thinking,
) -> dict[str, Any]:
    """Return an answer that is not streamed.

    message_id  its id, such as ``msg_...``
    stop        ``stop_of`` the answer
    """
    content = [shown for block in answer.blocks if (shown := _block(block, thinking)) is not None]
    return _message(message_id, model) | {"content": content} | stop | {"usage": usage}


def _message(message_id: str, model: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _block(block: Block, thinking: Thinking) -> dict[str, Any] | None:
    """Return a block of the content. None for reasoning that was not asked for, and for a call that was cut: its
    arguments are no JSON, and nobody may run it."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        if thinking == "none":
            return None
        shown, omitted = (block.text, "") if thinking == "shown" else ("", block.text)
        return {"type": "thinking", "thinking": shown, "signature": signature_of(omitted)}
    try:
        arguments = _arguments(block.text or "{}")
    except ValueError:
        return None
    return {"type": "tool_use", "id": block.id or new_id("toolu"), "name": block.name, "input": arguments}


def _arguments(text: str) -> Any:
    """Return the value of a call's JSON. Raises ValueError.

    A model may write the escape of half a character (a lone surrogate), which no answer can hold. It is replaced.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace"))


class MessageEvents:
    """The events of one answer. They have one open block at a time.

    message_id     its id, such as ``msg_...``
    prompt_tokens  the tokens of the prompt, as soon as they are known
    """

    def __init__(self, message_id: str, model: str, *, thinking: Thinking) -> None:
        self._about = _message(message_id, model)
        self._thinking = thinking
        self.prompt_tokens = 0
        self._begun = False
        self._index = -1
        self._open: Kind | None = None
        self._omitted: list[str] = []
        """The reasoning of the open block, if the block does not show it."""

    def silence(self) -> bytes:
        """Return an event without content, which keeps a silent stream open."""
        return PING if self._begun else self.begin()

    def begin(self) -> bytes:
        """Return the events that begin the answer, unless they were sent. The first event has the tokens of the prompt
        unless it had to keep a silent stream open. The event before the last one has all counts."""
        if self._begun:
            return b""
        self._begun = True
        return (
            _event(
                "message_start", {"message": self._about | {"usage": usage_of({"prompt_tokens": self.prompt_tokens})}}
            )
            + PING
        )

    def parts(self, parts: Iterable[Part]) -> bytes:
        """Return the events of the next parts."""
        return b"".join([self._part(part) for part in parts])

    def finish(self, stop: dict[str, Any], usage: dict[str, Any]) -> bytes:
        """Return the events that end the answer. ``stop``: ``stop_of`` the answer."""
        return b"".join(
            (
                self.begin(),
                self._close(),
                _event("message_delta", {"delta": stop, "usage": usage}),
                _event("message_stop", {}),
            )
        )

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallStart):
            block = {"type": "tool_use", "id": part.id or new_id("toolu"), "name": part.name, "input": {}}
            return self._close() + self._start("tool_use", block)
        if isinstance(part, CallArguments):
            return self._delta("input_json_delta", "partial_json", part.json)
        if isinstance(part, CallEnd):
            return self._close()
        if isinstance(part, Reasoning):
            if self._thinking == "none":
                return self.begin()
            opened = self._change("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._thinking == "shown":
                return opened + self._delta("thinking_delta", "thinking", part.text)
            self._omitted.append(part.text)
            return opened
        return self._change("text", {"type": "text", "text": ""}) + self._delta("text_delta", "text", part.text)

    def _change(self, kind: Kind, block: dict[str, Any]) -> bytes:
        """Open a block of this kind, unless one is open."""
        return b"" if self._open == kind else self._close() + self._start(kind, block)

    def _start(self, kind: Kind, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        return self.begin() + _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _DELTA % (self._index, kind.encode(), key.encode(), orjson.dumps(text))

    def _close(self) -> bytes:
        """End the open block, if there is one. Thinking ends with a signature, which this API's clients expect."""
        if self._open is None:
            return b""
        was, self._open = self._open, None
        signed = b""
        if was == "thinking":
            signed = self._delta("signature_delta", "signature", signature_of("".join(self._omitted)))
            self._omitted.clear()
        return signed + _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind} | fields))
