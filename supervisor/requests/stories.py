"""What became of each request, and when: the last requests that have ended, and the unfinished ones. Pure.

A request notes a step when it is accepted, given to a worker, taken back from a worker, cancelled or ended. That is a
handful of steps for each request, and none for a token. No step holds a text of a prompt or of an answer.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from protocol.errors import ErrorCode, RequestError, WireError
from protocol.presets import changed_option
from supervisor.keys.rights import Identity, may_see

KEPT: Final = 2000
"""Ended requests that are remembered."""
MOST_STEPS: Final = 50
"""Steps that are noted of one request. Further ones are left out, except for its end."""
MOST_FOUND: Final = 100
"""The most requests that one id finds: an HTTP request for many answers is many requests."""
MOST_CHARACTERS: Final = 256
"""Characters of an error's message that are kept."""
MOST_TOKENS: Final = 1 << 31
"""The longest prompt or answer that the supervisor believes a worker."""
MOST_MS: Final = 1e12
"""The longest time that the supervisor believes a worker."""
LONGEST_REASON: Final = 64
"""Characters of a finish reason, and of an option's name, that are kept."""
MOST_LEFT_OUT, MOST_FORCED = 8, 64
"""Options of each kind that are kept. There are fewer."""
SHORTEST_S: Final = 0.001
"""The shortest time from the first token to the end that gives a speed. Within a shorter one come the tokens of one
step or one frame, however fast the model is."""
DISCONNECTED: Final = "disconnected"
"""The finish reason of a request whose client has gone."""
OTHER: Final = "other"
"""The finish reason, or the name of the error, of an end that a worker has named in another way than it may."""
_ERROR_NAMES: Final = frozenset(code.wire_name for code in ErrorCode)
_WITHOUT_VALUES: Final = frozenset({ErrorCode.CONTEXT_OVERFLOW.wire_name, ErrorCode.HELPER_FAILED.wire_name})
"""Errors of workers whose messages hold numbers, but no value of the request."""
_OPTION: Final = re.compile("[a-z_]{1,32}")


class TimedStep(NamedTuple):
    """Something that happened to a request.

    at     monotonic seconds
    step   what happened, see protocol.activity.StoryStep
    facts  what else is known, ready for the wire
    """

    at: float
    step: str
    facts: Mapping[str, Any]


class RequestEnd(NamedTuple):
    """How a request ended. It holds no text of the request.

    finish_reason      why the answer ended without an error; None if it ended with one, or has not ended
    error              the name of the error; None if there is none
    error_message      the error in words, see ``_kept_words``
    computed           whether a worker has finished the answer. Only then anything below is known
    cached_tokens      tokens of the prompt that the engine had in its cache
    completion_tokens  tokens of the answer; None for those that its client got
    draft_accepted, draft_rejected  speculated tokens that were right, and wrong
    queue_ms           milliseconds until the worker began to compute the request
    prefill_ms, decode_ms  milliseconds until the first token, and from there to the end, in the last worker
    max_tokens         the most tokens that the answer could have, if the context has cut the request's own max_tokens
    left_out           the options that the worker did without
    forced             the options that the worker replaced, each with its new value if that is a number or a switch
    """

    finish_reason: str | None = None
    error: str | None = None
    error_message: str | None = None
    computed: bool = False
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    draft_accepted: int | None = None
    draft_rejected: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    max_tokens: int | None = None
    left_out: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()

    @classmethod
    def of_error(cls, error: WireError) -> Self:
        """Return the end of a request that the supervisor itself ends with an error."""
        return cls(error=error.code.wire_name, error_message=error.message[:MOST_CHARACTERS])

    @classmethod
    def of_worker(cls, body: Mapping[str, Any], *, failed: bool) -> Self:
        """Return the end of a request that a worker has ended. What cannot be is left out.

        body    the map of the last event, see protocol.bodies.FinishedEvent and ErrorEvent
        failed  whether the event is an error
        """
        if failed:
            error = _map(body.get("error"))
            name: str = error["name"] if error.get("name") in _ERROR_NAMES else OTHER
            return cls(error=name, error_message=_kept_words(name, error))
        usage, timings, reason = _map(body.get("usage")), _map(body.get("timings")), body.get("finish_reason")
        left_out, forced = body.get("left_out"), body.get("forced")
        return cls(
            finish_reason=reason[:LONGEST_REASON] if isinstance(reason, str) else OTHER,
            computed=True,
            cached_tokens=_whole(usage.get("cached_tokens", 0)),
            completion_tokens=_whole(usage.get("completion_tokens")),
            draft_accepted=_whole(usage.get("draft_accepted")),
            draft_rejected=_whole(usage.get("draft_rejected")),
            queue_ms=_milliseconds(timings.get("queue_ms")),
            prefill_ms=_milliseconds(timings.get("prefill_ms")),
            decode_ms=_milliseconds(timings.get("decode_ms")),
            max_tokens=_whole(body.get("max_tokens")),
            left_out=tuple(
                name[:LONGEST_REASON]
                for name in (left_out[:MOST_LEFT_OUT] if isinstance(left_out, list) else ())
                if isinstance(name, str)
            ),
            forced=tuple(
                changed_option(name[:LONGEST_REASON], value)
                for name, value in islice(_map(forced).items(), MOST_FORCED)
                if isinstance(name, str)
            ),
        )


NOT_ENDED: Final = RequestEnd()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The facts of one request. ``InFlight.record`` makes it, when a request has ended and while it has not.

    The metrics, the totals of the model, the request log, and the verbs ``story`` and ``ended_requests`` take what they
    say of a request from its record. Times are monotonic seconds.

    id           CONNECTION-REQUEST, as the verb ``requests`` names it
    trace_ids    the names that its client gave it
    notes        what became of the options of its sender, in words
    tokens       tokens of the answer
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
    steps: tuple[TimedStep, ...]
    notes: tuple[str, ...] = ()
    end: RequestEnd = NOT_ENDED
    ended: float | None = None

    def is_named(self, name: str) -> bool:
        """Return whether the id, or one of the names, is ``name``."""
        return self.id == name or name in self.trace_ids

    def summary(self, unix: float) -> dict[str, Any]:
        """Return who asked, what the request took, and how it ended, see protocol.activity.RequestSummary.

        unix  what has to be added to monotonic seconds to get seconds since 1970
        """
        end = self.end
        return {
            "id": self.id,
            "trace_ids": list(self.trace_ids),
            "model": self.model,
            "key": self.owner.name,
            "priority": self.priority,
            "finish_reason": end.finish_reason,
            "error": end.error,
            "error_message": end.error_message,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "tokens": self.tokens,
            "resumes": self.resumes,
            "accepted": round(self.accepted + unix, 3),
            "queue_ms": self._since(self.started) if end.queue_ms is None else round(end.queue_ms, 1),
            "first_token_ms": self._since(self.first_token or None),
            "total_ms": self._since(self.ended),
            "tokens_per_s": self._speed(),
            "worker": next((step.facts["worker"] for step in reversed(self.steps) if step.step == "placed"), None),
        }

    def describe(self, state: str, unix: float) -> dict[str, Any]:
        """Return the story as the verb ``story`` shows it, without the events of workers.

        state  the state of the request
        unix   as for ``summary``
        """
        steps = [*self.steps]
        if self.first_token:
            steps.append(TimedStep(self.first_token, "first_token", {}))
        steps.sort(key=lambda step: step.at)
        if self.ended is not None:
            steps.append(TimedStep(self.ended, "ended", {}))
        ignored = [f"ignored {name}" for name in self.end.left_out]
        cut = [] if self.end.max_tokens is None else [f"changed max_tokens={self.end.max_tokens}"]
        cut += [f"changed {what}" for what in self.end.forced]
        return {
            **self.summary(unix),
            "notes": [*self.notes, *ignored, *cut],
            "state": state,
            "prompt_tokens_estimate": self.prompt_tokens_estimate,
            "steps": [{"ms": self._since(step.at), "step": step.step, **step.facts} for step in steps],
        }

    def _speed(self) -> float | None:
        """Return the tokens of the answer per second, without the first one; None if there was no time to measure.

        The worker's own time counts if it is known. Frames may come to the supervisor late, and then all at once.
        """
        if not self.first_token or self.ended is None or self.tokens < 2:
            return None
        decode_ms = None if self.resumes else self.end.decode_ms
        seconds = decode_ms / 1000 if decode_ms else self.ended - self.first_token
        return round((self.tokens - 1) / seconds, 1) if seconds >= SHORTEST_S else None

    def _since(self, at: float | None) -> float | None:
        return None if at is None else round(1000 * max(0.0, at - self.accepted), 1)


class Stories:
    """The last requests that have ended. ``listener``, if it is set, is called with each one that ends.

    newest  the number of the last request that has ended. The first one has number 1, and there are no gaps
    """

    def __init__(self, listener: Callable[[RequestRecord], None] | None = None) -> None:
        """listener  told of each request that has ended"""
        self._ended: deque[RequestRecord] = deque(maxlen=KEPT)
        self._listener = listener
        self.newest = 0

    def add(self, story: RequestRecord) -> None:
        """Remember a request that has ended."""
        self._ended.append(story)
        self.newest += 1
        if self._listener is not None:
            self._listener(story)

    def since(self, after: int | None, limit: int, identity: Identity, unix: float) -> dict[str, Any]:
        """Return the result of the verb ``ended_requests`` without the session: the newest requests, the oldest first.

        after  the number of the last request that the caller knows; None if it knows none
        limit  the most requests
        unix   as for ``RequestRecord.summary``
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

    def find(self, name: str, identity: Identity, unfinished: Iterable[RequestRecord]) -> list[RequestRecord]:
        """Return the requests that a name means, the oldest first, as far as ``identity`` may know of them.

        Raises RequestError if there is none.
        """
        found = [story for known in (self._ended, unfinished) for story in known if story.is_named(name)]
        seen = [story for story in found if may_see(identity, story.owner) and identity.may_use(story.model)]
        if not seen:
            why = f"it was refused, or it is older than the last {KEPT} that have ended, or it never was"
            raise RequestError(f"no request {name[:128]!r} is known: {why}", field="id")
        return seen[-MOST_FOUND:]


def _kept_words(name: str, error: Mapping[str, Any]) -> str | None:
    """Return what is kept of the message of a worker's error. A message may quote the request, such as its schema."""
    message, field = error.get("message"), error.get("field")
    if name in _WITHOUT_VALUES and isinstance(message, str):
        return message[:MOST_CHARACTERS]
    option = _OPTION.match(field) if isinstance(field, str) else None
    return None if option is None else f"{option[0]} was refused: the client was told why"


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _milliseconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= MOST_MS else None
