"""What became of each request, and when: the last requests that have ended, and the unfinished ones. Pure.

A request notes a step when it is accepted, given to a worker, taken back from a worker, cancelled or ended. That is a
handful of steps for each request, and none for a token. No step holds a text of a prompt or of an answer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from protocol.errors import RequestError, WireError
from supervisor.keys.rights import Identity, may_see

KEPT: Final = 2000
"""Ended requests that are remembered."""
MOST_STEPS: Final = 50
"""Steps that are noted of one request. Further ones are left out, except for its end."""
MOST_FOUND: Final = 100
"""The most requests that one id finds: an HTTP request for many answers is many requests."""
MOST_LISTED: Final = 1000
"""The most ended requests in one list."""
MOST_CHARACTERS: Final = 256
"""Characters of an error's message that are kept."""


class Step(NamedTuple):
    """Something that happened to a request.

    at     monotonic seconds
    step   what happened, see protocol.story.StoryStep
    facts  what else is known, ready for the wire
    """

    at: float
    step: str
    facts: Mapping[str, Any]


class Outcome(NamedTuple):
    """How an answer ended. One of ``finish_reason`` and ``error`` is None.

    finish_reason      why the answer ended without an error
    error              the name of the error
    cached_tokens      tokens of the prompt that the engine had in its cache; None if no worker has said so
    completion_tokens  tokens of the answer; None for those that its client got
    max_tokens         the most tokens that the answer could have, if the context has cut the request's own max_tokens
    left_out           the options that the worker did without
    queue_ms           milliseconds until the worker began to compute the request, if the worker has said so
    error_message      the error in words. It never holds a text of the request, see ``worker_events._kept_words``
    forced             the options that the worker replaced, each with its new value if that is a number or a switch
    """

    finish_reason: str | None
    error: str | None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    max_tokens: int | None = None
    left_out: tuple[str, ...] = ()
    queue_ms: float | None = None
    error_message: str | None = None
    forced: tuple[str, ...] = ()

    @classmethod
    def of_error(cls, error: WireError) -> Self:
        """Return the outcome of a request that the supervisor itself ends with an error."""
        return cls(None, error.code.wire_name, error_message=error.message[:MOST_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of one request. Times are monotonic seconds.

    id           CONNECTION-REQUEST, as the verb ``requests`` names it
    trace_ids    the names that its client gave it
    notes        what became of the options of its sender, in words
    first_token  when its first token came; 0 if none did
    ended        when it ended; None if it has not
    """

    id: str
    trace_ids: tuple[str, ...]
    model: str
    owner: Identity
    priority: str
    prompt_tokens: int | None
    prompt_tokens_estimate: int
    tokens: int
    resumes: int
    accepted: float
    started: float | None
    first_token: float
    steps: tuple[Step, ...]
    outcome: Outcome | None = None
    ended: float | None = None
    notes: tuple[str, ...] = ()

    def is_named(self, name: str) -> bool:
        """Return whether the id, or one of the names, is ``name``."""
        return self.id == name or name in self.trace_ids

    def summary(self, unix: float) -> dict[str, Any]:
        """Return who asked, what the request took, and how it ended, see protocol.story.RequestSummary.

        unix  what has to be added to monotonic seconds to get seconds since 1970
        """
        outcome = self.outcome or _NO_OUTCOME
        tokens = self.tokens if outcome.completion_tokens is None else outcome.completion_tokens
        answer_s = (self.ended or 0.0) - self.first_token if self.first_token else 0.0
        return {
            "id": self.id,
            "trace_ids": list(self.trace_ids),
            "model": self.model,
            "key": self.owner.name,
            "priority": self.priority,
            "finish_reason": outcome.finish_reason,
            "error": outcome.error,
            "error_message": outcome.error_message,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
            "tokens": tokens,
            "resumes": self.resumes,
            "accepted": round(self.accepted + unix, 3),
            "queue_ms": self._since(self.started) if outcome.queue_ms is None else round(outcome.queue_ms, 1),
            "first_token_ms": self._since(self.first_token or None),
            "total_ms": self._since(self.ended),
            "tokens_per_s": round((tokens - 1) / answer_s, 1) if tokens > 1 and answer_s > 0 else None,
            "worker": next((step.facts["worker"] for step in reversed(self.steps) if step.step == "placed"), None),
        }

    def describe(self, state: str, unix: float) -> dict[str, Any]:
        """Return the story as the verb ``story`` shows it, without the events of workers.

        state  the state of the request
        unix   as for ``summary``
        """
        steps = [*self.steps]
        if self.first_token:
            steps.append(Step(self.first_token, "first_token", {}))
        steps.sort(key=lambda step: step.at)
        if self.ended is not None and self.outcome is not None:
            steps.append(Step(self.ended, "ended", {}))
        outcome = self.outcome or _NO_OUTCOME
        ignored = [f"ignored {name}" for name in outcome.left_out]
        cut = [] if outcome.max_tokens is None else [f"changed max_tokens={outcome.max_tokens}"]
        cut += [f"changed {what}" for what in outcome.forced]
        return {
            **self.summary(unix),
            "notes": [*self.notes, *ignored, *cut],
            "state": state,
            "prompt_tokens_estimate": self.prompt_tokens_estimate,
            "steps": [{"ms": self._since(step.at), "step": step.step, **step.facts} for step in steps],
        }

    def _since(self, at: float | None) -> float | None:
        return None if at is None else round(1000 * max(0.0, at - self.accepted), 1)


_NO_OUTCOME: Final = Outcome(None, None)


class Stories:
    """The last requests that have ended. ``listener``, if it is set, is called with each one that ends.

    newest  the number of the last request that has ended. The first one has number 1, and there are no gaps
    """

    def __init__(self, listener: Callable[[Story], None] | None = None) -> None:
        """listener  told of each request that has ended"""
        self._ended: deque[Story] = deque(maxlen=KEPT)
        self._listener = listener
        self.newest = 0

    def add(self, story: Story) -> None:
        """Remember a request that has ended."""
        self._ended.append(story)
        self.newest += 1
        if self._listener is not None:
            self._listener(story)

    def since(self, after: int | None, limit: int, identity: Identity, unix: float) -> dict[str, Any]:
        """Return the result of the verb ``ended_requests`` without the session: the newest requests, the oldest first.

        after  the number of the last request that the caller knows; None if it knows none
        limit  the most requests
        unix   as for ``Story.summary``
        """
        found: list[dict[str, Any]] = []
        number, known, full = self.newest, after or 0, False
        for story in reversed(self._ended):
            if number <= known:
                break
            if may_see(identity, story.owner) and identity.may_use(story.model):
                if full := len(found) == limit:
                    break
                found.append({"number": number, **story.summary(unix)})
            number -= 1
        lost = full or known < self.newest - len(self._ended)
        return {"requests": found[::-1], "last": self.newest, "dropped": after is not None and lost}

    def find(self, name: str, identity: Identity, unfinished: Iterable[Story]) -> list[Story]:
        """Return the requests that a name means, the oldest first, as far as ``identity`` may know of them.

        Raises RequestError if there is none.
        """
        found = [story for known in (self._ended, unfinished) for story in known if story.is_named(name)]
        seen = [story for story in found if may_see(identity, story.owner) and identity.may_use(story.model)]
        if not seen:
            why = f"it was refused, or it is older than the last {KEPT} that have ended, or it never was"
            raise RequestError(f"no request {name[:128]!r} is known: {why}", field="id")
        return seen[-MOST_FOUND:]
