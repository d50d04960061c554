"""Make the events of a job from the ids that the transformers engine has drawn. Does not import torch."""

from collections.abc import Callable, Collection, Sequence

from model_worker.engine import DrawnToken, Finished, Job, NewTokens
from model_worker.engines.banned import BannedStrings, Verdict
from model_worker.engines.constraint import AnyConstraint, Mask
from model_worker.engines.healing import Healing
from model_worker.loop_watch import LoopWatch
from model_worker.text import TextStream
from protocol.errors import RequestError
from protocol.messages import FinishReason

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
        verdicts: list[Verdict] = []
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
