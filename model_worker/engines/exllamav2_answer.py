"""One answer of the exllamav2 engine, from the ids that its generator drew to the events of a job. No exllamav2."""

from typing import Any

from model_worker.engine import Delta, Finished, Job
from model_worker.text import TextStream

PAGE = 256


class Answer:
    """A job, its AnswerJob in the generator, and its text so far."""

    __slots__ = ("_delivered", "_first", "_started", "_unstopped", "handle", "job", "text")

    def __init__(self, job: Job, handle: Any, text: TextStream) -> None:
        self.job, self.handle, self.text = job, handle, text
        self._delivered = 0
        self._started: float | None = None
        self._first: float | None = None
        self._unstopped = job.min_new_tokens  # tokens in which no stop string is looked for
        if not self._unstopped:
            text.stop_at(job.stop)

    def begin(self, now: float) -> None:
        """Its computation begins. Seconds of the monotonic clock."""
        if self._started is None:
            self._started = now

    def take(self, now: float) -> Delta | Finished:
        """What the step just made brought. If it is Finished and ``handle.ended`` is None, a stop string was found:
        the caller cancels the handle."""
        handle = self.handle
        ids, logprobs = handle.fresh, handle.fresh_logprobs
        handle.fresh = []
        if logprobs:
            handle.fresh_logprobs = []
        if self._first is None:
            self._first = now
        ended = handle.ended
        if len(ids) == 1 and ended is None and not self._unstopped:  # nearly all of them
            self._delivered += 1
            text, found = self.text.push(ids[0])
            return (
                self._finished(ids, text, "stop", now, logprobs) if found else Delta(self.job.id, ids, text, logprobs)
            )
        text, found = "", False
        for number, token in enumerate(ids, 1):
            if ended == "stop" and number == len(ids):
                break  # the end token has no text
            if self._unstopped and self._delivered + number > self._unstopped:
                self.text.stop_at(self.job.stop)
                self._unstopped = 0
            new, found = self.text.push(token)
            text += new
            if found:  # what was speculated behind it is no part of the answer
                ids, logprobs = ids[:number], logprobs[:number]
                break
        self._delivered += len(ids)
        if found:
            return self._finished(ids, text, "stop", now, logprobs)
        if ended is None:
            return Delta(self.job.id, ids, text, logprobs)
        return self._finished(ids, text + self.text.finish(), ended, now, logprobs)

    def _finished(self, ids: list[int], text: str, reason: str, now: float, logprobs: list[Any]) -> Finished:
        handle = self.handle
        first = self._first or now
        return Finished(
            self.job.id,
            ids,
            text,
            reason,
            prompt_tokens=len(self.job.prompt_ids),
            completion_tokens=self._delivered,
            cached_tokens=(handle.cached_pages * PAGE + handle.cached_tokens) // len(handle.sequences),
            prefill_s=first - (self._started or first),
            decode_s=now - first,
            logprobs=logprobs,
            draft_accepted=handle.accepted_draft_tokens,
            draft_rejected=handle.rejected_draft_tokens,
        )
