"""The JSON of answers in OpenAI's shapes: whole, and in the pieces of a stream."""

import codecs
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import uuid4

import orjson

from gateway.http.errors import ApiError
from protocol.client.answers import Completion, TokenLogprob

DONE: Final = b"data: [DONE]\n\n"
LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""
_REASONS: Final = {"stop": "stop", "length": "length", "banned_strings": "content_filter"}


def finish_reason(reason: str) -> str:
    """Return OpenAI's name of a finish reason. Raises ApiError for an answer that somebody else cancelled."""
    if reason not in _REASONS:
        raise ApiError(503, "an operator cancelled the request: send it again if you still need it", code="cancelled")
    return _REASONS[reason]


def usage_of(prompts: Iterable[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return OpenAI's ``usage``.

    prompts  for each prompt, the ``usage`` of each of its answers, as ``Completion`` has it. A prompt counts once
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
    if any("draft_accepted" in each for each in answers):
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(each.get("draft_accepted", 0) for each in answers),
            "rejected_prediction_tokens": sum(each.get("draft_rejected", 0) for each in answers),
        }
    return usage


class TextOffset:
    """The place of the next token in an answer's text, in characters. A token may end within a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def add(self, token: bytes) -> int:
        """Return where this token begins."""
        begins = self._at
        self._at += len(self._decoder.decode(token))
        return begins


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice."""
    return {
        "content": [_chat_logprob(e) | {"top_logprobs": [_chat_logprob(t) for t in e.top]} for e in entries],
        "refusal": None,
    }


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": max(entry.logprob, LEAST_LOGPROB), "bytes": list(entry.bytes)}


def completion_logprobs(entries: Sequence[TokenLogprob], offset: TextOffset) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice. ``offset`` knows the tokens of the answer before these."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [{top.text: max(top.logprob, LEAST_LOGPROB) for top in entry.top} for entry in entries],
        "text_offset": [offset.add(entry.bytes) for entry in entries],
    }


class Shape:
    """The JSON of one request's answer. ``is_chat`` tells chats from completions.

    The parts of a chunk that are the same for all chunks are made once.
    """

    def __init__(self, model: str, *, is_chat: bool, include_usage: bool = False) -> None:
        self.is_chat = is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        self._about = {"id": self.id, "created": int(time.time()), "model": model}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        about = orjson.dumps(self._about | {"object": kind})[:-1]
        self._head = b"data: " + about + b',"choices":[{"index":'
        self._before = b',"delta":{"content":' if is_chat else b',"text":'
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

    def logprobs(self, entries: Sequence[TokenLogprob], offset: TextOffset) -> dict[str, Any]:
        """Return the ``logprobs`` of a choice, or of a piece of it."""
        return chat_logprobs(entries) if self.is_chat else completion_logprobs(entries, offset)

    def silence(self) -> bytes:
        """Return a chunk without text. It keeps a silent stream open for clients that fail at comments."""
        empty = b',"delta":{}' if self.is_chat else b',"text":""'
        return b"%b0%b%b" % (self._head, empty, b',"logprobs":null,"finish_reason":null' + self._tail)

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends an answer. ``reason`` is OpenAI's."""
        empty = b',"delta":{}' if self.is_chat else b',"text":""'
        ending = b',"logprobs":null,"finish_reason":"%b"' % reason.encode()
        return b"%b%d%b%b%b" % (self._head, index, empty, ending, self._tail)

    def totals(self, usage: dict[str, Any], timings: dict[str, Any]) -> bytes:
        """Return the chunk that counts the tokens. It has no choices and comes last."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        counts = {"choices": [], "usage": usage} | ({"timings": timings} if timings else {})
        return b"data: " + orjson.dumps(self._about | {"object": kind} | counts) + b"\n\n"

    def whole(self, answers: Sequence[Completion], usage: dict[str, Any]) -> bytes:
        """Return the answer that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._about | {"object": kind, "choices": choices, "usage": usage}
        if len(answers) == 1 and answers[0].timings:
            body["timings"] = answers[0].timings
        return orjson.dumps(body)

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason(answer.finish_reason)}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        choice["logprobs"] = self.logprobs(answer.logprobs, TextOffset()) if answer.logprobs else None
        return choice
