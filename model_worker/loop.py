"""The worker's loop: receive, submit, step, send. One thread and one engine. It blocks on the socket only when idle.

Conversations become prompts in another process (``rendering``). Meanwhile steps go on, and other requests pass them. If
the constraint of a job has to be compiled, the job goes back to the supervisor until that is done (parking).
"""

import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from struct import pack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from model_worker.embedding import NewVectors
from model_worker.engine import (
    DrawnToken,
    Engine,
    EngineEvent,
    Failed,
    Finished,
    NewTokens,
    Prefilling,
    PromptLogprobs,
    SleepRefused,
)
from model_worker.intake import UNKNOWN, Intake, ModelTraits, prompt_field, variant_of
from model_worker.link import JobCursor, WorkerLink
from model_worker.rendering import Renderer
from protocol.chat import AskTemplate, Detokenize, Question, Tokenize, parse_question
from protocol.codec import EventWriter, pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import MAX_FRAME
from protocol.messages import (
    Ask,
    CancelJob,
    EventEntry,
    EventFlag,
    FinishReason,
    JobMessage,
    Kind,
    Message,
    SetLogStyle,
    Shutdown,
    Sleep,
    Wake,
)
from protocol.process.logs import adopt_style
from protocol.process.shown import LogStyle, masked_values
from protocol.process.worker_spec import ProgressLease
from protocol.request import GenerateRequest

if TYPE_CHECKING:
    from model_worker.engine import SleepingEngine
    from model_worker.engines.constraints import Constraints


# Give jobs back to the supervisor while their constraints are compiled, so that they hold no slot meanwhile.
#
# A job whose constraint is at hand starts at once. Any other is parked: the supervisor gets PARKED, keeps the request,
# and gives the slot to another request. When the constraint is compiled, the worker sends COMPILED. The supervisor
# sends the job again when it is that request's turn. The compiled constraint waits in the worker.


@dataclass(frozen=True, slots=True)
class _Parked:
    channel: int
    request: int
    party: int


class Parking:
    """The parked jobs of one worker.

    constraints  the engine's constraints; None if it offers none
    """

    def __init__(self, constraints: "Constraints | None", link: WorkerLink) -> None:
        self._constraints, self._link = constraints, link
        self._compiling: dict[int, _Parked] = {}
        """The parked jobs by job id. Cancelled jobs stay here until their costs have been reported."""
        self._ids: dict[tuple[int, int], int] = {}
        """Job ids of the requests that the supervisor will send again."""

    def park(
        self, job_id: int, channel: int, request: int, carry: dict[str, Any], constraint: tuple[str, str] | None
    ) -> bool:
        """Give a job back if its constraint is not at hand. Return whether that was done."""
        constraints = self._constraints
        if constraints is None or constraint is None or carry.get("stay") or constraints.is_at_hand(*constraint):
            return False
        party = carry.get("party", channel)
        constraints.compile_ahead(job_id, party, *constraint)
        self._compiling[job_id] = _Parked(channel, request, party)
        self._ids[channel, request] = job_id
        self._link.parked(channel, request)
        return True

    def take(self, channel: int, request: int) -> int | None:
        """Return the id under which the constraint of a job was compiled; None if the job was not parked."""
        return self._ids.pop((channel, request), None)

    def forget(self, job_id: int) -> None:
        """Forget a job that ``take`` returned, because the engine has it now, or because it has ended."""
        if self._constraints is not None and not self._constraints.forget(job_id):
            self._compiling.pop(job_id, None)

    def cancel(self, channel: int, request: int) -> bool:
        """Forget a parked request. Return whether there was one."""
        job_id = self.take(channel, request)
        if job_id is not None:
            self.forget(job_id)
        return job_id is not None

    def tell(self) -> None:
        """Tell the supervisor which constraints were compiled."""
        if self._compiling and self._constraints is not None:
            for job_id, seconds in self._constraints.compiled_ahead():
                parked = self._compiling.pop(job_id)
                self._link.compiled(parked.channel, parked.request, parked.party, ceil(1000 * seconds))

    @property
    def busy(self) -> bool:
        """Return whether constraints are being compiled, so that ``tell`` will have something to report."""
        return bool(self._compiling)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return descriptors that become readable when ``tell`` has something to report."""
        return () if self._constraints is None or not self._compiling else self._constraints.descriptors


# Put the model of a worker to sleep, and wake it. The supervisor orders both, and only while the worker has no job.


class Moves:
    """The moves of one model between the memory of its GPU and that of the host."""

    def __init__(self, engine: Engine, link: "WorkerLink", lease: "ProgressLease") -> None:
        self._engine, self._link, self._lease = engine, link, lease
        self.preparing = engine.capabilities.sleep_bytes is not None
        """Whether there is more to do before the first sleep."""

    def prepare(self) -> None:
        """Do a part of the first sleep ahead, while there is nothing else to do."""
        self._lease.moving()
        self.preparing = cast("SleepingEngine", self._engine).prepare_sleep()

    def sleep(self) -> None:
        """Put the model to sleep, and tell the supervisor how that went."""
        begun, size = time.monotonic(), self._engine.capabilities.sleep_bytes
        if size is None:
            self._link.slept(0.0, 0, self._engine.capabilities.no_sleep)
            return
        self._lease.moving()
        self.preparing = False
        try:
            cast("SleepingEngine", self._engine).sleep(self._lease.moving)
        except SleepRefused as e:
            self._link.slept(0.0, 0, " ".join(str(e).split()) or "no reason was given")
            return
        self._link.slept(time.monotonic() - begun, size)

    def wake(self) -> None:
        """Wake the model, and tell the supervisor."""
        begun, size = time.monotonic(), self._engine.capabilities.sleep_bytes
        self._lease.moving()
        cast("SleepingEngine", self._engine).wake(self._lease.moving)
        self._link.woke(time.monotonic() - begun, size or 0)


# Answer ASK messages: questions of clients about the model's tokenizer.


_MOST = MAX_FRAME[Kind.ANSWER] - 1024


def answer(question: Question, engine: Engine, intake: Intake, rendered: str | None = None) -> bytes:
    """Return the body of ANSWER. If the question cannot be answered, the body holds the error.

    rendered  the text that the chat template made of ``question.messages``
    """
    try:
        if isinstance(question, AskTemplate):
            return _fitting(pack_body({"result": _template(engine)}))
        if isinstance(question, Detokenize):
            return _fitting(pack_body({"result": {"text": _text(question, engine)}}))
        return _fitting(pack_body({"result": _tokens(question, engine, intake, rendered)}))
    except WireError as e:
        return failed(e)


def failed(error: WireError) -> bytes:
    """Return the body of ANSWER to a question that failed."""
    return pack_body({"error": masked_values(error.to_wire())})


def _tokens(question: Tokenize, engine: Engine, intake: Intake, rendered: str | None) -> dict[str, Any]:
    if question.prompt is None:
        ids = engine.encode_rendered(rendered or "")
    else:
        ids = intake.encode(question.prompt, add_special=question.add_special)
    result: dict[str, Any] = {"token_ids": pack(f"<{len(ids)}I", *ids), "count": len(ids)}
    result["context"] = engine.capabilities.context
    if question.with_text:
        result["text"] = question.prompt if rendered is None else rendered
    if question.with_pieces:
        result["pieces"] = [engine.token_bytes(token) for token in ids]
    return result


def _template(engine: Engine) -> dict[str, Any]:
    template = engine.chat_template
    if template is None:
        return {"source": None, "tool_source": None, "special_tokens": {}}
    named = dict(template.special_tokens)
    return {"source": template.source, "tool_source": template.tool_source, "special_tokens": named}


def _text(question: Detokenize, engine: Engine) -> str:
    ids, context = memoryview(question.token_ids).cast("I"), engine.capabilities.context
    if len(ids) > context:
        raise RequestError(
            f"token_ids has {len(ids)} tokens: at most {context} fit the context",
            field="token_ids",
            code=ErrorCode.CONTEXT_OVERFLOW,
        )
    return engine.decode(list(ids))


def _fitting(body: bytes) -> bytes:
    if len(body) > _MOST:
        raise WireError(ErrorCode.TOO_LARGE, f"the answer has {len(body)} bytes: at most {_MOST} can be sent")
    return body


_log = logging.getLogger(__name__)
IDLE_WAIT_MS = 200
UNSENT_WAIT_MS = 5
"""Milliseconds between two tries to send the events that a full pipe did not accept, while the engine is idle."""
PREPARING_WAIT_MS = 50
"""Milliseconds that pass without a message before another part of the first sleep is done ahead."""
RENDERING_WAIT_MS = 20
"""Milliseconds between two looks at conversations that are being rendered, unless one is done earlier."""
STATS_INTERVAL_S = 1.0
SLACK_JOBS = 2
"""Jobs held beyond a full batch. A freed place is then filled at the next step, and not a round trip later."""


class _Tracked(JobCursor):
    """A job of this worker, with the position in its stream of events.

    came     when the worker got it, in monotonic seconds
    opening  what the first event says about the answer; empty if it says nothing, or has been sent
    cut      the most tokens of the answer, if the context has cut the request's max_tokens; else None
    left_out  the options that the worker does without, as the request allows it
    forced   the options of the request that the model has replaced, with the value that counts
    empty    whether the answer is empty whatever the engine draws (max_tokens 0)
    """

    __slots__ = ("came", "carry", "cut", "empty", "forced", "left_out", "opening", "prompt_tokens")

    def __init__(self, channel: int, request: int, seq: int, tokens: int, carry: dict[str, Any]) -> None:
        super().__init__(channel, request, seq, tokens)
        self.prompt_tokens, self.carry, self.came = 0, carry, time.monotonic()
        self.opening: dict[str, Any] = {}
        self.cut: int | None = None
        self.left_out: list[str] = []
        self.forced: Mapping[str, float | None] = {}
        self.empty = False


@dataclass(slots=True)
class _Unopened:
    """Stands for a job whose first event has more than a text, or whose answer is empty. The outbox leaves such a job's
    events to the loop."""

    job: _Tracked


class WorkerLoop:
    """Serves one loaded engine until SHUTDOWN.

    every_second  called about once a second, between two steps

    Nothing catches an exception of the engine's step: it ends the process.
    """

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        limits: Mapping[str, Any] = MappingProxyType({}),
        lease: ProgressLease | None = None,
        every_second: Callable[[], None] = lambda: None,
        format: ModelTraits = UNKNOWN,
        forced: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._engine = engine
        self._link = link
        self._lease = lease or ProgressLease()
        self._every_second = every_second
        self._intake = Intake(engine, sampling, limits, format, forced)
        self._format = format
        template = engine.chat_template
        self._renderer = None if template is None else Renderer(template, self._intake.longest_text, format.forms)
        self._writer = EventWriter()
        self._token_bytes = lru_cache(1 << 16)(engine.token_bytes)
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Tracked | _Unopened] = {}
        self._job_ids: dict[tuple[int, int], int] = {}
        # conversations that are being rendered, by the ids that the jobs and questions will have
        self._chats: dict[int, tuple[_Tracked, GenerateRequest]] = {}
        self._questions: dict[int, tuple[int, Tokenize]] = {}
        self._parking = Parking(engine.constraints, link)
        self._moves = Moves(engine, link, self._lease)
        self._asked: deque[Ask] = deque()
        self._shutdown = False
        self._stats_due = 0.0
        self._prompt_tokens = self._cached_tokens = 0
        """Tokens of the prompts of all finished jobs, and how many of them the cache had."""
        self.max_jobs = engine.capabilities.max_batch_size + SLACK_JOBS
        """The number of jobs that the supervisor may give to this worker at once."""

    @property
    def end_tokens(self) -> str:
        """Return the names of the tokens that end an answer, for people."""
        return self._intake.end_tokens

    def run(self) -> None:
        try:
            while not self._shutdown:
                self._turn()
        finally:
            if self._renderer is not None:
                self._renderer.close()

    def _turn(self) -> None:
        busy = bool(self._jobs or self._chats)
        rendering = self._renderer is not None and self._renderer.busy
        for message in self._receive(rendering):
            self._lease.step()
            self._apply(message)
        while self._asked:
            question = self._asked.popleft()
            self._lease.step()
            self._ask(question.ask, question.verb, question.body)
            if self._jobs:  # one per step: a long text takes milliseconds, and streams wait meanwhile
                break
        if self._renderer is not None and self._renderer.busy:
            for key, outcome in self._renderer.collect():
                self._lease.step()
                self._rendered(key, outcome)
        self._parking.tell()
        if self._jobs:
            self._steps()
        if busy and not (self._jobs or self._chats):
            self._stats_due = 0.0  # report at once that the engine is empty, so that `status` never shows a stale job
        self._link.flush()
        self._report(time.monotonic())

    def _steps(self) -> None:
        """Run one or more steps, and handle their events.

        Several steps run in a row only if nothing but the supervisor's messages and the next report could come between
        them.
        """
        alone = not (self._asked or self._parking.busy or (self._renderer is not None and self._renderer.busy))
        until = self._stats_due if alone else 0.0
        events, at = self._link.steps(self._engine.step, self._lease, self._jobs, until)
        while at < len(events):
            self._emit(events[at])
            at = self._link.take(events, at + 1, self._jobs)

    def _receive(self, rendering: bool) -> list[Message]:
        if self._jobs or self._asked:
            return self._link.receive(0)
        self._lease.idle()
        if not rendering or self._renderer is None:
            if self._moves.preparing and not (self._link.unsent or self._parking.busy):
                received = self._link.receive(PREPARING_WAIT_MS, self._parking.descriptors)
                if not received:
                    self._moves.prepare()
                return received
            wait_ms = UNSENT_WAIT_MS if self._link.unsent else IDLE_WAIT_MS
            return self._link.receive(wait_ms, self._parking.descriptors)
        return self._link.receive(RENDERING_WAIT_MS, [*self._renderer.descriptors, *self._parking.descriptors])

    def _apply(self, message: Message) -> None:
        match message:
            case JobMessage(channel, request, carry, body):
                self._submit(channel, request, carry, body)
            case CancelJob(channel, request):
                self._cancel(channel, request)
            case Ask():
                self._asked.append(message)
            case Sleep():
                self._moves.sleep()
            case Wake():
                self._moves.wake()
            case SetLogStyle(level, format):
                adopt_style(LogStyle(level, format))
            case Shutdown():
                self._shutdown = True

    def _submit(self, channel: int, request: int, carry: dict[str, Any], body: bytes) -> None:
        parked = self._parking.take(channel, request)
        job_id = next(self._ids) if parked is None else parked
        resumed = len(carry.get("token_ids", b"")) // 4
        tracked = _Tracked(channel, request, carry.get("seq", 0), resumed, carry)
        try:
            self._intake.check_verb(verb := carry.get("verb", ""))
            if verb:
                self._engine.submit(self._intake.vectors_job(job_id, verb, body, tracked.seq))
                self._jobs[job_id], self._job_ids[channel, request] = tracked, job_id
                return
            asked = self._intake.parse(body, resumed=bool(tracked.seq), variant=variant_of(carry))
            conversation = self._intake.conversation(asked)
            constraint = self._intake.constraint(asked)
        except WireError as e:
            self._parking.forget(job_id)
            self._send_error(tracked, e)
            return
        if parked is None and self._parking.park(job_id, channel, request, carry, constraint):
            return
        if conversation is None or self._renderer is None:
            self._start(job_id, tracked, asked)
            return
        self._chats[job_id] = tracked, asked
        self._job_ids[channel, request] = job_id
        self._renderer.ask(job_id, channel, conversation)

    def _rendered(self, key: int, outcome: str | WireError) -> None:
        """Go on with a conversation that the template has made into a text, or send its error."""
        if chat := self._chats.pop(key, None):
            tracked, asked = chat
            del self._job_ids[tracked.channel, tracked.request]
            if isinstance(outcome, WireError):
                self._parking.forget(key)
                self._send_error(tracked, outcome)
            else:
                self._start(key, tracked, asked, outcome)
        elif question := self._questions.pop(key, None):
            number, asked_of_us = question
            if isinstance(outcome, WireError):
                self._link.answer(number, failed(outcome))
            else:
                self._link.answer(number, answer(asked_of_us, self._engine, self._intake, outcome))

    def _start(self, job_id: int, tracked: _Tracked, asked: GenerateRequest, rendered: str | None = None) -> None:
        resumed_ids = tuple(memoryview(tracked.carry.get("token_ids", b"")).cast("I"))
        try:
            job = self._intake.job(
                job_id, asked, resumed_ids, rendered, variant=variant_of(tracked.carry), events=tracked.seq
            )
            self._engine.submit(job)
        except WireError as e:
            if e.field == "prompt":
                e.field = prompt_field(asked)
            self._send_error(tracked, e)
            return
        finally:
            self._parking.forget(job_id)
        tracked.prompt_tokens = len(job.prompt_ids)
        self._link.prefill(tracked.channel, tracked.request, 0, tracked.prompt_tokens)  # the supervisor counts it
        self._jobs[job_id] = tracked
        _log.debug("request %d-%d: %d tokens of prompt", tracked.channel, tracked.request, tracked.prompt_tokens)
        if asked.cut_to_context and asked.max_tokens is not None and job.max_new_tokens < asked.max_tokens:
            tracked.cut = job.max_new_tokens
        if asked.reasoning_budget is None and "reasoning_budget" in vars(asked):  # see ``Intake.parse``
            tracked.left_out = ["reasoning_budget"]
        tracked.forced = asked.replaced
        tracked.empty = asked.max_tokens == 0
        if not tracked.seq:
            if asked.with_format:
                tracked.opening["format"] = self._format.to_wire(inside=job.layout.place == "inside")
                tracked.opening["prompt_tokens"] = tracked.prompt_tokens
            if tracked.left_out:
                tracked.opening["left_out"] = tracked.left_out
            if tracked.forced:
                tracked.opening["forced"] = tracked.forced
            if tracked.cut is not None:
                tracked.opening["max_tokens"] = tracked.cut
        if tracked.opening or tracked.empty:
            self._jobs[job_id] = _Unopened(tracked)
        self._job_ids[tracked.channel, tracked.request] = job_id

    def _ask(self, number: int, verb: str, body: bytes) -> None:
        try:
            question = parse_question(verb, body)
            conversation = self._intake.conversation(question) if isinstance(question, Tokenize) else None
        except WireError as e:
            self._link.answer(number, failed(e))
            return
        if conversation is None or self._renderer is None or not isinstance(question, Tokenize):
            self._link.answer(number, answer(question, self._engine, self._intake))
            return
        key = next(self._ids)
        self._questions[key] = number, question
        self._renderer.ask(key, 0, conversation)

    def _cancel(self, channel: int, request: int) -> None:
        """Free the job and confirm the cancel. Ignore a job that has ended: its terminal event is already on its
        way."""
        if self._parking.cancel(channel, request):
            return  # the supervisor knows that a parked job is not in the worker
        job_id = self._job_ids.get((channel, request))
        if job_id is None:
            return
        if job_id in self._chats and self._renderer is not None:
            self._renderer.cancel(job_id)
            self._parking.forget(job_id)
            tracked, _ = self._chats.pop(job_id)
            del self._job_ids[channel, request]
        else:
            self._engine.cancel(job_id)
            tracked = self._forget(job_id)
        self._send_finished(tracked, (), "", FinishReason.CANCELLED)

    def _emit(self, event: EngineEvent) -> None:
        # If an engine names a job that the worker does not have, it may have mixed up the tokens of its jobs. The
        # KeyError ends the process (invariant 2 in docs/internals.md).
        if isinstance(event, NewTokens):
            tracked = _opened(self._jobs[event.job])
            if (event.token_ids or event.text) and not tracked.empty:
                self._jobs[event.job] = tracked
                fields: dict[str, object] = {"text": event.text}
                if event.logprobs:
                    fields["logprobs"] = self._logprobs(event.logprobs)
                self._send(tracked, event.token_ids, fields, 0)
            return
        if isinstance(event, PromptLogprobs):
            tracked = _opened(self._jobs[event.job])
            if not tracked.empty:
                self._jobs[event.job] = tracked
            self._send(tracked, (), {"text": "", "prompt_logprobs": self._prompt_logprobs(event)}, 0)
            return
        if isinstance(event, NewVectors):
            packed = {"first": event.first, "size": event.size, "data": event.data, "maker": event.maker}
            self._send(_opened(self._jobs[event.job]), (), {"text": "", "vectors": packed}, 0)
            return
        if isinstance(event, Prefilling):
            tracked = _opened(self._jobs[event.job])
            if tracked.carry.get("verb"):  # the engine tokenizes the texts of an EMBED itself, and counts them once
                tracked.prompt_tokens = event.total
                self._link.prefill(tracked.channel, tracked.request, 0, event.total)
            elif tracked.carry.get("progress"):
                self._link.prefill(tracked.channel, tracked.request, event.done, event.total)
            return
        tracked = self._forget(event.job)
        if isinstance(event, Failed):
            self._send_error(tracked, event.error)
            return
        if tracked.empty:
            event = replace(event, token_ids=(), completion_tokens=0, logprobs=(), stop_string=None)
            self._send_finished(tracked, (), "", FinishReason.LENGTH, event)
            return
        self._send_finished(tracked, event.token_ids, event.text, event.finish_reason, event)

    def _forget(self, job_id: int) -> _Tracked:
        tracked = _opened(self._jobs.pop(job_id))
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
        _log.debug("request %d-%d: ended (%s), %d tokens", tracked.channel, tracked.request, reason, completion)
        usage = {"prompt_tokens": tracked.prompt_tokens, "completion_tokens": completion}
        if finished:
            self._prompt_tokens += tracked.prompt_tokens
            self._cached_tokens += min(finished.cached_tokens, tracked.prompt_tokens)  # without resumed ids
        if finished and finished.cached_tokens:
            usage["cached_tokens"] = finished.cached_tokens
        if finished and (finished.draft_accepted or finished.draft_rejected):
            usage |= {"draft_accepted": finished.draft_accepted, "draft_rejected": finished.draft_rejected}
        if resumes := tracked.carry.get("resumes"):
            usage["resumes"] = resumes
        timings = _timings(tracked.carry, completion, finished, time.monotonic() - tracked.came)
        fields: dict[str, object] = {"text": text, "finish_reason": reason, "usage": usage, "timings": timings}
        if finished and finished.logprobs:
            fields["logprobs"] = self._logprobs(finished.logprobs)
        if finished and finished.stop_string is not None:
            fields["stop_string"] = finished.stop_string
        if tracked.cut is not None:
            fields["max_tokens"] = tracked.cut
        if tracked.left_out:
            fields["left_out"] = tracked.left_out
        if tracked.forced:
            fields["forced"] = tracked.forced
        self._send(tracked, token_ids, fields, EventFlag.FINISHED)

    def _logprobs(self, tokens: Sequence[DrawnToken]) -> list[Any]:
        """Return log-probabilities in the form of ``protocol.messages``: [[logprob, bytes, [[id, logprob, bytes],
        ...]], ...]."""
        spell = self._token_bytes
        return [
            [token.logprob, spell(token.token_id), [[other, logprob, spell(other)] for other, logprob in token.top]]
            for token in tokens
        ]

    def _prompt_logprobs(self, piece: PromptLogprobs) -> dict[str, Any]:
        known = sorted({piece.before, *memoryview(piece.ids).cast("I")})
        return {
            "first": piece.first,
            "top": piece.top,
            "ids": piece.ids,
            "logprobs": piece.logprobs,
            "before": piece.before,
            "known": array("I", known).tobytes(),
            "bytes": [self._token_bytes(token) for token in known],
        }

    def _send_error(self, tracked: _Tracked, error: WireError) -> None:
        _log.debug("request %d-%d: failed (%s)", tracked.channel, tracked.request, error.code.wire_name)
        self._send(
            tracked, (), {"error": masked_values(error.to_wire()), "delivered_tokens": tracked.tokens}, EventFlag.ERROR
        )

    def _send(self, tracked: _Tracked, ids: Sequence[int], fields: dict[str, object], flags: int) -> None:
        tokens = len(ids)
        if tokens and not tracked.tokens:
            flags |= EventFlag.FIRST
        if tracked.opening and flags != EventFlag.ERROR:
            fields |= tracked.opening
            tracked.opening = {}
        event = self._writer.event(ids, fields)
        entry = EventEntry(tracked.request, tracked.seq, int(flags), tokens, len(event))
        self._link.queue(tracked.channel, entry, event)
        tracked.seq += 1
        tracked.tokens += tokens

    def _report(self, now: float) -> None:
        if now < self._stats_due:
            return
        self._stats_due = now + STATS_INTERVAL_S
        self._every_second()
        stats = self._engine.stats()
        pending = stats.pending + len(self._chats)
        figures = {"pending": pending, "active": stats.active, "steps": stats.steps}
        figures |= {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens}
        self._link.stats({**figures, **stats.extra})


def _opened(job: _Tracked | _Unopened) -> _Tracked:
    return job.job if isinstance(job, _Unopened) else job


def _timings(carry: dict[str, Any], completion: int, finished: Finished | None, spent_s: float) -> dict[str, float]:
    """Return the timings of an answer. If the answer was resumed, prefill and decoding are those of this worker
    alone.

    spent_s  seconds for which the worker has had the job. What the engine did not compute in is time in the queue: a
             worker gets a few jobs ahead of free places in its batch
    """
    waited_s = max(0.0, spent_s - finished.prefill_s - finished.decode_s) if finished and finished.prefill_s else 0.0
    timings = {"queue_ms": round(carry.get("queue_ms", 0.0) + 1000 * waited_s, 3)}
    if finished is not None:
        timings |= {"prefill_ms": round(finished.prefill_s * 1000, 3), "decode_ms": round(finished.decode_s * 1000, 3)}
        drawn = completion - len(carry.get("token_ids", b"")) // 4 - 1  # the first token ends the prefill
        if drawn > 0 and finished.decode_s > 0:
            timings["tokens_per_s"] = round(drawn / finished.decode_s, 2)
    return timings
