"""The embedded engine: any AutoModelForCausalLM with standard attention, in float32, on the CPU or another device.

It steps the model's own forward pass over a cache of slots. All running answers advance by one token in one pass.
Before that pass at most ``chunk_size`` prompt tokens are computed, so a long prompt does not stall running answers.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from model_worker.engine import (
    Capabilities,
    DrawnToken,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Job,
    NewTokens,
    Prefilling,
    ProgressCallback,
    PromptLogprobs,
)
from model_worker.engines.admission import left_to_draw
from model_worker.engines.banned import BannedStrings, BanVerdict, Healing
from model_worker.engines.base import BaseEngine
from model_worker.engines.constraints import OFFERED as CONSTRAINTS
from model_worker.engines.constraints import AnyConstraint, Mask
from model_worker.engines.embedded.check import OFFERED, check, read_options
from model_worker.engines.embedded.load import SlotModel, check_room, device_name, load_model
from model_worker.engines.embedded.sampling import Sampler, log_probability
from model_worker.engines.prompt_scores import PromptPieces, places_at_once, score
from model_worker.engines.vetting import understood
from model_worker.text import LoopWatch, TextStream
from protocol.errors import RequestError
from protocol.messages import FinishReason
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams

# Make the events of a job from the ids that the transformers engine has drawn. Does not import torch.


NewStream = Callable[[Sequence[int]], TextStream]
"""Makes the stream of the text that follows these ids."""


class EmbeddedAnswer:
    """A job's answer so far.

    prompt   ids before the answer: the job's prompt, or what healing leaves of it
    given    ids before the first token drawn here: the prompt, and the part of the answer that another worker delivered
    ids      tokens of the answer: the part delivered by another worker, and the drawn tokens that were not taken back,
             including a healed one
    returns  how often the answer has gone back
    end_ids  ids that end the answer
    """

    def __init__(
        self,
        job: Job,
        new_stream: NewStream,
        eos_ids: Collection[int],
        healing: Healing | None = None,
        constraint: AnyConstraint | None = None,
    ) -> None:
        self.job, self._healing, self._constraint = job, healing, constraint
        self.prompt = healing.prompt_ids if healing else job.prompt_ids
        self.given = self.prompt + job.resumed_ids
        self.ids: list[int] = []
        self.returns = 0
        self.end_ids = frozenset(eos_ids).union(job.stop_token_ids)
        self.started = 0.0  # seconds of the monotonic clock
        self.first_token = 0.0
        self._logprobs: list[DrawnToken] = []
        self._silent: list[bool] = []  # for each of ids, whether it completed no text
        self._delivered = 0  # number of ids that are delivered
        self._new_stream = new_stream
        self._text = new_stream(self.prompt)
        self._early = job.min_new_tokens
        self._loops = LoopWatch(job.stop_on_loop) if job.stop_on_loop else None
        self._judge: BannedStrings | None = None
        if job.banned_strings or healing:  # the judge also looks for stop strings in the rest of a healed token's text
            self._judge = BannedStrings(
                job.banned_strings,
                job.stop,
                minimum=job.min_new_tokens,
                limit=job.max_new_tokens,
                healed=healing is not None,
            )
        elif not self._early:
            self._text.stop_at(job.stop)
        for token in job.resumed_ids:  # never together with a judge; the client already has the text of these tokens
            self.ids.append(token)
            if self._push(token)[1]:
                raise RequestError("resumed_ids hold a stop string: the answer had ended", field="resumed_ids")
            if self._loops is not None:  # a loop that was delivered ends the answer with the next token
                self._loops.push(token)
        self._delivered = len(self.ids)

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.ids)

    @property
    def newest(self) -> int:
        return self.ids[-1] if self.ids else self.prompt[-1]

    @property
    def completion_tokens(self) -> int:
        return max(0, len(self.ids) - (self._healing is not None))

    @property
    def is_free(self) -> bool:
        """Return whether nothing limits the next draw."""
        limited = self._constraint is not None and not self._constraint.free
        return self._judge is None and not limited and len(self.ids) >= self._early

    @property
    def only(self) -> Collection[int] | None:
        """Return the ids that the next draw is limited to; None for no limit."""
        return self._healing.allowed if self._healing and not self.ids else None

    @property
    def allowed(self) -> Mask | None:
        """Return the ids that the constraint leaves for the next draw; None for all. Raises RequestError if it is too
        costly to compute them."""
        return None if self._constraint is None or self._constraint.free else self._constraint.allowed

    @property
    def excluded(self) -> Collection[int]:
        """Return the ids that must not be drawn next."""
        excluded: Collection[int] = self._judge.blocked if self._judge else ()
        heals = self._healing is not None and not self.ids
        return self.end_ids.union(excluded) if heals or self.completion_tokens < self._early else excluded

    def take(self, token: int, logprob: DrawnToken | None, now: float) -> NewTokens | Finished | None:
        """Add a new token. Return more text, the end of the answer, or None.

        If the answer goes back, ``ids`` has fewer tokens afterwards. Raises RequestError if the constraint becomes too
        costly.
        """
        self.ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        self.first_token = self.first_token or now
        if self._judge is not None:
            return self._judged(self._judge, token, now)
        if token in self.end_ids:
            return self._event(1, self._text.finish(), "stop", now)
        text, stopped = self._push(token)
        if stopped:
            return self._event(1, text, "stop", now)
        if self._completes(token):
            return self._event(1, text + self._text.finish(), "stop", now)
        if self._loops is not None and self._loops.push(token) and len(self.ids) >= self.job.min_new_tokens:
            return self._event(1, text + self._text.finish(), FinishReason.LOOP, now)
        if len(self.ids) < self.job.max_new_tokens:
            return self._event(1, text, None, now)
        return self._event(1, text + self._text.finish(), "length", now)

    def _push(self, token: int) -> tuple[str, bool]:
        """Return (the text that the newest of ``ids`` completes, whether a stop string ends in it)."""
        if self._early and len(self.ids) > self._early:
            self._early = 0
            self._text.stop_at(self.job.stop)
        return self._text.push(token)

    def _completes(self, token: int) -> bool:
        """Return whether the constraint allows nothing after the newest token."""
        if self._constraint is None:
            return False
        self._constraint.push(token)
        return self._constraint.finished

    def give_up(self, now: float) -> NewTokens | Finished | None:
        """End the answer, because no token is left that may be drawn next."""
        self.first_token = self.first_token or now
        if self._judge is None and self._constraint is not None:
            reason = FinishReason.STOP if self._constraint.accepting else FinishReason.BANNED
            return self._event(0, self._text.finish(), reason, now)
        if self._judge is None:
            raise RuntimeError(f"job {self.job.id}: no token is left to draw")
        verdict = self._judge.give_up()
        return self._event(verdict.tokens, verdict.text, verdict.ended, now)

    def _judged(self, judge: BannedStrings, token: int, now: float) -> NewTokens | Finished | None:
        reason: str | None = None
        verdicts: list[BanVerdict] = []
        if token in self.end_ids and judge.position >= (self._healing is not None):
            reason = "stop"
        else:
            text, _ = self._text.push(token)
            self._silent.append(not text)
            if self._healing and len(self.ids) == 1:
                text = self._healing.rest(text)
            verdicts.append(judge.push(token, text))
            if self._completes(token):
                reason = "complete"
            elif self.completion_tokens == self.job.max_new_tokens:
                reason = "length"
        if reason and not any(verdict.ended or verdict.back_to is not None for verdict in verdicts):
            verdicts.append(judge.finish(self._text.finish()))
        count, text = sum(v.tokens for v in verdicts), "".join(v.text for v in verdicts)
        last = verdicts[-1]
        if last.back_to is not None:
            self._go_back(last.back_to)
            reason = None
        elif last.ended:
            reason = last.ended
        elif reason == "stop":
            count += 1  # the end token, which the judge does not count
        elif reason == "complete":
            reason = "stop"
        return self._event(count, text, reason, now)

    def _go_back(self, kept: int) -> None:
        self.returns += 1
        if self._constraint is not None:
            self._constraint.back_to(kept)
        del self.ids[kept:], self._silent[kept:]
        del self._logprobs[kept - self._delivered :]
        complete = kept
        while complete and self._silent[complete - 1]:
            complete -= 1
        self._text = self._new_stream((*self.prompt, *self.ids[:complete]))
        for token in self.ids[complete:]:
            self._text.push(token)  # the beginning of a character, whose end is drawn again

    def _event(self, count: int, text: str, reason: str | None, now: float) -> NewTokens | Finished | None:
        """Deliver the next ``count`` ids, except a healed one. Return None if there is nothing to deliver."""
        begin = self._delivered
        self._delivered = begin + count
        logprobs = self._logprobs[:count]
        del self._logprobs[:count]
        if self._healing and begin == 0 and count:
            begin, logprobs = 1, logprobs[1:]
        ids = self.ids[begin : self._delivered]
        if reason is None and self._judge is not None and self._loops is not None:
            # Only tokens that are not taken back are looked at. What the judge still holds is left out of the answer.
            looped = [self._loops.push(token) for token in ids]
            reason = FinishReason.LOOP if any(looped) and self._delivered >= self.job.min_new_tokens else None
        if reason is None:
            return NewTokens(self.job.id, ids, text, logprobs) if ids or text else None
        return Finished(
            self.job.id,
            ids,
            text,
            reason,
            prompt_tokens=len(self.job.prompt_ids),
            completion_tokens=max(0, self._delivered - (self._healing is not None)),
            prefill_s=self.first_token - self.started,
            decode_s=now - self.first_token,
            logprobs=logprobs,
            stop_string=(self._judge or self._text).found if reason == FinishReason.STOP else None,
        )


@dataclass(slots=True, eq=False)
class _Running:
    """A job that holds a row of the cache. The row holds the first ``cached`` tokens of the job, never the newest."""

    answer: EmbeddedAnswer
    row: int
    sampler: Sampler
    cached: int = 0
    pieces: PromptPieces | None = None

    @property
    def to_prefill(self) -> int:
        return len(self.answer.given) - 1 - self.cached


@dataclass(slots=True)
class _Counters:
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0


class TransformersEngine(BaseEngine):
    """The engine that serves one model with the transformers library. ``embedded.check`` describes its options."""

    _answers: dict[int, EmbeddedAnswer | _Running]

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        options = read_options(spec)
        self._chunk_size, self._threads = options.chunk_size, options.threads
        self._spec = spec
        self._pending: deque[EmbeddedAnswer] = deque()
        # Rows of the cache: the first _decoding rows advance together, the rows behind them are prefilling.
        self._rows: list[_Running] = []
        self._decoding = 0
        self._prefilling: deque[_Running] = deque()  # in the order of arrival, which the rows need not have
        self._steps = 0
        self._counters = _Counters()

    def load(self, progress: ProgressCallback) -> None:
        """Load the model and warm up. Set this process's number of torch threads. Raises LoadError."""
        torch.set_num_threads(self._threads)
        checked = check(self._spec)
        directory, context = checked.directory, checked.context
        device = torch.device(self._spec.device)
        with understood(self._spec.model_dir):
            check_room(directory, device, self._spec.max_batch_size, context)
            assert checked.tokenizer is not None, "build_engine has seen that its packages are there"
            pieces = checked.tokenizer.pieces
            model = load_model(directory, device, progress)
        rows = int(model.get_input_embeddings().num_embeddings)
        self._set_vocabulary(checked.tokenizer, rows, checked.tokenizer.vocab_size)
        self._model = SlotModel(model, device, self._spec.max_batch_size, context)
        self._capabilities = Capabilities(
            context=context,
            max_batch_size=self._spec.max_batch_size,
            offered=OFFERED | CONSTRAINTS if pieces else OFFERED - {"token_healing"},
            chat=self._tokenizer.has_chat_template,
            device=device_name(device, self._threads),
            attention="PyTorch SDPA over a cache of slots, float32",
            sleep_bytes=self._model.weight_bytes if self._spec.sleep else None,
            no_sleep="" if self._spec.sleep else "models.yaml does not let it sleep",
            end_ids=self._tokenizer.eos_ids,
        )
        progress("warmup", 0, 1)
        with torch.inference_mode():
            self._model.check(directory.architecture, self._drawable)
        self._warm_up(progress)
        progress("warmup", 1, 1)

    def _warm_up(self, progress: ProgressCallback) -> None:
        """Run as many jobs as there are rows, each with a whole chunk if that fits, so that all memory is allocated
        now."""
        context = self.capabilities.context
        new = min(4, context - 1)
        prompt = (0,) * max(1, min(self._chunk_size, context - new))
        for number in range(self._spec.max_batch_size):
            self.submit(Job(-1 - number, prompt, new, SamplingParams(temperature=0)))
        while self._answers:
            progress("warmup", 0, 1)
            self.step()
        self._steps, self._counters = 0, _Counters()

    def _queue(self, job: Job, constraint: AnyConstraint | None) -> None:
        eos_ids = self._tokenizer.eos_ids
        healing = self._healer.heal(job.prompt_ids) if job.token_healing and self._healer else None
        stream = partial(self._tokenizer.stream, layout=job.layout)
        answer = EmbeddedAnswer(job, stream, eos_ids, healing, constraint)
        if healing and not left_to_draw(job, self._drawable, answer.end_ids, healing.allowed):
            raise RequestError(
                "token_healing: no token that may be drawn begins as the prompt's last one does", field="token_healing"
            )
        self._answers[job.id] = answer
        self._pending.append(answer)

    def cancel(self, job_id: int) -> None:
        if self._constraints is not None and self._constraints.cancel(job_id):
            return
        entry = self._answers.pop(job_id, None)
        if isinstance(entry, EmbeddedAnswer):
            self._pending.remove(entry)
        elif entry is not None:
            self._release(entry)

    def reset(self) -> None:
        if self._constraints is not None:
            self._constraints.clear()
        for job_id in list(self._answers):
            self.cancel(job_id)

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """Start the jobs that fit, compute at most one chunk of prompts, then one token for every running answer."""
        failed = self._queue_constrained()
        if not self._answers:
            return failed
        self._steps += 1
        self._admit()
        events = self._prefill()
        return failed + events + self._decode() if self._decoding else failed + events

    def _admit(self) -> None:
        while self._pending and len(self._rows) < self._spec.max_batch_size:
            answer = self._pending.popleft()
            sampler = Sampler(answer.job, self._drawable, self._tokenizer.eos_ids)
            running = _Running(answer, len(self._rows), sampler)
            if (scoring := answer.job.prompt_logprobs) is not None:
                running.pieces = PromptPieces(answer.job.id, answer.job.prompt_ids, scoring)
            self._rows.append(running)
            self._prefilling.append(running)
            self._answers[answer.job.id] = running

    def _prefill(self) -> list[EngineEvent]:
        """Run one forward pass over the next prompts, padded to the longest, of at most chunk_size tokens in all.

        Returns the progress of the prompts that are not complete, and log-probabilities of prompts. A prompt's last
        token is left to decoding, which needs its logits.
        """
        group: list[_Running] = []
        events: list[EngineEvent] = []
        longest, chunk = 0, self._chunk_size
        for running in self._prefilling:
            widest = max(longest, running.to_prefill)
            chunk_with = min(chunk, places_at_once(self._vocab_size)) if running.pieces is not None else chunk
            if group and widest * (len(group) + 1) > chunk_with:
                break
            chunk = chunk_with
            group.append(running)
            longest = widest
            running.answer.started = running.answer.started or time.monotonic()
        if longest:
            some = [r for r in group if r.to_prefill]
            ids = [r.answer.given[r.cached : -1][:chunk] for r in some]
            scored = any(r.pieces is not None for r in some)
            logits = self._model.prefill([r.row for r in some], ids, [r.cached for r in some], logits=scored)
            for row, (running, done) in enumerate(zip(some, ids, strict=True)):
                if running.pieces is not None:
                    events += self._score(running.pieces, running.cached, logits[row, : len(done)])
                running.cached += len(done)
                self._counters.prefill_tokens += len(done)
        for running in group:
            if not running.to_prefill:
                self._prefilling.popleft()
                if running.pieces is not None:
                    events += running.pieces.alone()
                self._swap(running.row, self._decoding)
                self._decoding += 1
        events += [Prefilling(r.answer.job.id, r.cached, len(r.answer.given)) for r in group if r.to_prefill]
        return events

    def _score(self, pieces: PromptPieces, begin: int, logits: torch.Tensor) -> list[PromptLogprobs]:
        """Return the pieces of a prompt that its places from ``begin`` on complete. logits: [places, vocab]."""
        places = pieces.wanted(begin, begin + len(logits))
        if not places:
            return []
        part = logits[places.start - begin : places.stop - begin, : self._drawable]
        ids, logprobs = score(part, pieces.behind(places), pieces.top)
        return pieces.add(ids.cpu().numpy(), logprobs.cpu().numpy())

    def _decode(self) -> list[EngineEvent]:
        batch = self._rows[: self._decoding]
        logits = self._model.decode([r.answer.newest for r in batch], [r.cached for r in batch])
        logits = logits[:, : self._drawable]  # the rows beyond are padding, which was never trained
        drawn: list[int] = logits.argmax(-1).tolist()
        together = _draw_together(batch, logits)
        for i, token in together.items():
            drawn[i] = token
        self._counters.decode_steps += 1
        self._counters.decode_tokens += len(batch)
        now = time.monotonic()
        for running in batch:  # before any of them ends: an end moves other rows with their first `cached` tokens
            running.cached += 1
        events: list[EngineEvent] = []
        for i, running in enumerate(batch):
            answer, sampler = running.answer, running.sampler
            next_token: int | None = drawn[i]
            event: EngineEvent | None
            try:
                if i not in together and not (sampler.plain and answer.is_free):
                    next_token = sampler.draw(
                        logits[i], answer.length, answer.excluded, answer.only, answer.returns, answer.allowed
                    )
                if next_token is None:
                    event = answer.give_up(now)
                else:
                    top = answer.job.top_logprobs
                    logprob = None if top is None else log_probability(logits[i], next_token, top)
                    event = answer.take(next_token, logprob, now)
            except RequestError as e:
                event = Failed(answer.job.id, e)
            if isinstance(event, Finished | Failed):
                del self._answers[answer.job.id]
                self._release(running)
            else:
                running.cached = answer.length - 1  # fewer if the answer went back; later steps overwrite the rest
            if event is not None:
                events.append(event)
        return events

    def _release(self, running: _Running) -> None:
        """Free a row and close the gap, so that the decoding rows stay the first ones."""
        if running.row < self._decoding:
            self._decoding -= 1
            self._swap(running.row, self._decoding)
        else:
            self._prefilling.remove(running)
        self._swap(running.row, len(self._rows) - 1)
        self._rows.pop()

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        one, other = self._rows[a], self._rows[b]
        self._model.cache.swap(a, b, max(one.cached, other.cached))
        self._rows[a], self._rows[b] = other, one
        one.row, other.row = b, a

    def prepare_sleep(self) -> bool:
        return False

    def sleep(self, progress: Callable[[], None]) -> None:
        """Give the cache back; on a GPU, move the weights to host memory, too."""
        self._model.sleep()

    def wake(self, progress: Callable[[], None]) -> None:
        self._model.wake()

    def stats(self) -> EngineStats:
        """Return the current figures. ``extra``: rows used and total, prompts being read, prompt and answer tokens
        computed, mean answers per decode step."""
        counters = self._counters
        return EngineStats(
            pending=len(self._pending) + len(self._constraints or ()),
            active=len(self._rows),
            steps=self._steps,
            extra={
                "slots_used": len(self._rows),
                "slots_total": self._spec.max_batch_size,
                "prefilling": len(self._prefilling),
                "prefill_tokens": counters.prefill_tokens,
                "decode_tokens": counters.decode_tokens,
                "jobs_per_step": round(counters.decode_tokens / max(1, counters.decode_steps), 2),
            },
        )


def _draw_together(batch: Sequence[_Running], logits: torch.Tensor) -> dict[int, int]:
    """Draw for all rows that differ from others in nothing but their random number. Return {row: id}.

    logits  [rows, vocab]
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, running in enumerate(batch):
        if running.sampler.alike is not None and running.answer.is_free:
            groups.setdefault(running.sampler.alike, []).append(row)
    drawn: dict[int, int] = {}
    for rows in groups.values():
        points = [batch[row].sampler.point(batch[row].answer.length, batch[row].answer.returns) for row in rows]
        drawn.update(zip(rows, batch[rows[0]].sampler.draw_together(points, logits[rows]), strict=True))
    return drawn
