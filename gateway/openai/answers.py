"""Serve the requests for chats and completions: ask the supervisor, and send the answers in OpenAI's shapes."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import TOOL_CALLS, Answers, ParsedAnswer, Piece, is_plain
from gateway.asking import Prompt, begin, named, trace_ids_of, waits_for, with_model
from gateway.http.answers import (
    EventStream,
    KeepAlive,
    LoadLines,
    Notes,
    StreamedAnswer,
    WholeAnswer,
    comment,
    notes_of,
)
from gateway.http.body import caller_and_body
from gateway.http.callers import Caller, caller_of
from gateway.http.errors import ApiError, checked, checked_or_none, invalid
from gateway.openai.models import shown_model
from gateway.openai.prompts import (
    EchoedPrompt,
    TextOffset,
    WholePrompt,
    chat_logprobs,
    completion_logprobs,
    whole_prompt,
)
from gateway.openai.requests import ApiRequest, read_chat, read_completion, read_messages, read_model
from gateway.supervisor_link import SupervisorLink
from protocol import __version__
from protocol.answer_formats.source import CallArguments, CallStart, Part, Reasoning, Text, Tool
from protocol.client.answers import Completion, Delta, Progress, text_in, token_ids_in
from protocol.client.async_client import AsyncChoices, AsyncStream
from protocol.client.request_options import pack_token_ids, tokenize_params
from protocol.errors import WireError
from protocol.messages import FinishReason
from protocol.process.worker_spec import GatewaySettings, ReasoningKey

# The JSON of answers in OpenAI's shapes: whole, and in the pieces of a stream.


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


class AnswerShape:
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


# Send the answers of OpenAI's API as server-sent events, while they are generated.


async def send_answers(
    events: EventStream,
    streams: tuple[AsyncStream, ...],
    shape: AnswerShape,
    wanted: ApiRequest,
    echoed: Callable[[int], Awaitable[EchoedPrompt]] | None = None,
) -> None:
    """Send the pieces of the answers as they come, and the end of each answer with its last piece.

    echoed  returns the prompt of an answer, if answers begin with their prompts. It is called once the answer has begun
    """
    sending = _Sending(events, streams, shape, bool(wanted.options.get("logprobs")))
    alone = len(streams) == 1 and not sending.with_logprobs
    if not shape.is_chat:
        await (sending.one_text() if alone and echoed is None else sending.texts(echoed))
        usages = usages_of(streams)
    elif alone:
        usages = await sending.one_chat(wanted.tools)
    else:
        answers = Answers(streams, wanted.tools)
        async for piece in answers:
            await sending.piece(piece)
        usages = answers.usages
    if wanted.include_usage:
        sending.last.append(shape.totals(usage(usages, wanted.n), timings_of(streams)))
    await sending.send([*sending.last, DONE])


class _Sending:
    """Sends the events of one request. The first event has the beginnings of all answers before it.

    last  chunks that the caller sends together with the end of the stream
    """

    def __init__(
        self, events: EventStream, streams: tuple[AsyncStream, ...], shape: AnswerShape, with_logprobs: bool
    ) -> None:
        self._events, self._streams, self._shape = events, streams, shape
        self.with_logprobs = with_logprobs
        self.last: list[bytes] = []
        shape.beginning = b"".join(shape.begin(index) for index in range(len(streams)))

    async def send(self, chunks: Sequence[bytes]) -> None:
        if chunks:
            begun, self._shape.beginning = self._shape.beginning, b""
            await self._events.send(b"".join((begun, *chunks)))

    async def one_text(self) -> None:
        """Send the only answer, which is text."""
        stream, send, shape = self._streams[0], self._events.send, self._shape
        async for delta in stream:  # as few steps as possible: this runs for each token
            if delta.text:
                await send(shape.beginning + shape.piece(0, delta.text))
                shape.beginning = b""
        self.last.append(shape.finish(0, stream.finish_reason or ""))

    async def one_chat(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Send the only answer of a chat, and return its usage. The first event says whether it is text only."""
        stream, send, shape = self._streams[0], self._events.send, self._shape
        first = await anext(stream, Delta("", ()))
        if is_plain(stream.format, tools):
            if first.text:
                await self.send([shape.piece(0, first.text)])
            await self.one_text()
            return usages_of(self._streams)
        answers = Answers(self._streams, tools)
        reader = answers.readers[0]
        await self.send(shape.parts(0, reader.read(first)))
        async for delta in stream:  # as few steps as possible: this runs for each token
            kind = reader.continues(delta)
            if kind is Text:
                chunk = shape.piece(0, delta.text)
            elif kind is Reasoning:
                chunk = shape.reasoning(0, delta.text)
            elif not (chunk := b"".join(shape.parts(0, reader.read(delta)))):
                continue
            await send(shape.beginning + chunk)
            shape.beginning = b""
        last, reason = reader.end()
        self.last += [*shape.parts(0, last), shape.finish(0, reason)]
        return answers.usages

    async def texts(self, echoed: Callable[[int], Awaitable[EchoedPrompt]] | None) -> None:
        """Send the answers of a completion, perhaps with log-probabilities, perhaps behind their prompts."""
        offsets = [TextOffset() for _ in self._streams]
        prompts: dict[int, EchoedPrompt] = {}
        echoing = set(range(len(self._streams))) if echoed is not None else set()
        async for index, delta in AsyncChoices(self._streams, None, tell_ends=True):
            chunks = []
            if index in echoing and echoed is not None:
                if (prompt := prompts.get(index)) is None:
                    prompt = prompts[index] = await echoed(index)
                if delta.prompt is not None:
                    shown = prompt.logprobs(delta.prompt)
                    chunks.append(self._shape.piece(index, prompt.place.take(), shown))
                # Without an answer, the last piece of the prompt and the end may be read together.
                if delta.prompt is None or self._streams[index].finish_reason is not None:
                    if rest := prompt.place.take(rest=True):
                        chunks.append(self._shape.piece(index, rest))
                    offsets[index] = TextOffset(len(prompt.text))
                    echoing.remove(index)
            if delta.text or delta.logprobs:
                logprobs = completion_logprobs(delta.logprobs, offsets[index]) if self.with_logprobs else None
                chunks.append(self._shape.piece(index, delta.text, logprobs))
            if (reason := self._streams[index].finish_reason) is not None:
                chunks.append(self._shape.finish(index, reason))
            await self.send(chunks)

    async def piece(self, piece: Piece) -> None:
        """Send a piece of a chat's answer."""
        shape = self._shape
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
        chunks = shape.parts(piece.answer, piece.parts, logprobs)
        if piece.finish_reason is not None:
            chunks.append(shape.finish(piece.answer, piece.finish_reason))
        await self.send(chunks)


def usages_of(streams: Sequence[AsyncStream]) -> list[dict[str, Any]]:
    """Return the usage of each answer."""
    return [stream.usage for stream in streams]


def usage(usages: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """Return the usage of all answers. A prompt counts once, however many answers it has."""
    return usage_of(usages[i : i + n] for i in range(0, len(usages), n))


def timings_of(streams: Sequence[AsyncStream]) -> dict[str, Any]:
    """Return the timings of the only answer. Several answers have none in common."""
    return streams[0].timings if len(streams) == 1 else {}


async def chat(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/chat/completions."""
    caller, body = await caller_and_body(request)
    wanted = await with_model(request, read_chat(body, notes_of(request)))
    return _answer(request, caller, wanted, [{}], is_chat=True)


async def completion(request: Request) -> StreamedAnswer | WholeAnswer:
    """POST /v1/completions."""
    caller, body = await caller_and_body(request)
    prompts, wanted = read_completion(body, notes_of(request))
    wanted = await with_model(request, wanted)
    given = [{"prompt": each} if isinstance(each, str) else {"token_ids": each} for each in prompts]
    return _answer(request, caller, wanted, given, is_chat=False)


def _answer(
    request: Request, caller: Caller, wanted: ApiRequest, prompts: Sequence[Prompt], *, is_chat: bool
) -> StreamedAnswer | WholeAnswer:
    settings: GatewaySettings = request.app.state.settings
    link: SupervisorLink = request.app.state.link
    keep_alive: KeepAlive = request.app.state.keep_alive
    shape = AnswerShape(
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


# The tokenizer and the chat template of a model, under the paths and in the shapes of the servers that people know.
#
#     vLLM          POST /tokenize, POST /detokenize, GET /tokenizer_info
#     llama-server  POST /tokenize, POST /detokenize, POST /apply-template, GET /props
#     TabbyAPI      POST /v1/token/encode, POST /v1/token/decode
#
# An answer has the keys of all servers that have its path. Questions about tokens wait for a lazy model, which they
# have loaded, as a request does. ``/props`` and ``/tokenizer_info`` load nothing, because some clients ask for them
# often.


async def tokenize(request: Request) -> WholeAnswer:
    """POST /tokenize: the token ids of a prompt, or of a conversation as the model's chat template renders it."""
    caller, body = await caller_and_body(request)
    given = _text_of(body, "prompt" if body.get("content") is None else "content", notes_of(request))
    with_ids, with_strings = _bool(body, "with_pieces"), _bool(body, "return_token_strs")
    if "prompt" in given and not (_bool(body, "add_special_tokens", True) and _bool(body, "add_special", True)):
        given["add_special"] = False
    if with_ids or with_strings:
        given["with_pieces"] = True

    def shown(reply: dict[str, Any]) -> dict[str, Any]:
        ids = token_ids_in(reply)
        pieces = [piece.decode(errors="replace") for piece in reply.get("pieces", ())]
        tokens = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)] if with_ids else ids
        strings = {"token_strs": pieces} if with_strings else {}
        return {"tokens": tokens, "count": len(ids), "max_model_len": reply.get("context")} | strings

    return _tokens_answer(request, caller, body, given, shown)


async def encode(request: Request) -> WholeAnswer:
    """POST /v1/token/encode: the token ids of a text or of messages, as TabbyAPI answers it."""
    caller, body = await caller_and_body(request)
    text = body.get("text")
    if isinstance(text, list):
        given: dict[str, Any] = {"messages": read_messages(text, notes_of(request)), "add_generation_prompt": False}
    else:
        given = _text_of(body, "text", notes_of(request))
        given["add_special"] = _bool(body, "add_bos_token", True)

    def shown(reply: dict[str, Any]) -> dict[str, Any]:
        ids = token_ids_in(reply)
        return {"tokens": ids, "length": len(ids)}

    return _tokens_answer(request, caller, body, given, shown)


async def apply_template(request: Request) -> WholeAnswer:
    """POST /apply-template: the text that the model's chat template makes of a conversation."""
    caller, body = await caller_and_body(request)
    if body.get("messages") is None:
        raise invalid("messages", "is missing: give the conversation to render")
    given = _text_of(body, "prompt", notes_of(request)) | {"with_text": True}
    return _tokens_answer(request, caller, body, given, lambda reply: {"prompt": text_in(reply)})


async def detokenize(request: Request) -> WholeAnswer:
    """POST /detokenize and /v1/token/decode: the text of token ids, without special tokens."""
    caller, body = await caller_and_body(request)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
        raise invalid("tokens", "must be an array of token ids, which are whole numbers")
    params = {"model": read_model(body.get("model")), "token_ids": pack_token_ids(tokens)}

    async def compute() -> Response:
        try:
            text = text_in(await request.app.state.link.ask(caller, "detokenize", **params))
        except WireError as e:
            e.field = "tokens" if e.field == "token_ids" else e.field
            raise
        return _json({"prompt": text, "content": text, "text": text})

    return WholeAnswer(compute)


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info?model=NAME: the chat template and special tokens of a loaded model, as vLLM shows them."""
    _, _, template = await _template(request)
    return _json(template["special_tokens"] | {"chat_template": template["source"]})


async def props(request: Request) -> Response:
    """GET /props?model=NAME: a loaded model, as llama-server shows it."""
    name, context, template = await _template(request)
    tools = template.get("tool_source")
    return _json(
        {
            "model_alias": name,
            "default_generation_settings": {"n_ctx": context},
            "modalities": {"vision": False, "audio": False},
            "chat_template": template["source"] or "",
            "bos_token": template["special_tokens"].get("bos_token", ""),
            "eos_token": template["special_tokens"].get("eos_token", ""),
            "build_info": f"modelctl {__version__}",
        }
        | ({} if tools is None else {"chat_template_tool_use": tools})
    )


async def version(request: Request) -> Response:
    """GET /version: the version of the gateway."""
    caller_of(request)
    return _json({"version": __version__})


async def _template(request: Request) -> tuple[str, int | None, dict[str, Any]]:
    """Return the name, the context and the chat template of the model that a request names."""
    name, one = await shown_model(request)
    reply = await request.app.state.link.call(caller_of(request), "chat_template", model=name)
    if not isinstance(reply.get("special_tokens"), dict) or "source" not in reply:
        raise ApiError(502, "the worker's answer cannot be read", code="internal")
    return name, one["context"], reply


def _text_of(body: dict[str, Any], called: str, notes: Notes) -> dict[str, Any]:
    """Return the keys of ``tokenize`` for the prompt under the key ``called``, or for the messages of a body."""
    if body.get("messages") is None:
        return {"prompt": checked(called, body.get(called), str)}
    if body.get(called) is not None:
        raise ApiError(400, f"give {called} or messages, not both", param=called)
    return {
        "messages": read_messages(body["messages"], notes),
        "tools": body.get("tools"),
        "template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": body.get("add_generation_prompt"),
        "continue_final_message": body.get("continue_final_message"),
    }


def _bool(body: dict[str, Any], name: str, usual: bool = False) -> bool:
    value = checked_or_none(name, body.get(name), bool)
    return usual if value is None else value


def _tokens_answer(
    request: Request, caller: Caller, body: dict[str, Any], given: dict[str, Any], shown: Any
) -> WholeAnswer:
    params = tokenize_params(read_model(body.get("model")), given)

    async def compute() -> Response:
        return _json(shown(await request.app.state.link.ask(caller, "tokenize", **params)))

    return WholeAnswer(compute)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
