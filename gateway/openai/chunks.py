"""The JSON of answers in OpenAI's shapes: whole, and in the pieces of a stream."""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

import orjson

from answer_formats.parts import CallArguments, CallStart, Part, Reasoning, Text
from gateway.answering import TOOL_CALLS, ParsedAnswer
from gateway.http.errors import ApiError
from gateway.openai.logprobs import TextOffset, chat_logprobs, completion_logprobs
from gateway.openai.prompts import WholePrompt
from protocol.client.answers import Completion
from protocol.messages import FinishReason
from protocol.process.gateway_settings import ReasoningKey

DONE: Final = b"data: [DONE]\n\n"
_REASONS: Final = {
    "stop": "stop",
    "length": "length",
    "banned_strings": "content_filter",
    FinishReason.LOOP: "stop",
    TOOL_CALLS: "tool_calls",
}
_DETAILS: Final = {
    "reasoning_tokens": "reasoning_tokens",
    "draft_accepted": "accepted_prediction_tokens",
    "draft_rejected": "rejected_prediction_tokens",
}
"""OpenAI's names of the counts that only some answers have."""


def finish_reason(reason: str) -> str:
    """Return OpenAI's name of a finish reason. Raises ApiError for an answer that somebody else cancelled."""
    if reason not in _REASONS:
        raise ApiError(503, "an operator cancelled the request: send it again if you still need it", code="cancelled")
    return _REASONS[reason]


def ending(reason: str) -> dict[str, str]:
    """Return the keys of a choice that say why the answer ended. Raises ApiError as ``finish_reason`` does.

    OpenAI has no name for an answer that was ended because it repeats itself, and its clients refuse reasons that they
    do not know. Such an answer has the reason "stop", and the key ``stop_reason``, in which vLLM says more about a
    stop.
    """
    shown = {"finish_reason": finish_reason(reason)}
    return shown | {"stop_reason": reason} if reason == FinishReason.LOOP else shown


def usage_of(prompts: Iterable[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return OpenAI's ``usage``.

    prompts  for each prompt, the ``usage`` of each of its answers, as ``Completion`` has it, perhaps with
             ``reasoning_tokens``. A prompt counts once
    """
    answers: list[dict[str, Any]] = []
    prompt = cached = 0
    for given in prompts:
        answers += given
        prompt += max((each.get("prompt_tokens", 0) for each in given), default=0)
        cached += max((each.get("cached_tokens", 0) for each in given), default=0)
    completion = sum(each.get("completion_tokens", 0) for each in answers)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = {
        shown: sum(each.get(name, 0) for each in answers)
        for name, shown in _DETAILS.items()
        if any(name in each for each in answers)
    }
    if details:
        usage["completion_tokens_details"] = details
    return usage


class Shape:
    """The JSON of one request's answer. ``is_chat`` tells chats from completions.

    reasoning_key  the key of a chat's reasoning

    beginning  the chunks that begin the answers. Whoever sends the first event sends them before it, and empties this

    The parts of a chunk that are the same for all chunks are made once.
    """

    def __init__(
        self,
        model: str,
        *,
        is_chat: bool,
        include_usage: bool = False,
        reasoning_key: ReasoningKey = "reasoning_content",
    ) -> None:
        self.is_chat, self._reasoning_key = is_chat, reasoning_key
        self.beginning = b""
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        self._about = {"id": self.id, "created": int(time.time()), "model": model}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        about = orjson.dumps(self._about | {"object": kind})[:-1]
        self._head = b"data: " + about + b',"choices":[{"index":'
        self._before = b',"delta":{"content":' if is_chat else b',"text":'
        self._before_reasoning = b',"delta":{"%b":' % reasoning_key.encode()
        self._after_text = b"}" if is_chat else b""
        self._tail = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_tail = self._after_text + b',"logprobs":null,"finish_reason":null' + self._tail

    def begin(self, index: int) -> bytes:
        """Return the chunk that begins an answer. Completions have none."""
        if not self.is_chat:
            return b""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"%b%d%b%b" % (self._head, index, role, self._tail)

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the chunk with a piece of text."""
        if logprobs is None:
            return b"%b%d%b%b%b" % (self._head, index, self._before, orjson.dumps(text), self._plain_tail)
        parts = (
            self._head, b"%d" % index, self._before, orjson.dumps(text), self._after_text, b',"logprobs":',
            orjson.dumps(logprobs), b',"finish_reason":null', self._tail,
        )  # fmt: skip
        return b"".join(parts)

    def reasoning(self, index: int, text: str) -> bytes:
        """Return the chunk with a piece of a chat's reasoning."""
        return b"%b%d%b%b%b" % (self._head, index, self._before_reasoning, orjson.dumps(text), self._plain_tail)

    def parts(self, index: int, parts: Sequence[Part], logprobs: dict[str, Any] | None = None) -> list[bytes]:
        """Return the chunks of parts of a chat's answer. The first one has the log-probabilities.

        A chunk has one part, because some clients lose calls that come together with text. If there are
        log-probabilities without a part, a chunk without text has them.
        """
        chunks = []
        for part in parts:  # nearly always one: as few steps as possible
            if (delta := self._delta(part)) is not None:
                end = self._plain_tail if logprobs is None else self._tail_with(logprobs)
                chunks.append(b"%b%d%b%b" % (self._head, index, delta, end))
                logprobs = None
        if logprobs is not None:
            end = self._tail_with(logprobs)
            chunks.append(b'%b%d,"delta":{"content":""%b' % (self._head, index, end))
        return chunks

    def _delta(self, part: Part) -> bytes | None:
        """Return the JSON of a chat's ``delta`` without its end; None for a part that has none."""
        if isinstance(part, Text):
            return self._before + orjson.dumps(part.text)
        if isinstance(part, Reasoning):
            return self._before_reasoning + orjson.dumps(part.text)
        if isinstance(part, CallArguments):
            piece = b'{"index":%d,"function":{"arguments":%b}}' % (part.index, orjson.dumps(part.json))
            return b',"delta":{"tool_calls":[%b]' % piece
        if isinstance(part, CallStart):
            start = {"index": part.index} | call_json(part.name, part.id, "")
            return b',"delta":{"tool_calls":[%b]' % orjson.dumps(start)
        return None

    def _tail_with(self, logprobs: dict[str, Any]) -> bytes:
        return b'},"logprobs":%b,"finish_reason":null%b' % (orjson.dumps(logprobs), self._tail)

    def silence(self) -> bytes:
        """Return a chunk without text. It keeps a silent stream open for clients that fail at comments."""
        empty = b',"delta":{}' if self.is_chat else b',"text":""'
        return b"%b0%b%b" % (self._head, empty, b',"logprobs":null,"finish_reason":null' + self._tail)

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends an answer. Raises ApiError if somebody else cancelled it.

        reason  the finish reason, as ``Piece.finish_reason``
        """
        empty = b',"delta":{}' if self.is_chat else b',"text":""'
        end = b',"logprobs":null,' + orjson.dumps(ending(reason))[1:-1]
        return b"%b%d%b%b%b" % (self._head, index, empty, end, self._tail)

    def totals(self, usage: dict[str, Any], timings: dict[str, Any]) -> bytes:
        """Return the chunk that counts the tokens. It has no choices and comes last."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        counts = {"choices": [], "usage": usage} | ({"timings": timings} if timings else {})
        return b"data: " + orjson.dumps(self._about | {"object": kind} | counts) + b"\n\n"

    def whole(
        self,
        answers: Sequence[Completion],
        usage: dict[str, Any],
        timings: dict[str, Any],
        prompts: Sequence[WholePrompt],
    ) -> bytes:
        """Return the answers of a completion that is not streamed. ``prompts``: what each shows of its prompt."""
        choices = []
        for index, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
            offset = TextOffset(len(prompt.text))
            logprobs = completion_logprobs(answer.logprobs, offset) if answer.logprobs else None
            choices.append(
                {
                    "index": index,
                    **ending(answer.finish_reason),
                    "text": prompt.text + answer.text,
                    "logprobs": prompt.with_answer(logprobs),
                    **prompt.prompt_logprobs,
                }
            )
        return self._whole("text_completion", choices, usage, timings)

    def whole_chat(
        self, answers: Sequence[ParsedAnswer], usage: dict[str, Any], timings: dict[str, Any], prompt: WholePrompt
    ) -> bytes:
        """Return the answers of a chat that is not streamed. ``prompt``: what the answer shows of its prompt."""
        choices = [
            {
                "index": index,
                **ending(answer.finish_reason),
                "message": self._message(answer),
                "logprobs": chat_logprobs(answer.logprobs) if answer.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ]
        return self._whole("chat.completion", choices, usage, timings, prompt.prompt_logprobs)

    def _message(self, answer: ParsedAnswer) -> dict[str, Any]:
        calls = [call_json(call.name, call.id, call.text) for call in answer.calls]
        text = answer.joined("text")
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning := answer.joined("reasoning"):
            message[self._reasoning_key] = reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def _whole(
        self,
        kind: str,
        choices: list[Any],
        usage: dict[str, Any],
        timings: dict[str, Any],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        body = self._about | {"object": kind, "choices": choices, "usage": usage, **more}
        return orjson.dumps(body | ({"timings": timings} if timings else {}))


def call_json(name: str, call_id: str | None, arguments: str) -> dict[str, Any]:
    """Return a call of a tool in OpenAI's shape. A call without an id gets one."""
    return {
        "id": call_id or f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
