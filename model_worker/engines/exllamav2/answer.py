"""Make the events of a job from the ids that ExLlamaV2's generator has drawn. Does not import exllamav2."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from model_worker.engine import DrawnToken, Failed, Finished, Job, NewTokens, PromptLogprobs
from model_worker.engines.banned import BannedStrings, BanVerdict, Healing
from model_worker.engines.exllamav2.decode.graphs import finish
from model_worker.engines.exllamav2.options import SCORED_LOGITS
from model_worker.engines.prompt_scores import PromptPieces, score
from model_worker.text import LoopWatch, TextStream
from protocol.errors import RequestError
from protocol.messages import FinishReason
from protocol.process.worker_spec import PAGE_TOKENS

COMPLETE, FAILED = "complete", "failed"
"""Reasons for which a constraint ends an AnswerJob. COMPLETE: nothing can follow. FAILED: it has become too costly."""

Redraw = Callable[[Any, Sequence[int], Iterable[int]], Any | None]
"""Cancels an AnswerJob and returns a new one, first in the queue, that goes on behind the kept ids. The next draw does
not choose a blocked id. Arguments: (AnswerJob, ids kept, ids blocked). Returns None if no token is left to draw."""
NewStream = Callable[[Sequence[int]], TextStream]
"""Makes the stream of the text that follows these ids."""


class ExLlamaV2Answer:
    """A job, its AnswerJob in the generator, and its text so far.

    healing  how to heal the prompt's last token (engines/healing): the first drawn token replaces that token
    """

    __slots__ = ("_delivered", "_first", "_healing", "_loops", "_started", "_unstopped", "handle", "job", "text")

    def __init__(self, job: Job, handle: Any, text: TextStream, healing: Healing | None = None) -> None:
        self.job, self.handle, self.text = job, handle, text
        self._healing = healing
        self._delivered = 0
        self._started: float | None = None
        self._first: float | None = None
        self._unstopped = job.min_new_tokens  # number of first tokens in which no stop string is looked for
        self._loops = LoopWatch(job.stop_on_loop) if job.stop_on_loop else None
        if not self._unstopped:
            text.stop_at(job.stop)
        for token in job.resumed_ids:  # the client already has the text of these tokens
            self._delivered += 1
            if self._push(token, self._delivered)[1]:
                raise RequestError("resumed_ids hold a stop string: the answer had ended", field="resumed_ids")
            if self._loops is not None:  # a loop that was delivered ends the answer with the next token
                self._loops.push(token)

    def begin(self, now: float) -> None:
        """Note that the computation begins. ``now`` is in seconds of the monotonic clock."""
        if self._started is None:
            self._started = now

    def take(self, now: float) -> NewTokens | Finished | Failed | None:
        """Return the event of the last step. If it ends the answer and ``handle.ended`` is None, the caller must cancel
        the handle."""
        handle = self.handle
        ids, logprobs = handle.fresh, handle.fresh_logprobs
        handle.fresh = []
        if logprobs:
            handle.fresh_logprobs = []
        if self._first is None:
            self._first = now
        plain = not self._unstopped and self._healing is None and self._loops is None
        if plain and len(ids) == 1 and handle.ended is None:
            self._delivered += 1  # nearly all events are of this kind
            text, found = self.text.push(ids[0])
            if found:
                return self._finished(ids, text, "stop", now, logprobs)
            return NewTokens(self.job.id, ids, text, logprobs)
        if handle.ended == FAILED:
            return Failed(self.job.id, handle.failure)
        return self._take(ids, logprobs, handle.ended, now)

    def _take(
        self, ids: list[int], logprobs: list[DrawnToken], ended: str | None, now: float
    ) -> NewTokens | Finished | None:
        text, found, looped = "", False, False
        if self._healing is not None:
            text, found = self.text.push(ids[0])
            text = self._healing.rest(text)
            ids, logprobs, self._healing = ids[1:], logprobs[1:], None
        for number, token in enumerate(ids, 1):
            if found or (ended == "stop" and number == len(ids)):
                break  # the end token has no text
            new, found = self._push(token, self._delivered + number)
            text += new
            looped = not found and self._ends_loop(token, self._delivered + number)
            if found or looped:  # tokens that were speculated behind the end are not part of the answer
                looped = looped and not (ended == COMPLETE and number == len(ids))
                ids, logprobs = ids[:number], logprobs[:number]
                break
        self._delivered += len(ids)
        if found:
            return self._finished(ids, text, "stop", now, logprobs)
        if looped:
            return self._finished(ids, text + self.text.finish(), FinishReason.LOOP, now, logprobs)
        if ended is None:
            return NewTokens(self.job.id, ids, text, logprobs) if ids or text else None
        return self._finished(ids, text + self.text.finish(), ended, now, logprobs)

    def _push(self, token: int, number: int) -> tuple[str, bool]:
        """Return (the text that the answer's ``number``-th token completes, whether a stop string ends in it)."""
        if self._unstopped and number > self._unstopped:
            self.text.stop_at(self.job.stop)
            self._unstopped = 0
        return self.text.push(token)

    def _ends_loop(self, token: int, number: int) -> bool:
        """Take the answer's ``number``-th token. Return whether the answer ends with it, because it repeats itself."""
        return self._loops is not None and self._loops.push(token) and number >= self.job.min_new_tokens

    def _finished(self, ids: list[int], text: str, reason: str, now: float, logprobs: list[DrawnToken]) -> Finished:
        handle = self.handle
        first = self._first or now
        cached = (handle.cached_pages * PAGE_TOKENS + handle.cached_tokens) // len(handle.sequences)
        return Finished(
            self.job.id,
            ids,
            text,
            FinishReason.STOP if reason == COMPLETE else reason,
            prompt_tokens=len(self.job.prompt_ids),
            completion_tokens=self._delivered,
            cached_tokens=min(cached, len(self.job.prompt_ids)),  # of a resumed answer, its own tokens do not count
            prefill_s=first - (self._started or first),
            decode_s=now - first,
            logprobs=logprobs,
            draft_accepted=handle.accepted_draft_tokens,
            draft_rejected=handle.rejected_draft_tokens,
            stop_string=self.text.found if reason == FinishReason.STOP else None,
        )


class GuardedAnswer(ExLlamaV2Answer):
    """An answer that must not hold certain strings (engines/banned): it may go back and draw again."""

    __slots__ = (
        "_cached",
        "_judge",
        "_kept",
        "_logprobs",
        "_new_stream",
        "_prefix_ids",
        "_redraw",
        "_silent",
        "_speculated",
    )

    def __init__(
        self, job: Job, handle: Any, new_stream: NewStream, redraw: Redraw, healing: Healing | None = None
    ) -> None:
        self._prefix_ids = healing.prompt_ids if healing else job.prompt_ids  # ids before the first drawn token
        super().__init__(job, handle, new_stream(self._prefix_ids), healing)
        self.text.stop_at(())  # the judge looks for stop strings, too
        self._new_stream, self._redraw = new_stream, redraw
        self._judge = BannedStrings(
            job.banned_strings, job.stop, minimum=job.min_new_tokens, limit=job.max_new_tokens,
            healed=healing is not None,
        )  # fmt: skip
        self._kept: list[int] = []  # drawn tokens that were not taken back
        self._silent: list[bool] = []  # for each kept token, whether it completed no text
        self._logprobs: list[DrawnToken] = []  # of the kept tokens that are not delivered
        self._unstopped = 1  # so that every step goes through _take
        self._cached: int | None = None
        self._speculated = (0, 0)

    def _take(
        self, ids: list[int], logprobs: list[DrawnToken], ended: str | None, now: float
    ) -> NewTokens | Finished | None:
        final, text = [], ""
        for number, token in enumerate(ids):
            at_end = ended is not None and number == len(ids) - 1
            if not (at_end and ended == "stop"):
                self._kept.append(token)
                self._logprobs += logprobs[number : number + 1]
                new = self.text.push(token)[0]
                self._silent.append(not new)
                if self._healing is not None and len(self._kept) == 1:
                    new = self._healing.rest(new)
                verdict = self._judge.push(token, new)
                final += self._release(verdict)
                text += verdict.text
                if verdict.back_to is not None:
                    verdict = self._go_back(verdict.back_to)
                    final += self._release(verdict)
                    text += verdict.text
                    return self._event(final, text, verdict.ended, now)
                if verdict.ended:
                    return self._event(final, text, verdict.ended, now)
            if at_end:
                verdict = self._judge.finish(self.text.finish())
                if verdict.back_to is not None:
                    verdict = self._go_back(verdict.back_to)
                elif verdict.ended is None and ended == "stop":
                    self._kept.append(token)
                    self._logprobs += logprobs[number : number + 1]
                    verdict = BanVerdict(verdict.tokens + 1, verdict.text, None, ended)
                else:
                    verdict = BanVerdict(verdict.tokens, verdict.text, None, verdict.ended or ended)
                final += self._release(verdict)
                return self._event(final, text + verdict.text, verdict.ended, now)
        return self._event(final, text, None, now)

    def _release(self, verdict: BanVerdict) -> list[tuple[int, DrawnToken | None]]:
        """Return the tokens that a verdict makes final, except a healed one."""
        begin, end = self._delivered, self._delivered + verdict.tokens
        self._delivered = end
        logprobs: list[DrawnToken | None] = [*self._logprobs[: verdict.tokens]]
        del self._logprobs[: verdict.tokens]
        released = list(zip(self._kept[begin:end], logprobs or [None] * verdict.tokens, strict=True))
        return released[1:] if self._healing is not None and begin == 0 else released

    def _go_back(self, kept: int) -> BanVerdict:
        """Draw again behind the first ``kept`` tokens. Return the verdict that ends the answer if that is
        impossible."""
        handle = self.handle
        if self._cached is None:
            self._cached = (handle.cached_pages * PAGE_TOKENS + handle.cached_tokens) // len(handle.sequences)
        self._speculated = (
            self._speculated[0] + handle.accepted_draft_tokens, self._speculated[1] + handle.rejected_draft_tokens,
        )  # fmt: skip
        if handle.bias is not None:
            handle.bias.count_only(self._kept[:kept])
        del self._kept[kept:], self._silent[kept:]
        del self._logprobs[max(kept - self._delivered, 0) :]
        new = self._redraw(handle, self._kept, self._judge.blocked)
        if new is None:
            return self._judge.give_up()
        self.handle = new
        complete = kept
        while complete and self._silent[complete - 1]:
            complete -= 1
        self.text = self._new_stream((*self._prefix_ids, *self._kept[:complete]))
        for token in self._kept[complete:]:
            self.text.push(token)  # the beginning of a character, whose end is drawn again
        return BanVerdict()

    def _event(
        self, final: list[tuple[int, DrawnToken | None]], text: str, ended: str | None, now: float
    ) -> NewTokens | Finished | None:
        ids = [token for token, _ in final]
        logprobs = [logprob for _, logprob in final if logprob is not None]
        if ended is None and self._loops is not None:
            # Only tokens that are not taken back are looked at. What the judge still holds is left out of the answer.
            looped = [self._ends_loop(token, self._delivered) for token in ids]
            ended = FinishReason.LOOP if any(looped) else None
        if ended is None:
            return NewTokens(self.job.id, ids, text, logprobs) if ids or text else None
        event = self._finished(ids, text, ended, now, logprobs)
        event.stop_string = self._judge.found if ended == FinishReason.STOP else None
        if self._healing is not None and self._delivered:
            event.completion_tokens -= 1
        if self._cached is not None:
            event.cached_tokens = self._cached
            event.draft_accepted += self._speculated[0]
            event.draft_rejected += self._speculated[1]
        return event


# Compute the log-probabilities of a prompt's tokens while the prompt is read. Does not import exllamav2.
#
# The package's pass over a chunk ends with the last keys and values. Here the pass goes on to the last hidden states.
# The head makes their logits, for some places at a time, and only the likeliest of each place are kept.


class _OnTheWay:
    """Tensors that a GPU copies to the host, behind all work that was queued there before."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event: Any = None
        self.tensors = tensors
        if tensors[0].is_cuda:
            self.tensors = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for target, source in zip(self.tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def has_come(self, *, wait: bool) -> bool:
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())


class PromptScorer:
    """The log-probabilities of one prompt.

    vocab  ids below this are in the vocabulary
    place  the first place, counted in tokens, whose logits are wanted
    done   whether ``take`` has returned all pieces
    """

    def __init__(self, pieces: PromptPieces, vocab: int) -> None:
        self._pieces, self._vocab = pieces, vocab
        self.place = pieces.next - 1
        self._last = len(pieces.prompt) - 1
        self._on_the_way: deque[_OnTheWay] = deque()
        self._alone = pieces.alone()

    def read(self, model: Any, ids: torch.Tensor, start: int, cache: Any, params: Any, loras: Any) -> None:
        """Queue a pass over ids [1, tokens], the prompt's tokens from ``start`` on, and their log-probabilities.

        model, cache, params, loras  the package's
        """
        states = model.forward_chunk(
            input_ids=ids, cache=cache, attn_params=params, loras=loras, last_id_only=True, return_last_state=True
        )["last_state"]
        places = self._pieces.wanted(start, start + ids.shape[1])
        tokens = self._pieces.behind(places)
        rows = max(1, SCORED_LOGITS // model.modules[-1].out_features)
        scored = []
        for begin in range(0, len(tokens), rows):
            at = places.start - start + begin
            some = tokens[begin : begin + rows]
            logits = _logits(model, states[:, at : at + len(some)].contiguous(), loras)
            scored.append(score(logits[0, :, : self._vocab], some, self._pieces.top))
        if scored:
            self._on_the_way.append(_OnTheWay(tuple(torch.cat(parts) for parts in zip(*scored, strict=True))))

    def take(self, *, wait: bool) -> list[PromptLogprobs]:
        """Return the pieces that have come. ``wait``: wait for all that was queued."""
        found, self._alone = self._alone, []
        while self._on_the_way and self._on_the_way[0].has_come(wait=wait):
            ids, logprobs = self._on_the_way.popleft().tensors
            found += self._pieces.add(ids.numpy(), logprobs.numpy())
        return found

    @property
    def done(self) -> bool:
        return not self._alone and self._pieces.next > self._last


def _logits(model: Any, states: torch.Tensor, loras: Any) -> torch.Tensor:
    """Return the logits fp16 [1, places, padded vocabulary] of hidden states, which the last layer made."""
    for module in model.modules[model.head_layer_idx - 1 :]:  # the norm and the head
        if module.device_idx is not None and module.device_idx >= 0 and states.is_cuda:
            states = states.to(f"cuda:{module.device_idx}", non_blocking=True)
        states = module.forward(states, cache=None, attn_params=None, past_len=0, loras=loras)
    finish(model, states)
    return states
