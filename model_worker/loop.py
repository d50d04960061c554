"""The worker's loop: receive, submit, step, send. One thread, one engine; it blocks on the socket only when idle."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from model_worker.engine import Delta, Engine, EngineEvent, Failed, Finished, Job, Prefilling, TokenLogprob
from model_worker.link import SupervisorLink
from protocol.codec import EventWriter
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import (
    CancelJob,
    EventEntry,
    EventFlag,
    FinishReason,
    JobMessage,
    Message,
    Shutdown,
)
from protocol.request import GenerateRequest, parse_generate

IDLE_WAIT_MS = 200
UNSENT_WAIT_MS = 5
"""Between two tries to send what a full pipe did not take, when there is nothing to compute."""
STATS_INTERVAL_S = 1.0
SLACK_JOBS = 2
"""Jobs held beyond a full batch, so that a freed place is taken at the next step and not a round trip later."""
MAX_BYTES_PER_TOKEN = 16
"""A prompt of more bytes per token of context than this is refused before it is tokenized, which would stall the loop.
English text has 4 to 5."""


@dataclass(slots=True)
class _Tracked:
    """A job of this worker as its client knows it."""

    channel: int
    request: int
    prompt_tokens: int
    seq: int = 0
    tokens: int = 0
    carry: dict[str, Any] = field(default_factory=dict)


class WorkerLoop:
    """Serves one loaded engine until SHUTDOWN. An exception of the engine's step is not caught: it ends the process."""

    def __init__(self, engine: Engine, link: SupervisorLink) -> None:
        self._engine = engine
        self._link = link
        self._capabilities = engine.capabilities
        self._writer = EventWriter()
        self._token_bytes = lru_cache(1 << 16)(engine.token_bytes)
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Tracked] = {}
        self._job_ids: dict[tuple[int, int], int] = {}
        self._shutdown = False
        self._stats_due = 0.0
        self.max_jobs = self._capabilities.max_batch_size + SLACK_JOBS
        """Jobs the supervisor may give to this worker at once."""

    def run(self) -> None:
        while not self._shutdown:
            busy = bool(self._jobs)
            for message in self._link.receive(0 if busy else UNSENT_WAIT_MS if self._link.unsent else IDLE_WAIT_MS):
                self._apply(message)
            if self._jobs:
                for event in self._engine.step():
                    self._emit(event)
            if busy and not self._jobs:
                self._stats_due = 0.0  # say at once that the engine is empty, so that `status` never shows a stale job
            self._link.flush()
            self._report(time.monotonic())

    def _apply(self, message: Message) -> None:
        match message:
            case JobMessage(channel, request, carry, body):
                self._submit(channel, request, carry, body)
            case CancelJob(channel, request):
                self._cancel(channel, request)
            case Shutdown():
                self._shutdown = True

    def _submit(self, channel: int, request: int, carry: dict[str, Any], body: bytes) -> None:
        job_id = next(self._ids)
        resumed_ids = tuple(memoryview(carry.get("token_ids", b"")).cast("I"))
        tracked = _Tracked(channel, request, 0, carry.get("seq", 0), len(resumed_ids), carry)
        asked: GenerateRequest | None = None
        try:
            asked = parse_generate(body)
            if tracked.seq and (why := not_resumable(asked)):
                raise WireError(
                    ErrorCode.WORKER_DIED, f"the worker died, and an answer with {why} cannot go on in another"
                )
            job = self._job(job_id, asked, resumed_ids)
            self._engine.submit(job)
        except WireError as e:
            if e.field == "prompt" and asked is not None:
                e.field = _prompt_field(asked)
            self._send_error(tracked, e)
            return
        tracked.prompt_tokens = len(job.prompt_ids)
        self._jobs[job_id] = tracked
        self._job_ids[channel, request] = job_id

    def _job(self, job_id: int, request: GenerateRequest, resumed_ids: tuple[int, ...]) -> Job:
        """The engine's job for a request. Whether it fits and is offered, the engine's ``submit`` says. Raises
        RequestError for text that cannot be encoded."""
        prompt_ids = self._encode(request)
        room = max(1, self._capabilities.context - len(prompt_ids))
        return Job(
            job_id,
            tuple(prompt_ids),
            room if request.max_tokens is None else request.max_tokens,
            request,
            request.stop,
            min_new_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            banned_strings=request.banned_strings,
            token_healing=request.token_healing,
            top_logprobs=request.top_logprobs if request.logprobs else None,
            negative_ids=self._negative(request),
            constraint=request.constraint,
            resumed_ids=resumed_ids,
        )

    def _negative(self, request: GenerateRequest) -> tuple[int, ...] | None:
        """The other prompt of classifier-free guidance: the text given, or what an empty one is encoded as."""
        if request.cfg_scale == 1 or "cfg_scale" not in self._capabilities.offered:
            return None
        text = request.negative_prompt or ""
        self._check_size("negative_prompt", len(text.encode(errors="surrogatepass")))
        try:
            ids = self._engine.encode(text)
        except RequestError as e:
            raise RequestError(f"negative_prompt: {e.message}", field="negative_prompt", code=e.code) from None
        if not ids:
            raise RequestError(
                "negative_prompt: this model has no beginning-of-sequence token to stand for none: give a text",
                field="negative_prompt",
            )
        return tuple(ids)

    def _encode(self, request: GenerateRequest) -> list[int]:
        if request.token_ids is not None:
            return list(memoryview(request.token_ids).cast("I"))
        texts = [request.prompt] if request.prompt is not None else [m.content for m in request.messages or ()]
        self._check_size("prompt", sum(len(text.encode(errors="surrogatepass")) for text in texts))
        if request.messages is not None:
            return self._engine.encode_chat(request.messages)
        return self._engine.encode(texts[0])

    def _check_size(self, field: str, size: int) -> None:
        context = self._capabilities.context
        limit = context * MAX_BYTES_PER_TOKEN
        if size > limit:
            raise RequestError(
                f"the {field.replace('_', ' ')} has {size} bytes: at most {limit} can fit the context of {context} "
                "tokens",
                field=field,
                code=ErrorCode.CONTEXT_OVERFLOW,
            )

    def _cancel(self, channel: int, request: int) -> None:
        """Free the job and confirm. A job unknown here has ended: its terminal event is on its way."""
        job_id = self._job_ids.get((channel, request))
        if job_id is None:
            return
        self._engine.cancel(job_id)
        tracked = self._forget(job_id)
        self._send_finished(tracked, (), "", FinishReason.CANCELLED)

    def _emit(self, event: EngineEvent) -> None:
        # An engine that names a job it does not hold has lost count of whose tokens are whose: better to die (law 2).
        if isinstance(event, Delta):
            tracked = self._jobs[event.job]
            if event.token_ids or event.text:
                fields: dict[str, object] = {"text": event.text}
                if event.logprobs:
                    fields["logprobs"] = self._logprobs(event.logprobs)
                self._send(tracked, event.token_ids, fields, 0)
            return
        if isinstance(event, Prefilling):
            tracked = self._jobs[event.job]
            if tracked.carry.get("progress"):
                self._link.prefill(tracked.channel, tracked.request, event.done, event.total)
            return
        tracked = self._forget(event.job)
        if isinstance(event, Failed):
            self._send_error(tracked, event.error)
            return
        self._send_finished(tracked, event.token_ids, event.text, event.finish_reason, event)

    def _forget(self, job_id: int) -> _Tracked:
        tracked = self._jobs.pop(job_id)
        del self._job_ids[tracked.channel, tracked.request]
        return tracked

    def _send_finished(
        self,
        tracked: _Tracked,
        token_ids: Sequence[int],
        text: str,
        reason: str,
        finished: Finished | None = None,
    ) -> None:
        completion = finished.completion_tokens if finished else tracked.tokens + len(token_ids)
        usage = {"prompt_tokens": tracked.prompt_tokens, "completion_tokens": completion}
        if finished and finished.cached_tokens:
            usage["cached_tokens"] = finished.cached_tokens
        if finished and (finished.draft_accepted or finished.draft_rejected):
            usage |= {"draft_accepted": finished.draft_accepted, "draft_rejected": finished.draft_rejected}
        if resumes := tracked.carry.get("resumes"):
            usage["resumes"] = resumes
        timings = _timings(tracked.carry, completion, finished)
        fields: dict[str, object] = {"text": text, "finish_reason": reason, "usage": usage, "timings": timings}
        if finished and finished.logprobs:
            fields["logprobs"] = self._logprobs(finished.logprobs)
        self._send(tracked, token_ids, fields, EventFlag.FINISHED)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[Any]:
        """As ``protocol.messages`` has them: [[logprob, bytes, [[id, logprob, bytes], ...]], ...]."""
        spell = self._token_bytes
        return [
            [token.logprob, spell(token.token_id), [[other, logprob, spell(other)] for other, logprob in token.top]]
            for token in tokens
        ]

    def _send_error(self, tracked: _Tracked, error: WireError) -> None:
        self._send(tracked, (), {"error": error.to_wire(), "delivered_tokens": tracked.tokens}, EventFlag.ERROR)

    def _send(self, tracked: _Tracked, ids: Sequence[int], fields: dict[str, object], flags: int) -> None:
        tokens = len(ids)
        if tokens and not tracked.tokens:
            flags |= EventFlag.FIRST
        event = self._writer.event(ids, fields)
        entry = EventEntry(tracked.request, tracked.seq, int(flags), tokens, len(event))
        self._link.queue(tracked.channel, entry, event)
        tracked.seq += 1
        tracked.tokens += tokens

    def _report(self, now: float) -> None:
        if now < self._stats_due:
            return
        self._stats_due = now + STATS_INTERVAL_S
        stats = self._engine.stats()
        self._link.stats({"pending": stats.pending, "active": stats.active, "steps": stats.steps, **stats.extra})


def _prompt_field(request: GenerateRequest) -> str:
    return next(name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None)


def not_resumable(request: GenerateRequest) -> str | None:
    """What of a request cannot go on in another worker, for people; None if all of it can.

    Mirostat's state follows from probabilities that are gone; an answer with banned strings, or whose first token was
    healed, does not follow from its ids alone; guidance keeps two sequences in step.
    """
    if request.mirostat_mode:
        return "mirostat"
    if request.banned_strings:
        return "banned_strings"
    if request.token_healing:
        return "token_healing"
    if request.cfg_scale != 1:
        return "cfg_scale"
    return None


def _timings(carry: dict[str, Any], completion: int, finished: Finished | None) -> dict[str, float]:
    """Of an answer that went on here, prefill and decoding are those of this worker alone."""
    timings = {"queue_ms": round(carry.get("queue_ms", 0.0), 3)}
    if finished is not None:
        timings |= {"prefill_ms": round(finished.prefill_s * 1000, 3), "decode_ms": round(finished.decode_s * 1000, 3)}
        drawn = completion - len(carry.get("token_ids", b"")) // 4 - 1  # the first ends the prefill
        if drawn > 0 and finished.decode_s > 0:
            timings["tokens_per_s"] = round(drawn / finished.decode_s, 2)
    return timings
