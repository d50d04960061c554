"""What a client holds of an answer while it comes, and what it hands out."""

from collections import deque
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from protocol.errors import ErrorCode, FrameError, WireError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability by the model alone, before any sampling parameter.

    bytes  what it adds to the text: UTF-8, of which a character may be incomplete
    top    the likeliest tokens at its place, best first, if they were asked for
    """

    token_id: int
    logprob: float
    bytes: bytes
    top: tuple["TokenLogprob", ...] = ()

    @property
    def text(self) -> str:
        """For people: an incomplete character is U+FFFD."""
        return self.bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of an answer and the ids of its tokens. Either may be empty while the other is not.

    logprobs  one for each id, if they were asked for
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is that has no token yet.

    phase           "loading" (the model), "queued", "compiling" (the constraint of the request) or "prefill"
    queue_position  requests that are before it, 0 is next; None unless queued
    done, total     tokens of the prompt that are computed, and all of them; or how far this part of the load is, in
                    units of its own; None while queued and compiling
    part            of the load: "loading", "warmup", or another that the engine names; None unless loading
    """

    phase: str
    queue_position: int | None = None
    done: int | None = None
    total: int | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    finish_reason  "stop", "length", "cancelled" or "banned_strings" (protocol.messages.FinishReason)
    usage          counts of tokens: ``prompt_tokens``, ``completion_tokens``; and where they are not 0 or do not apply
                   left out, ``cached_tokens`` (of the prompt, found computed), ``draft_accepted`` and
                   ``draft_rejected`` (speculated ones), ``resumes`` (how often the answer went on in another worker)
    logprobs       one for each token id, if they were asked for
    timings        ``queue_ms`` (from acceptance to the worker), ``prefill_ms`` (to the first token), ``decode_ms``
                   (to the end), ``tokens_per_s`` (while decoding); what was not measured is left out
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: dict[str, Any]
    timings: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class StreamState:
    """One request, from GENERATE to the last thing its reader took.

    deltas    arrived, not yet taken
    report    the newest, not yet taken
    owed      events taken since the last CREDIT
    ended     nothing more will arrive
    error     how it ended, if badly; cleared when it was raised, so that it is raised once
    """

    id: int
    next_seq: int = 0
    owed: int = 0
    arrivals: int = 0
    deltas: deque[Delta] = field(default_factory=deque)
    accepted: dict[str, Any] | None = None
    report: Progress | None = None
    cancel_sent: bool = False
    abandoned: bool = False
    ended: bool = False
    error: WireError | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class CallState:
    """One CALL and its answer."""

    id: int
    ended: bool = False
    error: WireError | None = None
    result: dict[str, Any] = field(default_factory=dict)


Touched = StreamState | CallState


def read_logprobs(token_ids: tuple[int, ...], entries: Any) -> tuple[TokenLogprob, ...]:
    """Those of an event, as ``protocol.messages`` has them. Raises FrameError for anything else."""
    try:
        if len(entries) != len(token_ids):
            raise ValueError
        return tuple(
            TokenLogprob(*_checked(token_id, logprob, data), tuple(TokenLogprob(*_checked(*other)) for other in top))
            for token_id, (logprob, data, top) in zip(token_ids, entries, strict=True)
        )
    except (TypeError, ValueError):
        raise FrameError(ErrorCode.BAD_FRAME, "its logprobs have the wrong shape") from None


def _checked(token_id: Any, logprob: Any, data: Any) -> tuple[int, float, bytes]:
    if type(token_id) is not int or type(logprob) is not float or type(data) is not bytes:
        raise ValueError
    return token_id, logprob, data


_REPORTS: dict[str, dict[str, type]] = {
    "loading": {"part": str, "done": int, "total": int},
    "queued": {"queue_position": int},
    "compiling": {},
    "prefill": {"done": int, "total": int},
}


def read_report(fields: dict[str, Any]) -> Progress | None:
    """What REPORT says, as ``protocol.messages`` has it; None for a phase that is unknown here, or nonsense."""
    told = _REPORTS.get(str(fields.get("phase")))
    if told is None or any(type(fields.get(name)) is not kind for name, kind in told.items()):
        return None
    return Progress(str(fields["phase"]), **{name: fields[name] for name in told})


def token_ids_in(result: dict[str, Any]) -> tuple[int, ...]:
    """The ids that ``tokenize`` found. Raises INTERNAL for a reply of another shape."""
    packed = result.get("token_ids")
    if type(packed) is not bytes or len(packed) % 4:
        raise WireError(ErrorCode.INTERNAL, "the reply to tokenize holds no token ids")
    return Struct(f"<{len(packed) // 4}I").unpack(packed)


def text_in(result: dict[str, Any]) -> str:
    """The text that ``detokenize`` made. Raises INTERNAL for a reply of another shape."""
    text = result.get("text")
    if type(text) is not str:
        raise WireError(ErrorCode.INTERNAL, "the reply to detokenize holds no text")
    return text
